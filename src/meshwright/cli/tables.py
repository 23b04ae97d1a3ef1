"""How reports are shown: rich tables, and numbers of bytes for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from meshwright.compiler.graph.pipeline_program import Compiled
    from meshwright.compiler.graph.program import StepProgram
    from meshwright.compiler.plan import Plan


def plan_line(rank_program: Compiled) -> str:
    """One line on what was compiled."""
    return described(rank_program.plan, rank_program.program)


def described(plan: Plan, program: StepProgram) -> str:
    """One line on a plan for a program."""
    count = sum(_elements(p.spec.shape) for p in program.parameters)
    name = f"{plan.name}: " if plan.name else ""
    stages = ""
    if plan.pipeline is not None:
        order = "its own table" if plan.pipeline.table else plan.pipeline.schedule
        stages = f"{len(plan.pipeline.first_blocks) + 1} stages by {order}, "
    return (
        f"{name}{plan.mesh.ranks} ranks ({plan.mesh}), {stages}{plan.microbatches} microbatch"
        f"{'' if plan.microbatches == 1 else 'es'} of {program.batch_size // plan.microbatches} samples, "
        f"{count:,} parameters"
    )


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> Table:
    """A table; ``numbers`` are the columns that are aligned to the right."""
    right = set(numbers)
    made = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def show(*tables: Table) -> None:
    """Print tables to the standard output, at least 100 columns wide."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    for one in tables:
        console.print(one)


def size(count: float) -> str:
    """Bytes with a binary unit, as devices and reasons have them: ``1.50 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("the last unit takes all")


def _elements(shape: Sequence[int]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
