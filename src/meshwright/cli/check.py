"""``meshwright check``"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.output import write
from meshwright.cli.pages import page_of
from meshwright.cli.settings import Separability, overrides, read_separability


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
    as_json: Annotated[Path | None, typer.Option("--json", help="Write all findings to this file as JSON.")] = None,
    sarif: Annotated[Path | None, typer.Option(help="Write all findings to this file as SARIF.")] = None,
    explain: Annotated[str | None, typer.Option(help="Print the page of a code, E0711 say, and do no more.")] = None,
) -> None:
    """Check that no output of a model sees a later token, another row of the batch, or another document.

    The exit code is 0 if there is no leak, 1 if there is one or nothing can be said, 2 if the source cannot be read.
    """
    from meshwright.cli.faults import print_diagnostics
    from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError

    try:
        if explain is not None:
            typer.echo(page_of(explain))
            return
        if source is None:
            print_diagnostics(Diagnostic("E0901", "missing argument 'SOURCE'", action="see meshwright check --help"))
            raise typer.Exit(2)
        from meshwright.checking_answers import questions
        from meshwright.checking_report import as_sarif
        from meshwright.checking_source import read_given

        for path, option in ((as_json, "--json"), (sarif, "--sarif")):
            if path is not None:
                write(path, "", "E0718", option)  # told before minutes of checking, not after them
        declared = read_separability(separability)
        given = replace(read_given(source, overrides(set_ or []), segments, batch_dim, time_dim), declared=declared)
        asked = questions(given)
        answers = {}
        for name, ask in asked.items():
            answer = answers[name] = ask(given)
            typer.echo(f"{given.place}: {name}: {answer.headline}")
            if answer.findings:
                print_diagnostics(*answer.findings)
            if answer.footline:
                typer.echo(answer.footline)
        if given.without_step is not None:
            typer.echo(f"nothing is asked of a training step: {given.without_step}")
        passed = all(answer.passed for answer in answers.values())
        if as_json is not None:
            report = {"passed": passed, **{name: answer.json() for name, answer in answers.items()}}
            write(as_json, json.dumps(report, indent=2) + "\n", "E0718", "--json")
        if sarif is not None:
            log = as_sarif([finding for answer in answers.values() for finding in answer.findings])
            write(sarif, json.dumps(log, indent=2) + "\n", "E0718", "--sarif")
    except MeshwrightError as fault:
        print_diagnostics(*fault.diagnostics)
        raise typer.Exit(2) from None
    if not passed:
        raise typer.Exit(1)
