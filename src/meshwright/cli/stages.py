"""How the stages of a pipeline are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.cli.tables import size, table

if TYPE_CHECKING:
    from meshwright.compiler.prediction import Flow


def stages_of(flow: Flow | None, *, times: bool = False) -> list[Any]:
    """A table of the stages, if there are any: where they lie, and what is held there. ``times``: with what their
    passes take."""
    if flow is None:
        return []
    columns = ["stage", "rank of pipe", "blocks", "microbatches in flight", "memory of the rank"]
    columns += ["forward, ms", "backward of input, ms", "of weights, ms"] if times else []
    rows = []
    for number, stage in enumerate(flow.stages):
        row = [str(number), str(stage.rank), str(stage.blocks), str(stage.in_flight), size(flow.memory[stage.rank])]
        if times:
            row += [f"{1000 * seconds:.4g}" for seconds in (stage.forward, stage.input, stage.weight)]
        rows.append(row)
    return [table(f"Stages, by {flow.schedule}", columns, rows, numbers=range(len(columns)))]
