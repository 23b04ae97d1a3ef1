"""Check that the ranks of what was compiled come to an end, before any of them begins."""

from __future__ import annotations

from meshwright.compiler.analysis.rank_instructions import rank_instructions
from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.schedules.deadlock import check_ranks
from meshwright.compiler.schedules.symmetry import RankPrograms

_MOST = 8
"""Findings that are told, beside the first."""


def verify_end(compiled: Compiled) -> None:
    """Go through the programs of all ranks, every collective and message of a step: whether they match, and whether no
    ranks wait for one another for ever.

    Raises MeshwrightError E0507 with the cycle of ranks, or with what does not match.
    """
    programs = rank_instructions(compiled)
    first, *others = check_ranks(programs) or (None,)
    if first is None:
        return
    notes = [fault.message for fault in others[:_MOST]]
    notes += [f"and {len(others) - _MOST} more"] if len(others) > _MOST else []
    notes += _stands_for(programs)
    pipeline = compiled.plan.pipeline
    action = "change the table of the schedule, or take one by its name"
    if pipeline is None or not pipeline.table:
        action = "compile with another plan, and report this one: a program that was compiled should come to an end"
    raise error("E0507", f"the ranks would not come to an end: {first.message}", action=action, notes=notes)


def _stands_for(programs: RankPrograms) -> list[str]:
    """Which ranks are not named because they do the same as others."""
    alike = [name for name, size in programs.mesh.axes if size > 1 and name not in programs.apart]
    if not alike:
        return []
    return [f"what is said of a rank holds for all that differ from it along {' or '.join(alike)} alone"]
