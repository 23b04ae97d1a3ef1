"""How the program of a row was written and run, as the row and its source tell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.published.fields import optional, source_of
from benchmarks.published.rows import Habits, Shape


def habits_of(
    raw: Mapping[str, Any],
    parallel: Mapping[str, Any],
    extra: Mapping[str, Any],
    measured: Mapping[str, Any],
    shape: Shape,
) -> Habits:
    notes = str(raw.get("notes") or "").lower()
    title = source_of(raw).lower()
    kernel = str(extra.get("kernel") or "").lower()
    fsdp = bool(parallel.get("fsdp"))
    recompute, share = _recompute(parallel, measured, notes)
    compiled = parallel.get("compile") is True
    flash = "flash" in kernel or (not kernel and ("flash" in notes or fsdp or shape.family == "llama"))
    megatron = shape.family == "gpt" and not fsdp
    fused = kernel == "fused"  # a softmax written by hand, with scale and mask
    fused_norms = "rms kernel" in kernel or not kernel
    return Habits(
        recompute=recompute,
        recomputed_share=share,
        cheap_again=compiled or "selective op" in notes,
        fused_attention=flash,
        attention=_generation(kernel or notes),
        fused_norms=fused_norms,
        kernels="compiled" if compiled else "kernels" if fused_norms or fused else "none",
        master_weights=not fsdp,
        # 16-bit weights come with 16-bit gradients (2 + 2 + 12 bytes a parameter)
        reduce="bf16" if not fsdp or "'pure'" in notes[:70] or "fms-fsdp" in title else "fp32",
        dropout=megatron,
        bias=megatron,
        # Aleph-Alpha/scaling, src/scaling/transformer/model: the head returns all logits, its loss is in 32 bits
        loss="plain" if "aleph alpha" in title and shape.family == "llama" else "fused",
    )


def _generation(text: str) -> str:
    """Of fused attention, if the text names one; without a number it is the first."""
    found = re.search(r"flash[\s_-]?(?:attention|attn)?[\s_-]?v?(\d)?", text)
    return "flash-1" if found and found[1] != "2" else "flash-2"


def _recompute(parallel: Mapping[str, Any], measured: Mapping[str, Any], notes: str) -> tuple[str, float]:
    said = str(parallel.get("recompute") or "none").lower()
    if said in ("none", "disabled", "false", "no"):
        return "none", 1.0
    if said in ("full", "every_layer", "block", "uniform", "true"):
        return "full", 1.0
    if "layer" in notes or "every" in notes or "every" in said:
        return "full", _share(measured)
    if "selective op" in notes:
        # torchtitan's: every other product of matrices is computed again
        return "full", 0.5
    return "attention", 1.0


def _share(measured: Mapping[str, Any]) -> float:
    """Which part of the layers is computed twice: from the two utilisations if both are told, else a half."""
    useful, spent = optional(measured, "mfu"), optional(measured, "hfu")
    if useful is None or spent is None or spent <= useful:
        return 0.5
    return min(1.0, (spent / useful - 1) * 3)
