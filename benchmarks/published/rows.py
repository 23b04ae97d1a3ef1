"""Rows of published measurements as the benchmark reads them, and why a row cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST = 1e18
"""Numbers from here on are taken for mistakes."""
MOST_DEVICES = 1 << 20
OWN = Path(__file__).parent.parent / "data" / "published" / "measurements.json"
"""The rows that come with the project, each with its source."""


@dataclass(frozen=True)
class Shape:
    """A decoder of the transformer family."""

    family: str
    """``gpt``: two products with a pointwise function between them; ``llama``: gated, with rotary positions."""
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    inner: int
    vocabulary: int
    time: int


@dataclass(frozen=True)
class Layout:
    """How the run was cut."""

    data: int
    tensor: int
    sequence: bool
    zero: int
    inner_data: int
    """Devices over which a hybrid sharded run shards; the others replicate. 0: all."""
    regather: bool
    """Whether gathered weights are dropped after forward (fully sharded) or kept until backward."""
    microbatch: int
    batch: int
    """Samples of the whole step."""
    pipe: int = 1
    virtual: int = 1
    """Stages on each rank of the pipeline."""
    schedule: str = ""
    """Of a pipeline: a name of the compiler's."""

    @property
    def apart(self) -> bool:
        """Whether the schedule computes gradients of weights apart from those of inputs."""
        return self.schedule.startswith("zb")

    @property
    def microbatches(self) -> int:
        return self.batch // (self.microbatch * self.data)


@dataclass(frozen=True)
class Habits:
    """What the row or its source says about how the program was written and run."""

    recompute: str
    """``none``, ``full`` or ``attention`` (the core of attention again)."""
    recomputed_share: float
    """Of all layers; below 1 where every k-th is recomputed."""
    cheap_again: bool
    """Whether layers that are not recomputed keep the results of matrix products and attention alone, and compute what
    is cheap again: what a compiler does that fuses chains of ops, and selection op by op."""
    fused_attention: bool
    attention: str
    """The generation of fused attention kernels: ``flash-1`` or ``flash-2``."""
    fused_norms: bool
    """Whether the module calls a norm that is one op."""
    kernels: str
    """How ops are run: ``none`` (each by itself), ``kernels`` (those written by hand), ``compiled``."""
    master_weights: bool
    """16-bit weights with 32-bit ones in the optimizer's state (Megatron-LM, DeepSpeed); else 32-bit weights that are
    cast (FSDP)."""
    reduce: str
    dropout: bool
    bias: bool
    loss: str
    """``fused`` (one op, which keeps logits alone) or ``plain`` (a log-softmax in 32 bits that is kept, and gathered
    where the vocabulary is cut)."""


@dataclass(frozen=True)
class Machine:
    gpu: str
    per_node: int
    count: int
    interconnect: str


@dataclass(frozen=True)
class Row:
    id: str
    source: str
    tier: str
    shape: Shape
    layout: Layout
    habits: Habits
    machine: Machine
    seconds: float | None
    memory: float | None
    """Peak, GiB."""
    fits: bool | None
    """None: the row says nothing about it."""
    parameters: float | None
    formula: bool
    """Whether the memory is what a formula of the source gives for the program alone, without what the driver takes."""

    @property
    def sweep(self) -> tuple[Any, ...]:
        """Rows of one sweep differ in their plan alone."""
        return (self.source, self.shape, self.machine, self.layout.batch)

    @property
    def group(self) -> str:
        """A model at one length on one kind of device and number of them."""
        s = self.shape
        return f"{self.machine.gpu}/{self.machine.count}/{s.family}-{s.layers}-{s.hidden}/{s.time}"


@dataclass(frozen=True)
class Skipped:
    id: str
    source: str
    reason: str


class Unreadable(Exception):
    """Why a row is skipped."""


def read(path: Path) -> list[Mapping[str, Any]]:
    """The raw rows of a file. Raises Unreadable if it is no list of objects."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise Unreadable(f"cannot read {path}: {fault.strerror}") from None
    except (ValueError, UnicodeDecodeError) as fault:
        raise Unreadable(f"{path} is no JSON: {fault}") from None
    if isinstance(found, dict):
        found = found.get("rows", found.get("measurements"))
    if not isinstance(found, list):
        raise Unreadable(f"{path} holds no list of rows")
    return found


def parse_all(raw: Iterable[Any]) -> tuple[list[Row], list[Skipped]]:
    """The rows that can be predicted, and the others with the reason."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for number, one in enumerate(raw):
        name = str(one.get("id") or f"row {number}") if isinstance(one, Mapping) else f"row {number}"
        source = source_of(one) if isinstance(one, Mapping) else ""
        try:
            rows.append(parse(one))
        except Unreadable as fault:
            skipped.append(Skipped(name, source, str(fault)))
    return rows, skipped


