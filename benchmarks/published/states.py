"""Rows that tell the memory of model states alone: weights, gradients and optimizer state of so many parameters.

They name no shape, and need none: what a rank holds for each parameter is read off the program of a small model under
the row's plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.published.fields import optional, part, source_of
from benchmarks.published.modules import parameters
from benchmarks.published.programs import Programs
from benchmarks.published.rows import Habits, Layout, Machine, Row, Shape
from meshwright.compiler.summary import RankSummary

SMALL = Shape("gpt", 2, 1024, 8, 8, 4096, 4096, 1024)


@dataclass(frozen=True)
class States:
    id: str
    source: str
    parameters: float
    stage: int
    ranks: int
    bytes: float


@dataclass(frozen=True)
class ScoredStates:
    row: States
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.row.bytes - 1


def states(raw: Iterable[Any]) -> list[States]:
    """The rows of model states among raw ones."""
    found = []
    for one in raw:
        if not isinstance(one, Mapping) or one.get("tier") != "M":
            continue
        model, plan, extra = (part(one, name) for name in ("model", "parallel", "extra"))
        count, ranks, size = optional(model, "params"), optional(plan, "dp"), optional(extra, "formula_gb")
        stage = plan.get("zero_stage")
        if model.get("layers") is None and count and ranks and size and stage in (0, 1, 2, 3):
            found.append(States(str(one.get("id")), source_of(one), count, int(stage), int(ranks), size * 1e9))
    return found


def score(rows: Iterable[States], programs: Programs) -> list[ScoredStates]:
    """Predicted by what a rank holds for each parameter of a small model, gradients being added up."""
    return [ScoredStates(row, row.parameters * held(row.stage, row.ranks, programs)) for row in rows]


def held(stage: int, ranks: int, programs: Programs) -> float:
    """Bytes of states that a rank holds for each parameter of the whole model."""
    habits = Habits(
        recompute="none", recomputed_share=1.0, cheap_again=False, fused_attention=True, attention="flash-2",
        fused_norms=True, kernels="kernels", master_weights=True, reduce="bf16", dropout=False, bias=True, loss="fused",
    )  # fmt: skip
    layout = Layout(
        data=ranks, tensor=1, sequence=False, zero=stage, inner_data=0, regather=True, microbatch=1, batch=2 * ranks
    )
    row = Row("", "", "M", SMALL, layout, habits, Machine("A100-80GB", 8, ranks, ""), None, None, None, None, True)
    summary = programs.summary(row)
    assert isinstance(summary, RankSummary)
    total = summary.held.get("parameters", 0) + summary.held.get("optimizer state", 0) + summary.accumulators
    return total / parameters(SMALL, habits)
