"""``meshwright inspect``"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.stages import stages_of
from meshwright.cli.tables import plan_line, show, size, table

if TYPE_CHECKING:
    from meshwright.compiler.communication import Traffic
    from meshwright.compiler.emit.artefact import Artefact
    from meshwright.compiler.prediction import Memory
    from meshwright.inspection import Inspected


def inspect_command(
    folder: Annotated[Path, typer.Argument(help="The artefact folder that 'meshwright compile' wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the plan, the program, memory per rank by kind, and communication by kind and axis."""
    from meshwright.cli.faults import print_diagnostics
    from meshwright.inspection import inspect_artefact

    found = inspect_artefact(folder)
    artefact = found.artefact
    if artefact.warnings:
        print_diagnostics(*artefact.warnings)
    if as_json:
        typer.echo(json.dumps(_json(found), indent=2))
        return
    typer.echo(f"{artefact.source.place}\n{plan_line(artefact.rank_program)}\n")
    shown = [_parameters(artefact), _program(found), *stages_of(found.flow), _memory(found.memory)]
    show(*shown, _communication(found.traffic), *_errors(found))


def _parameters(artefact: Artefact) -> Any:
    """Parameters that differ in numbers alone and lie alike share a row."""
    alike: dict[tuple[str, ...], int] = {}
    for name, lies in artefact.rank_program.layouts.items():
        rest = str(lies.rest)
        others = ("as at rest" if str(s) == rest else str(s) for s in (lies.gradient, lies.state))
        row = (re.sub(r"(?<=\.)\d+(?=\.)", "*", name), str(lies.compute), rest, *others)
        alike[row] = alike.get(row, 0) + 1
    rows = [(name if count == 1 else f"{name} ({count})", *rest) for (name, *rest), count in alike.items()]
    return table("Plan: how parameters lie", ("parameter", "computed with", "at rest", "gradient", "state"), rows)


def _program(found: Inspected) -> Any:
    """The ops of each graph; the stages of a pipeline have graphs that the step for one device has not."""
    if found.flow is None:
        rows = [(name, str(found.whole[name]), str(count)) for name, count in found.graphs.items()]
        return table("Program: ops", ("graph", "one device", "each rank"), rows, numbers=(1, 2))
    title = "Program: ops; for one device " + ", ".join(f"{name} {count}" for name, count in found.whole.items())
    return table(title, ("graph", "ops"), [(name, str(count)) for name, count in found.graphs.items()], numbers=(1,))


def _memory(needs: Memory) -> Any:
    rows = [(kind, size(needs.by_kind.get(kind, 0)), size(most)) for kind, most in needs.most.items()]
    rows.append(("total", size(needs.peak), ""))
    where = f" of {needs.at.block}" if needs.at.block else ""
    title = f"Memory of a rank; the peak is in {needs.at.graph}, {needs.at.phase}{where} (%{needs.at.item})"
    return table(title, ("kind", "at the peak", "most at any time"), rows, numbers=(1, 2))


def _errors(found: Inspected) -> list[Any]:
    """What the last run measured, beside what is predicted, with the error of each kind."""
    compared = _compared(found)
    if not compared:
        return []
    rows = []
    for name, predicted, measured in compared:
        unit = (lambda value: f"{1000 * value:.4g} ms") if name == "step time" else size
        error = f"{100 * (predicted / measured - 1):+.1f} %" if measured else ""
        rows.append((name, unit(predicted), unit(measured), error))
    predicted_for = found.artefact.rank_program.plan.predicted
    title = "Predicted and measured"
    if found.flow is not None:
        title += f"; kinds are those of rank {found.flow.fullest} of pipe"
    if predicted_for is not None:
        title += f" (the time for the cluster '{predicted_for.cluster}')"
    return [table(title, ("", "predicted", "measured", "error"), rows, numbers=(1, 2, 3))]


def _compared(found: Inspected) -> list[tuple[str, float, float]]:
    """Name, predicted and measured value; empty if there has been no run. Of a pipeline, kinds are compared on the rank
    that is predicted to need most, and the peak on every rank of ``pipe``."""
    from meshwright.runtime.measured import FILE, read_measured

    measured = read_measured(found.artefact.folder / FILE)
    here = measured.at(found.flow.fullest if found.flow is not None else 0) if measured is not None else None
    if measured is None or here is None:
        return []
    needs, predicted = found.memory, found.artefact.rank_program.plan.predicted
    rows: list[tuple[str, float, float]] = []
    if predicted is not None and predicted.step_time:
        rows.append(("step time", predicted.step_time, measured.step_time))
    held = {kind: needs.most.get(kind, 0) for kind in here.memory if kind in needs.most}
    rows += [(kind, size, here.memory[kind]) for kind, size in held.items()]
    rows.append(("everything else", needs.peak - sum(held.values()), here.memory["everything else"]))
    if found.flow is None:
        return [*rows, ("memory at the peak", needs.peak, here.peak)]
    for one in measured.ranks:
        rows.append((f"memory at the peak, rank {one.pipe} of pipe", found.flow.memory[one.pipe], one.peak))
    return rows


def _communication(traffic: list[Traffic]) -> Any:
    rows = [(t.kind, ", ".join(t.axes), t.graph, str(t.calls), size(t.payload), size(t.sent)) for t in traffic]
    columns = ("collective", "axes", "graph", "calls", "payload", "sent by a rank")
    return table("Communication in one step", columns, rows, numbers=(3, 4, 5))


def _json(found: Inspected) -> dict[str, Any]:
    artefact, needs, rank = found.artefact, found.memory, found.artefact.rank_program
    return {
        "source": {"kind": artefact.source.kind, "place": artefact.source.place},
        "plan": {
            "name": rank.plan.name,
            "mesh": dict(rank.mesh.axes),
            "ranks": rank.mesh.ranks,
            "microbatches": rank.plan.microbatches,
            "batch": rank.plan.batch,
            "storage": asdict(rank.plan.storage),
            "sequence": rank.plan.sequence,
        },
        "parameters": {
            name: {kind: str(getattr(lies, kind)) for kind in ("compute", "rest", "gradient", "state")}
            for name, lies in rank.layouts.items()
        },
        "program": {"one device": found.whole, "each rank": found.graphs},
        "pipeline": asdict(rank.plan.pipeline) if rank.plan.pipeline is not None else None,
        "memory": asdict(needs),
        "communication": [asdict(t) for t in found.traffic],
        "predicted": asdict(rank.plan.predicted) if rank.plan.predicted is not None else None,
        "compared": [
            {"what": name, "predicted": predicted, "measured": measured}
            for name, predicted, measured in _compared(found)
        ],
    }
