"""Causality read off the programs of ranks: correct ones see what one device sees, wrong ones are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import meshwright.rank_causality as rank_causality
from meshwright.compiler.causality import registry
from meshwright.compiler.causality.rank_reading import RankReading
from meshwright.compiler.causality.second.opinion import Opinion
from meshwright.compiler.causality.verdict import Verdict
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.rank_causality import read_ranks
from tests.causality.time_cut import (
    AXES,
    PART,
    TIME,
    Writer,
    exchanged_heads,
    gathered_keys,
    labels_cut,
    ring,
    whole_program,
)
from tests.equivalence.faults import FAULTS
from tests.equivalence.plans import PLANS
from tests.field.against_one_device import Case
from tests.models import Variant
from tests.parity.harness import Cell, Task, compiled
from tests.unit.separability.experts import KEPT, WIDTH

aten = torch.ops.aten


def reading(program: Compiled) -> RankReading:
    found = read_ranks(program)
    assert found is not None
    return found


def second(found: RankReading) -> Opinion:
    assert found.second is not None
    return found.second


def triangle(write: Writer) -> Any:
    """Which keys each query sees, all of them."""
    ones = write.call(aten.ones.default, [TIME, TIME])
    return write.call(aten.ne.Scalar, write.call(aten.tril.default, ones), 0)


def cut(dim: int) -> Callable[[Writer], Any]:
    return lambda write: write.call(collectives.shard, triangle(write), dim, AXES)


def first_rows(write: Writer) -> Any:
    return write.call(aten.slice.Tensor, triangle(write), 0, 0, PART, 1)


def last_rows(write: Writer) -> Any:
    return write.call(aten.slice.Tensor, triangle(write), 0, PART, TIME, 1)


CORRECT: dict[str, Callable[[Compiled], None]] = {
    "keys gathered": gathered_keys,
    "a mask cut with the queries": lambda c: gathered_keys(c, mask=cut(0)),
    "ring": ring,
    "heads exchanged": exchanged_heads,
    "labels from the neighbour": lambda c: labels_cut(c, True),
}
WRONG: dict[str, tuple[Callable[[Compiled], None], str, str]] = {
    "positions begin one part late": (lambda c: gathered_keys(c, lambda w: PART), "E0790", "meshwright.attention"),
    "positions of a shard begin at 0": (lambda c: gathered_keys(c, lambda w: 0), "E0791", "meshwright.attention"),
    "positions count a longer part": (lambda c: gathered_keys(c, lambda w: w.start(PART + 1)), "E0790", "attention"),
    "positions count a shorter part": (lambda c: gathered_keys(c, lambda w: w.start(PART - 2)), "E0791", "attention"),
    "a mask of the last shard on all": (lambda c: gathered_keys(c, mask=last_rows), "E0790", "meshwright.attention"),
    "a mask of the first shard on all": (lambda c: gathered_keys(c, mask=first_rows), "E0791", "meshwright.attention"),
    "ring: blocks in another order": (lambda c: ring(c, lambda i: 1 - i), "E0790", "all_gather"),
    "ring: blocks without a mask": (lambda c: ring(c, causal=False), "E0790", "all_gather"),
    "heads exchanged, the mask forgotten": (lambda c: exchanged_heads(c, False), "E0790", "meshwright.attention"),
    "labels: the border has none": (lambda c: labels_cut(c, False), "E0791", "all_gather"),
}


@pytest.mark.parametrize("name", CORRECT)
def test_correct_cuts_of_time_are_causal(name: str) -> None:
    program = whole_program()
    CORRECT[name](program)
    found = reading(program)
    assert found.verdict is found.alone is Verdict.CAUSAL
    assert not found.findings
    assert found.outputs == 16 * TIME
    assert second(found).headline() == "CAUSAL at length 12: position t sees the first position to t"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_cuts_of_time_are_told(name: str) -> None:
    put, code, node = WRONG[name]
    program = whole_program()
    put(program)
    found = reading(program)
    assert found.alone is Verdict.CAUSAL
    assert code in {f.code for f in found.findings}
    told = next(f for f in found.findings if f.code == code)
    assert any("first differs in %" in line for line in told.notes), told.notes
    assert any(node in line for line in told.notes[1:]), told.notes
    assert (found.verdict is Verdict.LEAK) == (code == "E0790")
    # what sees less leaks nothing
    assert (second(found).verdict == "CAUSAL") == (code == "E0791")


TOLD = {
    "attention without its causal mask": ("E0790", "meshwright.attention"),
    "labels are not those of the next token": ("E0790", "aten.slice.Tensor"),
    "sum over the wrong axis": ("E0790", "all_reduce"),
    "inputs and labels of other samples": ("E0790", "meshwright.embedding"),
}
"""Of the faults of compiled programs those that change what an output sees."""


@pytest.mark.parametrize("name", TOLD)
def test_faults_of_compiled_programs_are_told(name: str) -> None:
    (fault,) = (f for f in FAULTS if f.name == name)
    program = compiled(fault.cell)
    fault.put(program)
    code, node = TOLD[name]
    found = reading(program)
    told = next(f for f in found.findings if f.code == code)
    assert (found.verdict is Verdict.LEAK) == (second(found).verdict != "CAUSAL")
    assert any("first differs in" in line and node in line for line in told.notes), told.notes


QUICK = (
    Cell(Task("gpt.mw"), "fsdp=2,tp=2,sp", 4, 2),
    Cell(Task("Llama"), "tp=3", 3),
    Cell(Task("gpt.mw", Variant(dropout=0.1)), "fsdp=2,tp=2,sp,recompute", 4, 2),
    Cell(Task("gpt.mw", Variant(layers=3)), "pp=2,tp=2,sp,schedule=1f1b", 4, 2),
    Cell(Task("gpt.mw", Variant(layers=3)), "pp=2,schedule=dualpipe", 2, 2),
)


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_correct_plans_are_causal(cell: Cell) -> None:
    found = reading(compiled(cell))
    assert found.verdict is found.alone is Verdict.CAUSAL
    assert not found.findings
    assert second(found).verdict == "CAUSAL", second(found).headline()


@pytest.mark.slow
@pytest.mark.parametrize("cell", PLANS, ids=str)
def test_every_correct_plan_sees_what_one_device_sees(cell: Cell) -> None:
    found = read_ranks(compiled(cell))
    assert found is None or (not found.findings and found.verdict is found.alone)
    if found is not None and found.verdict is Verdict.CAUSAL:
        assert second(found).verdict == "CAUSAL", second(found).headline()


def test_a_large_plan_is_read_by_its_miniature(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(Cell(Task("gpt.mw"), "fsdp=2,tp=2,sp", 4, 2))
    monkeypatch.setattr(rank_causality, "TOKENS", 8)
    found = reading(program)
    assert found.miniature
    assert found.verdict is found.alone is Verdict.CAUSAL
    assert second(found).verdict == "CAUSAL"
    assert 0 < found.outputs < 16 * TIME


@pytest.mark.slow
def test_an_encoder_leaks_on_ranks_as_on_one_device() -> None:
    found = reading(compiled(Cell(Task("BERT"), "fsdp=2,tp=2,sp", 4)))
    assert found.verdict is found.alone is Verdict.LEAK
    assert found.leaks == {"future"}
    assert found.passed
    assert second(found).verdict == "not shown"
    assert ": %attention_default = meshwright.attention, sdpa_attention.py:" in second(found).reason


def test_images_have_no_positions() -> None:
    assert read_ranks(compiled(Cell(Task("ViT"), "ddp=2", 2))) is None


def test_dropout_hides_nothing() -> None:
    """What is dropped is by chance: a mask that is missing is told under dropout too."""
    from tests.equivalence.editing import calls, micro, set_argument

    program = compiled(Cell(Task("gpt.mw", Variant(dropout=0.1)), "tp=2", 2))
    node = calls(micro(program), "meshwright.attention.default")[0]
    set_argument(micro(program), node, 5, False)
    assert reading(program).leaks == {"future"}


def test_reading_says_what_it_read() -> None:
    found = reading(compiled(Cell(Task("gpt.mw"), "tp=2", 2)))
    assert found.headline() == "CAUSAL on 2 ranks, CAUSAL on one device; 192 outputs read"
    assert found.json()["alone"] == "CAUSAL"
    assert replace(found, leaks=frozenset({"future"}), verdict=Verdict.LEAK).headline().startswith("LEAK (future) on 2")


def test_a_program_that_does_not_run_is_told() -> None:
    (fault,) = (f for f in FAULTS if f.name == "a stage reads a weight of another stage")
    program = compiled(fault.cell)
    fault.put(program)
    found = reading(program)
    assert (found.verdict, found.alone) == (Verdict.UNKNOWN, Verdict.CAUSAL)
    assert [f.code for f in found.findings] == ["E0792"]
    assert "layers.0.attention.Wq" in found.findings[0].notes[0]


def test_what_an_op_without_a_rule_does_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank joins its rows and one device all of them: no fault of the ranks, but no answer either."""
    program = compiled(Cell(Task("gpt.mw"), "fsdp=2", 2))
    assert reading(program).passed
    monkeypatch.delitem(registry._REPLACEMENTS, "meshwright.attention")
    found = reading(program)
    assert found.verdict is found.alone is Verdict.UNKNOWN
    assert not found.passed
    assert [f.code for f in found.findings] == ["E0794"]
    assert "meshwright.attention" in found.findings[0].message


