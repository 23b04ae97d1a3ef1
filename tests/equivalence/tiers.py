"""What each tier says of a compiled program: '' if it finds nothing."""

from __future__ import annotations

from meshwright.compiler.equivalence.check import check_relations
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.miniature import as_it_is, run_miniature


def by_relations(compiled: Compiled) -> str:
    """The relation checker."""
    found = check_relations(compiled).findings
    return f"{found[0].code} at {found[0].node or found[0].graph}: {found[0].message}" if found else ""


def by_numbers(compiled: Compiled) -> str:
    """All ranks run in this process in float64, against the step for one device; the models are small enough as they
    are. A program that cannot be run at all is told as well."""
    try:
        found = run_miniature(as_it_is(compiled.program, compiled.plan), compiled)
    except Exception as fault:  # whatever stops a rank
        return f"it does not run: {type(fault).__name__}: {next(iter(str(fault).splitlines()), '')}"
    return "" if found.passed else f"difference {found.worst:.1e}"
