"""``meshwright check``"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.reports import Reports
from meshwright.cli.settings import Separability, overrides, read_separability
from meshwright.error_pages import page_of

if TYPE_CHECKING:
    from meshwright.compiler.plan import Declaration


def check_command(
    source: Annotated[
        str | None, typer.Argument(help="A '.mw' file, a factory as package.module:factory, or an artefact's folder.")
    ] = None,
    segments: Annotated[
        str | None, typer.Option(help="The input that says to which document each position belongs.")
    ] = None,
    batch_dim: Annotated[int, typer.Option(min=0, help="The dim of rows; of a '.mw' file its axis.")] = 0,
    time_dim: Annotated[int, typer.Option(min=0, help="The dim of positions; of a '.mw' file its axis.")] = 1,
    separability: Separability = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A size of the file or an argument of the factory: name=number.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="What is asked of the model may take so long, between runs of it.")
    ] = 40.0,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write all findings to this file as JSON.")] = None,
    sarif: Annotated[Path | None, typer.Option(help="Write all findings to this file as SARIF.")] = None,
    explain: Annotated[str | None, typer.Option(help="Print the page of a code, E0711 say, and do no more.")] = None,
) -> None:
    """Check that no output of a model sees a later token, another row of the batch, or another document.

    The exit code is 0 if all questions are answered well, 1 if one is not or has no answer: a leak, a step that cannot
    be captured, a grave finding (half precision costs four roundings or more). It is 2 if the source cannot be read.
    Answers go to the standard output, findings to the standard error.
    """
    from meshwright.cli.faults import print_diagnostics
    from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError

    try:
        if explain is not None:
            typer.echo(page_of(explain))
            return
        if source is None:
            raise MeshwrightError(Diagnostic("E0901", "missing argument 'SOURCE'", None, "see meshwright check --help"))
        reports = Reports(as_json, sarif, source)
        reports.refuse()
        try:
            declared = read_separability(separability)
            passed = _check(source, overrides(set_ or []), segments, batch_dim, time_dim, declared, seconds, reports)
        except MeshwrightError as fault:
            reports.failed(*fault.diagnostics)
            raise
        except BaseException as fault:
            reports.failed(Diagnostic("E0900", f"the check was not made: {type(fault).__name__}: {fault}"))
            raise
    except MeshwrightError as fault:
        print_diagnostics(*fault.diagnostics)
        raise typer.Exit(2) from None
    if not passed:
        raise typer.Exit(1)


def _check(
    source: str,
    sizes: dict[str, float],
    segments: str | None,
    batch_dim: int,
    time_dim: int,
    declared: tuple[Declaration, ...],
    seconds: float,
    reports: Reports,
) -> bool:
    """Ask, print and write the answers; whether all are well. Raises MeshwrightError for a source that is none."""
    from meshwright.checking_answers import OF_MODELS, Answer, questions
    from meshwright.checking_source import read_given
    from meshwright.cli.faults import print_diagnostics
    from meshwright.cli.waiting import told
    from meshwright.compiler.causality.clock import Clock
    from meshwright.compiler.diagnostics import Diagnostic

    given = replace(read_given(source, sizes, segments, batch_dim, time_dim), declared=declared)
    answers: dict[str, Answer] = {}
    left, said = seconds, set[Diagnostic]()
    for number, (name, ask) in enumerate(questions(given).items()):
        # what a question of the model leaves is for those after it
        clock = Clock(left / max(1, len(OF_MODELS) - number))
        with told(f"{given.place}: {name}", clock):
            answer = answers[name] = ask(given, clock)
        left = max(0.1, left - clock.gone)
        typer.echo(f"{given.place}: {name}: {answer.headline}")
        new = [finding for finding in answer.findings if finding not in said]  # a step that cannot be captured is one
        said.update(new)
        if new:
            print_diagnostics(*new)
        if answer.footline:
            typer.echo(answer.footline)
    if given.without_step is not None:
        typer.echo(f"nothing is asked of a training step: {given.without_step}")
    for line in reports.answered(answers, given.origin):
        typer.echo(line)
    return all(answer.passed for answer in answers.values())