def parse(raw: Any) -> Row:
    """One row. Raises Unreadable with the reason why it cannot be predicted."""
    if not isinstance(raw, Mapping):
        raise Unreadable("it is no object")
    parallel, model, measured = part(raw, "parallel"), part(raw, "model"), part(raw, "measured")
    extra = part(raw, "extra")
    if extra.get("suspect"):
        raise Unreadable(f"suspect: {extra['suspect']}")
    if _number(model, "experts", 0) > 1:
        raise Unreadable("mixture of experts, whose routing the row does not tell")
    if _number(parallel, "cp", 1) > 1:
        raise Unreadable("cuts attention over a context axis, for which no preset makes a plan")
    precision = str(parallel.get("precision") or "")
    if "8" in precision:
        raise Unreadable(f"computes in 8 bits ({precision}); programs are captured in 16")
    if not any(word in precision.lower() for word in ("bf16", "fp16", "f16", "bfloat16", "half")):
        raise Unreadable(f"precision {precision or 'not told'}; only 16-bit computation is predicted")
    offload = str(parallel.get("offload") or "none")
    if offload != "none":
        raise Unreadable(f"offloads {offload}")
    text = f"{raw.get('notes') or ''} {raw.get('kind') or ''}".lower()
    if "lora" in text:
        raise Unreadable("trains adapters alone")
    machine = _machine(part(raw, "hardware"))
    shape = _shape(model)
    layout = _layout(parallel, machine, extra, shape)
    habits = _habits(raw, parallel, extra, measured, shape)
    tier = str(raw.get("tier") or "")
    seconds = _seconds(measured, layout, shape, machine)
    memory = optional(measured, "peak_memory_gib")
    status = str(extra.get("status") or "").lower()
    failed = tier == "F" or "oom" in status
    if tier == "F" and status and not any(word in status for word in ("oom", "memory")):
        raise Unreadable(f"did not run for a reason other than memory: {status}")
    if seconds is None and memory is None and not failed:
        raise Unreadable("nothing was measured that is predicted here")
    formula = bool(extra.get("analytic"))
    return Row(
        id=str(raw.get("id") or ""),
        source=source_of(raw),
        tier=tier,
        shape=shape,
        layout=layout,
        habits=habits,
        machine=machine,
        seconds=None if failed else seconds,
        memory=None if failed else memory,
        fits=None if formula else not failed,
        parameters=optional(model, "params"),
        formula=formula,
    )


def source_of(raw: Mapping[str, Any]) -> str:
    """The title of a raw row's source."""
    source = raw.get("source")
    title = source.get("title") if isinstance(source, Mapping) else source
    return str(title or "unknown")


