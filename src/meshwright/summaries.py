"""What a folded step does under a plan for the whole one: the program of a rank, compiled and read off, in one piece or
to be cut by depth."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from meshwright.compiler.analysis.blocks import Folded
from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.analysis.summarize_stages import summarize_stages
from meshwright.compiler.diagnostics import Diagnostic, DiagnosticWarning
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.facts import repeated_blocks
from meshwright.compiler.passes.known_graphs import KnownGraphs
from meshwright.compiler.passes.stages import block_order
from meshwright.compiler.passes.take_apart import take_apart
from meshwright.compiler.passes.treated import present
from meshwright.compiler.passes.untie import untie
from meshwright.compiler.plan import Plan, Recompute, Save, pattern_expression
from meshwright.compiler.summary import RankSummary, StagedSummary
from meshwright.compiler.timeline.cuts import Depth

DEEPEST = 1
"""A folded step shows how weights are gathered so many blocks ahead."""


def treatments(blocks: Mapping[str, list[str]], entries: Iterable[Recompute]) -> dict[str, Save]:
    """By repeated block: what it keeps for backward. The first entry that matches a block counts."""
    found: dict[str, Save] = {}
    for entry in entries:
        expression = pattern_expression(entry.pattern)
        names = [name for names in blocks.values() for name in names if expression.fullmatch(name)]
        for index, name in enumerate(name for name in names if name not in found):
            found[name] = entry.save if index % entry.every == 0 else "all"
    return found


def turns(blocks: Mapping[str, list[str]], entries: Iterable[Recompute]) -> dict[str, tuple[Save, int]]:
    """By repeated block: what it keeps, and its place in a period of ``every`` blocks; so that what is folded are whole
    periods, whose blocks take turns. Blocks beyond the last whole period stand for themselves."""
    found: dict[str, tuple[Save, int]] = {}
    for entry in entries:
        expression = pattern_expression(entry.pattern)
        for names in blocks.values():
            mine = [name for name in names if expression.fullmatch(name) and name not in found]
            whole = len(mine) // entry.every * entry.every if entry.every > 1 else len(mine)
            for index, name in enumerate(mine):
                save = entry.save if index % entry.every == 0 else "all"
                found[name] = (save, index % entry.every if index < whole else -1 - index)
    return found


def summary_of(
    folded: Folded,
    plan: Plan,
    saves: Mapping[str, Save],
    known: KnownGraphs | None = None,
    told: dict[Diagnostic, None] | None = None,
) -> RankSummary:
    """The summary of a folded step under a plan for the whole one.

    ``saves`` are the plan's :func:`treatments`, ``known`` what has been compiled before; the compiler's warnings are
    added to ``told``. The program is only priced; it is verified when it is compiled to run.

    Every k-th block of the whole step is not every k-th of the folded one: there, blocks are named one by one.
    """
    with _telling(told):
        compiled = compile_step(folded.program, _of_folded(plan, folded, saves), verify=False, known=known)
    return summarize(compiled, folded.repeats)


def staged_summary_of(
    folded: Folded,
    plan: Plan,
    saves: Mapping[str, Save],
    apart: bool,
    known: KnownGraphs | None = None,
    told: dict[Diagnostic, None] | None = None,
    tied: StepProgram | None = None,
) -> StagedSummary:
    """Like :func:`summary_of`, to be cut by depth: of a plan without the axis ``pipe``. ``apart``: whether gradients of
    weights have a pass of their own; ``tied``: the program as :func:`untied` makes it."""
    with _telling(told):
        program, own = tied or untied(folded.program), _of_folded(plan, folded, saves)
        pairs = [(g.kept[0], g.kept[-1]) for g in folded.groups]
        taken = take_apart(program, own, known, apart=apart, groups=pairs)
    return summarize_stages(taken, [pair for pair in pairs if pair[0] in taken.blocks], folded.repeats)


def untied(program: StepProgram) -> StepProgram:
    """The step in which no two blocks share a weight."""
    return untie(program, block_order(program.micro.module.graph)[1:])


def depth_of(folded: Folded, summary: StagedSummary) -> Depth:
    """All blocks of the step that was folded, in order, each with the one of the summary that it is like."""
    like = {name: g.kept[0] if name == g.kept[0] else g.kept[-1] for g in folded.groups for name in g.blocks}
    order = block_order((folded.source or folded.program).micro.module.graph)
    if folded.absent:
        known = repeated_blocks(folded.blocks())
        containers = dict.fromkeys(f"{name.rpartition('.')[0]}.*".lstrip(".") for name in order)
        order = [name for pattern in containers for name in known.get(pattern, ())]
    return Depth(tuple(order), tuple(like.get(name, name) for name in order))


def _of_folded(plan: Plan, folded: Folded, saves: Mapping[str, Save]) -> Plan:
    if all(entry.every == 1 for entry in plan.recompute):
        return plan
    named = [Recompute(name, save) for name, save in saves.items() if save != "all"]
    return replace(plan, recompute=present(folded.program.micro, named))


@contextmanager
def _telling(told: dict[Diagnostic, None] | None) -> Iterator[None]:
    """Add what the compiler warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    if told is not None:
        told |= {w.message.diagnostic: None for w in caught if isinstance(w.message, DiagnosticWarning)}
