"""Whether what all passes together have made of a step is still that step; see ``compiler/equivalence/check.py``."""

from __future__ import annotations

import warnings

from meshwright.compiler.diagnostics import Diagnostic, DiagnosticWarning, MeshwrightError
from meshwright.compiler.equivalence.check import check_relations, comparable
from meshwright.compiler.equivalence.findings import UNDECIDED
from meshwright.compiler.graph.pipeline_program import Compiled

TOLD = 3
"""Findings that are told, at most: what is wrong early is wrong in what follows."""


def verify_relations(compiled: Compiled) -> None:
    """Raises MeshwrightError E0740, E0742 or E0743 for a program that computes something else, and warns with W0740 of
    one of which that cannot be told. Where groups of the batch were declared to stand for the whole, ranks are meant to
    compute another step: that is compared by numbers alone (``verification.py``)."""
    if not comparable(compiled.plan):
        return
    found = check_relations(compiled).findings
    wrong = [f.diagnostic() for f in found if f.code != UNDECIDED]
    if wrong:
        raise MeshwrightError(*wrong[:TOLD])
    if found:
        first = found[0].diagnostic()
        message = f"it could not be proved that the ranks compute what one device does: {first.message}"
        told = Diagnostic("W0740", message, first.place, first.action, first.notes)
        warnings.warn(DiagnosticWarning(told), stacklevel=2)