def part(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a raw row; empty if there is none."""
    found = raw.get(name)
    return found if isinstance(found, Mapping) else {}


def optional(of: Mapping[str, Any], name: str) -> float | None:
    """A positive number; None if there is none, or one that can be of nothing that was run."""
    value = of.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MOST:
        return None
    return float(value)


def _number(of: Mapping[str, Any], name: str, default: float) -> float:
    found = optional(of, name)
    return default if found is None else found


def _whole(of: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number; that one if there is none."""
    found = optional(of, name)
    return default if found is None or found != int(found) else int(found)


def _count(of: Mapping[str, Any], name: str, what: str) -> int:
    found = _whole(of, name, 0)
    if not found:
        raise Unreadable(f"{what} is not told" if of.get(name) is None else f"{what} is {of.get(name)!r:.40}")
    return found


def _shape(model: Mapping[str, Any]) -> Shape:
    layers, hidden = _count(model, "layers", "the number of layers"), _count(model, "hidden", "the width")
    heads, time = _count(model, "heads", "the number of heads"), _count(model, "seq_len", "the sequence length")
    vocabulary = _count(model, "vocab", "the vocabulary")
    if hidden % heads:
        raise Unreadable(f"{heads} heads do not divide the width {hidden}")
    shared = _whole(model, "kv_heads", heads)
    if heads % shared:
        raise Unreadable(f"{shared} key/value heads do not divide {heads}")
    family = _family(model, layers, hidden, heads, shared, vocabulary)
    inner = optional(model, "ffn") or (4 * hidden if family == "gpt" else round(8 * hidden / 3 / 256) * 256)
    return Shape(family, layers, hidden, heads, shared, int(inner), vocabulary, time)


def _family(model: Mapping[str, Any], layers: int, hidden: int, heads: int, shared: int, vocabulary: int) -> str:
    """By the name; where it says nothing, by the number of parameters, else by the width of the inner layer."""
    name = str(model.get("name") or "").lower()
    if any(word in name for word in ("llama", "mistral", "qwen", "gemma", "yi-", "deepseek", "olmo", "granite")):
        return "llama"
    if any(word in name for word in ("gpt", "mpt", "opt", "bloom", "megatron", "nemotron", "palm", "gopher", "mt-nlg")):
        return "gpt"
    inner, parameters = optional(model, "ffn"), optional(model, "params")
    if inner and parameters:
        attention = (2 + 2 * shared / heads) * hidden**2
        plain = layers * (attention + 2 * hidden * inner) + vocabulary * hidden
        gated = layers * (attention + 3 * hidden * inner) + 2 * vocabulary * hidden
        return "gpt" if abs(plain - parameters) < abs(gated - parameters) else "llama"
    return "llama" if inner and inner < 4 * hidden else "gpt"


def _machine(hardware: Mapping[str, Any]) -> Machine:
    gpu = hardware.get("gpu")
    if not gpu:
        raise Unreadable("the device is not told")
    count = _count(hardware, "num_gpus", "the number of devices")
    if count > MOST_DEVICES:
        raise Unreadable(f"the number of devices is {count}")
    per_node = _whole(hardware, "gpus_per_node", min(8, count))
    return Machine(str(gpu), min(per_node, count), count, str(hardware.get("interconnect") or ""))


def _layout(parallel: Mapping[str, Any], machine: Machine, extra: Mapping[str, Any], shape: Shape) -> Layout:
    tensor, pipe = _whole(parallel, "tp", 1), _whole(parallel, "pp", 1)
    each = tensor * pipe
    cut = f"tensor {tensor}" + (f" times pipeline {pipe}" if pipe > 1 else "")
    if machine.count % each:
        raise Unreadable(f"{cut} does not divide {machine.count} devices")
    data = _whole(parallel, "dp", machine.count // each)
    if data * each != machine.count:
        raise Unreadable(f"data {data} times {cut} is not {machine.count} devices")
    microbatch = _count(parallel, "microbatch", "the microbatch")
    batch = _count(parallel, "global_batch", "the global batch")
    if batch % (microbatch * data):
        raise Unreadable(f"a batch of {batch} is no whole number of microbatches of {microbatch} on {data} ranks")
    fsdp = str(parallel.get("fsdp") or "").upper()
    zero = int(parallel["zero_stage"]) if isinstance(parallel.get("zero_stage"), int) else (3 if fsdp else 0)
    hybrid = "HSDP" in fsdp or "HYBRID" in fsdp
    return Layout(
        data=data,
        tensor=tensor,
        sequence=parallel.get("sp") is True and tensor > 1,
        zero=min(max(zero, 0), 3) if "GRAD_OP" not in fsdp else 3,
        inner_data=max(1, machine.per_node // tensor) if hybrid else 0,
        regather="GRAD_OP" not in fsdp,
        microbatch=microbatch,
        batch=batch,
        **_pipeline(parallel, extra, shape, pipe),
    )


SCHEDULES = {
    "1f1b": "1f1b", "1f1b-i": "interleaved", "zb-h1": "zb-h1", "zb-h2": "zb-h2", "zb-1p": "zb-h1", "zb-2p": "zb-h2",
}  # fmt: skip
"""By a source's name of a schedule the compiler's; those that a search finds under one or two times the memory of 1F1B
by the schedule that is written for as much."""


def _pipeline(parallel: Mapping[str, Any], extra: Mapping[str, Any], shape: Shape, pipe: int) -> dict[str, Any]:
    if pipe == 1:
        return {}
    virtual = _whole(parallel, "vpp", 1)
    if pipe * virtual > shape.layers:
        raise Unreadable(f"{pipe * virtual} stages for {shape.layers} layers, so that some have none")
    said = str(extra.get("schedule") or ("1F1B-I" if virtual > 1 else "1F1B")).lower()
    if said not in SCHEDULES:
        raise Unreadable(f"the pipeline schedule {said}")
    return {"pipe": pipe, "virtual": virtual, "schedule": SCHEDULES[said]}


def _habits(
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


def _seconds(measured: Mapping[str, Any], layout: Layout, shape: Shape, machine: Machine) -> float | None:
    seconds = optional(measured, "iteration_time_s")
    rate = optional(measured, "tokens_per_s_per_gpu")
    if seconds is None and rate is not None:
        seconds = layout.batch * shape.time / (rate * machine.count)
    return seconds
