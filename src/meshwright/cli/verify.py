"""``meshwright verify``"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.tables import show, table

if TYPE_CHECKING:
    from meshwright.verification import Verification


def verify_command(
    folder: Annotated[Path, typer.Argument(help="The artefact folder that 'meshwright compile' wrote.")],
    steps: Annotated[int, typer.Option(min=1, help="How many steps to compare.")] = 2,
    seed: Annotated[
        int | None, typer.Option(min=-(2**63), max=2**63 - 1, help="The seed of weights and batches.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare the ranks' program, run for all ranks in this process in float64, with the program for one device.

    The exit code is 0 if gradients and updated weights agree to 1e-9, else 1.
    """
    from meshwright.cli.faults import print_diagnostics
    from meshwright.compiler.diagnostics import Diagnostic
    from meshwright.verification import TOLERANCE, verify_artefact

    found = verify_artefact(folder, steps, seed)
    if as_json:
        typer.echo(json.dumps(_json(found), indent=2))
    else:
        show(_table(found))
        ran = f"{found.steps} steps on {found.ranks} virtual ranks in float64"
        typer.echo(f"{ran}; the largest difference is {found.worst:.1e}")
    if not found.passed:
        worst = max(found.gradients, key=lambda name: found.gradients[name], default="")
        print_diagnostics(
            Diagnostic(
                "E0701",
                f"the compiled step does not compute what the step for one device computes: {found.worst:.1e}",
                action="this is a fault of Meshwright; please send the artefact, and use another plan meanwhile",
                notes=(f"the tolerance is {TOLERANCE:.0e}", f"furthest off is the gradient of '{worst}'"),
            )
        )
        raise typer.Exit(1)


def _table(found: Verification) -> Any:
    largest = [
        ("loss", "", found.loss),
        ("gradient norm", "", found.norm),
        ("gradients", *_worst(found.gradients)),
        ("updated weights", *_worst(found.weights)),
        ("optimizer state and buffers", *_worst(found.state)),
    ]
    rows = [(what, name, f"{value:.1e}") for what, name, value in largest]
    return table("Difference from one device, relative", ("what", "where most", "difference"), rows, numbers=(2,))


def _worst(by_name: Any) -> tuple[str, float]:
    return max(by_name.items(), key=lambda item: item[1], default=("", 0.0))


def _json(found: Verification) -> dict[str, Any]:
    return {"passed": found.passed, "worst": found.worst, **asdict(found)}
