"""``meshwright verify``"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.tables import show, table

if TYPE_CHECKING:
    from meshwright.equivalence import Verdict
    from meshwright.verification import Verification


def verify_command(
    folder: Annotated[Path, typer.Argument(help="The artefact folder that 'meshwright compile' wrote.")],
    steps: Annotated[int, typer.Option(min=1, help="How many steps to compare.")] = 2,
    seed: Annotated[
        int | None, typer.Option(min=-(2**63), max=2**63 - 1, help="The seed of weights and batches.")
    ] = None,
    relations: Annotated[bool, typer.Option("--relations", help="Only relate values; run nothing.")] = False,
    miniature: Annotated[bool, typer.Option("--miniature", help="Run the miniature of the plan.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Run all ranks at full size.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Check that the ranks' program computes what the program for one device computes.

    First every value of it is related to one of that program, over the reals and for all inputs. Then the numbers are
    compared in float64: of all ranks, run in this process, if they are small, else of the miniature of the plan. The
    exit code is 0 if the relations hold and gradients, weights and optimizer state agree to 1e-9, else 1. Where groups
    of the batch were declared to stand for the whole, relations do not apply, which is noted, and numbers alone decide.
    """
    from meshwright.cli.faults import print_diagnostics
    from meshwright.equivalence import verify_equivalence

    asked = {"none": relations, "miniature": miniature, "full": full}
    if sum(asked.values()) > 1:
        raise typer.BadParameter("give one of --relations, --miniature and --full")
    numbers = next((word for word, given in asked.items() if given), "fitting")
    found = verify_equivalence(folder, numbers, steps, seed)
    if as_json:
        typer.echo(json.dumps(_json(found), indent=2))
    else:
        _print(found)
    told = tuple(found.diagnostics())
    if told:
        print_diagnostics(*told)
    if not found.passed:
        raise typer.Exit(1)


def _print(found: Verdict) -> None:
    if found.numbers is not None:
        show(_table(found.numbers))
    typer.echo(f"note: {found.related}" if found.relations.apart else found.related)
    if found.numbers is not None:
        what = "of the miniature" if found.miniature else "virtual"
        ran = f"{found.numbers.steps} steps on {found.numbers.ranks} ranks {what}, in float64"
        if not found.miniature:
            ran = f"{found.numbers.steps} steps on {found.numbers.ranks} virtual ranks in float64"
        typer.echo(f"{ran}; the largest difference is {found.numbers.worst:.1e}")
    for note in found.notes:
        typer.echo(f"note: {note}")


def _table(found: Verification) -> Any:
    largest = [
        ("loss", "", found.loss),
        ("gradient norm", "", found.norm),
        ("gradients", *_worst(found.gradients)),
        ("updated weights", *_worst(found.weights)),
        ("state and buffers", *_worst(found.state)),
    ]
    rows = [(what, name, f"{value:.1e}") for what, name, value in largest]
    return table("Difference from one device, relative", ("what", "where most", "difference"), rows, numbers=(2,))


def _worst(by_name: Any) -> tuple[str, float]:
    return max(by_name.items(), key=lambda item: item[1], default=("", 0.0))


def _json(found: Verdict) -> dict[str, Any]:
    related = found.relations
    told = {
        "proved": related.proved,
        "not_applicable": related.apart or None,
        "values": related.values,
        "findings": [
            {"code": f.code, "graph": f.graph, "node": f.node, "message": f.message} for f in related.findings
        ],
        "broken_by": found.broken_by,
    }
    numbers = {} if found.numbers is None else {"worst": found.numbers.worst, **asdict(found.numbers)}
    return {"passed": found.passed, "relations": told, "miniature": found.miniature, **numbers}
