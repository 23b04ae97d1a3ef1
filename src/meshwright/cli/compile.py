"""``meshwright compile``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.settings import Separability, overrides, read_precision, read_separability


def compile_command(
    source: Annotated[str, typer.Argument(help="A .mw file, or a factory as package.module:factory.")],
    plan: Annotated[
        str | None,
        typer.Option(
            help="A preset such as fsdp=2,tp=2, a plan file, or auto. Default: what the source says, else fsdp."
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="With --plan auto: a preset such as h100x8, or a cluster file. Default: local.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="The number of ranks to compile for.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder to write. Default: gpt-build for gpt.mw.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="The samples of the global batch, instead of the source's.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="bf16, or 'bf16 compute, fp32 weights, fp32 reductions', instead of the source's."),
    ] = None,
    separability: Separability = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="name=value: the size of an axis, or a setting such as batch. May be repeated."),
    ] = None,
) -> None:
    """Compile a training step for a mesh and write the artefact folder."""
    chosen, compute, declared = overrides(set_ or []), read_precision(precision), read_separability(separability)
    if cluster is not None and plan != "auto":
        raise typer.BadParameter("--cluster chooses nothing without --plan auto")
    from meshwright.build import compile
    from meshwright.cli.faults import print_diagnostics
    from meshwright.cli.tables import plan_line

    built = compile(
        source,
        plan,
        ranks=ranks,
        overrides=chosen,
        output=output,
        cluster=cluster,
        batch=batch,
        precision=compute,
        separability=declared,
    )
    if built.warnings:
        print_diagnostics(*built.warnings)
    for note in built.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{plan_line(built.rank_program)}\nwritten to {built.folder}")
