"""``meshwright schedule``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.output import write
from meshwright.cli.tables import show, table
from meshwright.compiler.schedules import catalogue
from meshwright.compiler.schedules.drawing import as_svg, as_text
from meshwright.compiler.schedules.request import Costs
from meshwright.compiler.schedules.simulate import Run, simulate
from meshwright.compiler.schedules.table import Schedule


def schedule_command(
    name: Annotated[
        str | None, typer.Argument(help="The schedule: 1f1b, zb-v, list and so on. Default: list all.")
    ] = None,
    stages: Annotated[
        int,
        typer.Option(
            min=1, help="The stages that the model is cut into, on all ranks together; to compare, the ranks."
        ),
    ] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="The microbatches of a step.")] = 8,
    virtual: Annotated[
        int | None, typer.Option(min=1, help="Stages on each rank; default: as the schedule has.")
    ] = None,
    forward: Annotated[float, typer.Option(min=0, help="What a forward pass of a stage takes.")] = 1.0,
    backward_input: Annotated[float, typer.Option(min=0, help="What the gradient of its input takes.")] = 1.0,
    backward_weight: Annotated[float, typer.Option(min=0, help="What those of its weights take.")] = 1.0,
    send: Annotated[float, typer.Option(min=0, help="What it takes to hand a result to another rank.")] = 0.0,
    memory: Annotated[float | None, typer.Option(min=1, help="Activations that a rank may hold, for 'list'.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write a picture, as SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Draw a pipeline schedule with its bubble and what it holds, or compare all of them."""
    costs = Costs(forward, backward_input, backward_weight, send)
    if name is None:
        _compare(stages, microbatches, virtual, costs, memory, as_json)
        return
    request = catalogue.request_for(name, stages, microbatches, virtual, costs, memory)
    schedule = catalogue.make(name, request)
    run = simulate(schedule, costs)
    if output is not None:
        write(output, as_svg(schedule, run), "E0505")
    if as_json:
        typer.echo(json.dumps({**_row(name, schedule, run), "rows": str(schedule).splitlines()}, indent=2))
        return
    typer.echo(as_text(schedule, run))
    typer.echo("")
    typer.echo(
        f"{_called(name, schedule)}: {run.seconds:g} a step, {100 * run.bubble:.1f} % of it bubble; a rank holds at "
        f"most {max(run.peak):g} activations of a stage."
    )
    if output is not None:
        typer.echo(f"written to {output}")


def _compare(
    ranks: int, microbatches: int, virtual: int | None, costs: Costs, memory: float | None, as_json: bool
) -> None:
    """All schedules on as many ranks: what has several stages on each cuts the model into shorter ones."""
    rows = []
    for name, module in catalogue.modules().items():
        searched = catalogue.searched(name)
        ways = [virtual] if virtual is not None else [1, 2] if searched else [module.VIRTUAL]
        found = [_compared(name, ranks, microbatches, each, costs, memory if searched else None) for each in ways]
        rows += sorted((row for row in found if row), key=lambda row: (row["step"], row["held"]))[:1]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    cells = [(_cell(r), *(f"{r[n]:g}" for n in ("stages", "step", "bubble_percent", "held"))) for r in rows]
    title = f"Schedules on {ranks} ranks, {microbatches} microbatches"
    columns = ("schedule", "stages", "step", "bubble, %", "most held, of a rank's layers")
    show(table(title, columns, cells, numbers=(1, 2, 3, 4)))


def _compared(
    name: str, ranks: int, microbatches: int, each: int, costs: Costs, memory: float | None
) -> dict[str, Any] | None:
    """A schedule with so many stages on each rank; None if it cannot have them."""
    shorter = Costs(costs.forward / each, costs.input / each, costs.weight / each, costs.send)
    held = None if memory is None else memory * each
    request = catalogue.request_for(name, ranks * each, microbatches, each, shorter, held)
    if catalogue.why_not(name, request):
        return None
    made = catalogue.make(name, request)
    row = _row(name, made, simulate(made, shorter))
    return {**row, "held": row["held"] / each}


def _called(name: str, schedule: Schedule) -> str:
    """A schedule that was asked for by name; of what is searched for, which one was found."""
    own = catalogue.own_name(name)
    if not catalogue.searched(own):
        return own
    return f"{own}, a table of its own" if schedule.name == own else f"{own}, here the same as {schedule.name}"


def _cell(row: dict[str, Any]) -> str:
    return row["schedule"] if row["schedule"] == row["table"] else f"{row['schedule']}: {row['table']}"


def _row(name: str, schedule: Schedule, run: Run) -> dict[str, Any]:
    """``table`` is the schedule whose table it is: of what is searched for, the one that was best."""
    return {
        "schedule": catalogue.own_name(name),
        "table": schedule.name,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "step": run.seconds,
        "bubble_percent": round(100 * run.bubble, 2),
        "held": max(run.peak),
    }
