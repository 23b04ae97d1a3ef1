"""U01: degrees, numbers of ranks and sizes that do not fit each other are told late, or unclearly.

Reported: a world size that is not the product of the degrees, missing mesh names, heads that do not divide fail deep
inside mesh or model code.
https://github.com/huggingface/finetrainers/issues/408
https://github.com/huggingface/accelerate/issues/3798
https://github.com/huggingface/nanotron/issues/250
https://github.com/pytorch/torchtitan/pull/4258
https://github.com/NVIDIA/Megatron-LM/pull/6926

Here every one is refused before anything is compiled, by a code, with its values; and the nearest settings that the
message gives do work.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import transformers

from meshwright.compiler.analysis.blocks import fold
from meshwright.compiler.cluster.presets import preset as cluster_preset
from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.facts import program_facts
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Precision
from meshwright.compiler.search.check import check_limits
from meshwright.compiler.search.facts import ProgramFacts
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.frontend.capture import capture

BATCH, HEADS, GROUPS, LAYERS = 16, 8, 2, 2


@cache
def program() -> StepProgram:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=GROUPS, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
        tokens = torch.empty(BATCH, 16, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return capture(model, {"input_ids": tokens, "labels": tokens}, optimizer, None, 1.0)


@cache
def facts() -> ProgramFacts:
    return program_facts(fold(program()), Precision())


@dataclass(frozen=True)
class Bad:
    """Pins for so many ranks of 64; the values that the message must have; what in the help to follow, if it is one
    word to write instead of another (else the help is checked to be there)."""

    pins: str
    code: str
    values: tuple[str, ...]
    ranks: int = 8
    wrong: str = ""
    reserve: int = 0


PINNED = [
    Bad("tp=3", "E0434", ("8 attention heads", "3"), wrong="tp=3"),
    Bad("tp=16", "E0434", ("only 8 attention heads",), 16, wrong="tp=16"),
    Bad("tp=5", "E0434", ("8 attention heads", "5"), 5),
    Bad("fsdp=3", "E0433", ("8 ranks", "fsdp=3"), wrong="fsdp=3"),
    Bad("ddp=3", "E0433", ("8 ranks", "ddp=3"), wrong="ddp=3"),
    Bad("zero1=16", "E0433", ("8 ranks", "zero1=16"), wrong="zero1=16"),
    Bad("fsdp=4,tp=4", "E0433", ("8 ranks", "fsdp=4 * tp=4 = 16"), wrong="tp=4"),
    Bad("ddp=2,fsdp=2,tp=4", "E0433", ("8 ranks", "= 16"), wrong="tp=4"),
    Bad("ddp=2,fsdp=2,tp=1", "E0433", ("make 4 ranks, not 8",), wrong="tp=1"),
    Bad("ddp=5,fsdp=5", "E0433", ("8 ranks", "= 25")),
    Bad("fsdp", "E0433", ("a single rank", "1 ranks"), 1),
    Bad("fsdp,tp=8", "E0433", ("a single rank", "tp=8 takes all")),
    Bad("zero2,ddp=8", "E0433", ("a single rank", "ddp=8 takes all")),
    Bad("no tp", "E0435", ("16 samples", "32 data ranks"), 32),
    Bad("fsdp=32", "E0435", ("16 samples", "32 data ranks"), 32, wrong="fsdp=32"),
    Bad("ddp=4,fsdp=8", "E0435", ("16 samples", "32 data ranks"), 32, wrong="fsdp=8"),
    Bad("tp=2", "E0435", ("16 samples", "32 data ranks", "64 ranks with tp=2"), 64, wrong="tp=2"),
    Bad("micro=3", "E0436", ("16 samples", "3 microbatches"), wrong="micro=3"),
    Bad("micro=32", "E0436", ("16 samples", "32 microbatches"), wrong="micro=32"),
    Bad("micro=16", "E0436", ("leaves 1 samples", "the batch has 16"), 16, wrong="micro=16"),
    Bad("micro=4,tp=1", "E0436", ("leaves 4 samples", "8 data ranks"), wrong="micro=4"),
    Bad("recompute=5", "E0443", ("only 2 blocks",), wrong="recompute=5"),
    Bad("selective=3", "E0443", ("only 2 blocks",), wrong="selective=3"),
    Bad("", "E0441", ("65 ranks", "64 devices"), 65),
    Bad("", "E0441", ("0 ranks", "64 devices"), 0),
    Bad("", "E0441", ("-8 ranks",), -8),
    Bad("", "E0438", ("200 GiB", "79.11 GiB"), reserve=200 << 30),
    Bad("", "E0438", ("-1 B",), reserve=-1),
    Bad("tp=8,tp=4", "E0432", ("'tp=8'", "'tp=4'")),
    Bad("fsdp,zero1", "E0432", ("'fsdp'", "'zero1'")),
    Bad("sp,tp=1", "E0437", ("'sp'", "'tp=1'")),
    Bad("tensor=8", "E0430", ("'tensor'",)),
    Bad("fdsp=8", "E0430", ("'fdsp'",), wrong="fdsp=8"),
    Bad("tp=0", "E0431", ("'tp=0'",), wrong="tp=0"),
    Bad("micro=-2", "E0431", ("'micro=-2'",), wrong="micro=-2"),
]


def told(pins: str, ranks: int, reserve: int = 0) -> tuple[Diagnostic, ...]:
    """What is said of pins before anything is compiled; nothing if they can be kept."""
    cluster = cluster_preset("h100x64")
    assert cluster is not None
    try:
        check_limits(facts(), cluster, ranks, Limits(reserve, parse_pins([pins] if pins else [])))
    except MeshwrightError as fault:
        return fault.diagnostics
    return ()


@pytest.mark.parametrize("bad", PINNED, ids=lambda b: f"{b.pins or 'no pins'} on {b.ranks}")
def test_one_message_with_the_values_and_what_to_do(bad: Bad) -> None:
    (fault,) = told(bad.pins, bad.ranks, bad.reserve)
    assert fault.code == bad.code
    for value in bad.values:
        assert value in fault.message
    assert fault.action, "what to do is said"


FIXABLE = [bad for bad in PINNED if bad.wrong]


@pytest.mark.parametrize("bad", FIXABLE, ids=lambda b: f"{b.pins} on {b.ranks}")
def test_the_nearest_settings_work(bad: Bad) -> None:
    """The setting of the help in place of the wrong one is refused no more."""
    (fault,) = told(bad.pins, bad.ranks)
    word, _, value = bad.wrong.partition("=")
    found = re.search(r"\b(ddp|fsdp|zero1|tp|micro|recompute|selective)=(\d+)", fault.action or "")
    number = re.search(r"at most (\d+)", fault.action or "")
    better = found[0] if found else f"{word}={number[1]}" if number else ""
    if not better:
        named = re.search(r"'(\w+)'", fault.action or "")
        assert named, fault.action
        better = f"{named[1]}={value}"
    assert better != bad.wrong
    assert told(bad.pins.replace(bad.wrong, better), bad.ranks) == ()


def test_there_are_thirty_of_them() -> None:
    assert len(PINNED) + len(PLANS) >= 30 and len(FIXABLE) >= 20


PLANS = [
    ("fsdp=4,tp=4", 8, "E0307", ("16 ranks", "8")),
    ("fsdp=3", 8, "E0307", ("3", "8")),
    ("fsdp,tp=3", 8, "E0307", ("3", "8")),
    ("fsdp=8,tq=2", 16, "E0307", ("tq",)),
    ("fsdp=2,fsdp=4", 8, "E0307", ("fsdp",)),
    ("sp", 8, "E0307", ("sp",)),
    ("micro=3,ddp=8", 8, "E0302", ("3",)),
    ("ddp=32", 32, "E0302", ("16", "32")),
]


@pytest.mark.parametrize(("text", "ranks", "code", "values"), PLANS)
def test_plans_by_hand_are_held_to_the_same(text: str, ranks: int, code: str, values: tuple[str, ...]) -> None:
    """The same mistakes in a plan that is given, not pinned: refused when it is compiled, before a rank is started."""
    with pytest.raises(MeshwrightError) as fault:
        compile_step(program(), preset(text, program(), ranks))
    (one,) = fault.value.diagnostics
    assert one.code == code, one
    for value in values:
        assert value in one.message
    assert one.action