def test_beside_what_is_not_known_the_rest_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op without a rule that only the loss reads hides no mask that is missing."""
    (fault,) = (f for f in FAULTS if f.name == "attention without its causal mask")
    program = compiled(fault.cell)
    fault.put(program)
    monkeypatch.delitem(registry._REPLACEMENTS, "meshwright.pick")
    found = reading(program)
    assert {f.code for f in found.findings} == {"E0790", "E0794"}
    assert (found.verdict, found.alone) == (Verdict.LEAK, Verdict.CAUSAL)


@pytest.mark.parametrize("experts", KEPT)
def test_sorted_experts_over_data_ranks_see_what_one_device_sees(experts: type[nn.Module]) -> None:
    torch.manual_seed(0)
    batches = [{name: torch.randn(4, 3, WIDTH) for name in ("x", "target")}]
    program = Case(experts(), batches).program
    found = reading(compile_plan(program, preset("fsdp=2,micro=2", program, 2)))
    assert not found.findings
    assert found.verdict is found.alone
    assert found.verdict in (Verdict.CAUSAL, Verdict.ASSUMPTION)


class NextNumber(nn.Module):
    """Foretells the next number of a row; no cross entropy, so that losses are read, and each of them has a label."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen = self.line(x.roll(self.shift, 1))
        return (seen[:, :-1] - labels[:, 1:]).square().mean()


@pytest.mark.parametrize(("shift", "leaks"), [(0, set()), (-1, {"future"})])
def test_where_losses_are_read_labels_are_left_out(shift: int, leaks: set[str]) -> None:
    torch.manual_seed(0)
    batches = [{name: torch.randn(4, 6, WIDTH) for name in ("x", "labels")}]
    program = Case(NextNumber(shift), batches).program
    found = reading(compile_plan(program, preset("fsdp=2", program, 2)))
    assert not found.findings
    assert found.leaks == leaks
    assert (found.verdict, found.alone) == ((Verdict.LEAK,) * 2 if leaks else (Verdict.CAUSAL,) * 2)
