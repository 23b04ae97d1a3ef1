"""Tells of sums in half precision whose errors are far above a rounding, when a plan is compiled."""

from __future__ import annotations

import warnings

from meshwright.compiler.diagnostics import Diagnostic, DiagnosticWarning
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.numerics import Finding, findings
from meshwright.compiler.numerics.finding import BY_PASS, KINDS

SHOWN = 3
"""Findings that a warning names."""


def tell_numerics(compiled: Compiled) -> None:
    """Warn (W0720) of the grave findings of a plan whose ``numerics`` is ``warn``."""
    if compiled.plan.numerics != "warn":
        return
    grave = [f for f in findings(compiled) if f.grave]
    if grave:
        warnings.warn(DiagnosticWarning(_warning(grave)), stacklevel=3)


def _warning(grave: list[Finding]) -> Diagnostic:
    worst = grave[0]
    several = f", and {len(grave) - 1} more places" if len(grave) > 1 else ""
    message = f"half precision costs more than a few roundings: {worst.message}{several}"
    told = [f"{f.code}, {KINDS[f.code]}: {f.message}; relative error about {f.error:.2g}" for f in grave[1 : 1 + SHOWN]]
    mends = any(f.rewrite in BY_PASS and not f.advice for f in grave)
    safe = 'write numerics = "safe" in the plan to take such sums in fp32, or "as-written" to be told no more'
    action = safe if mends else worst.advice or safe
    return Diagnostic("W0720", message, worst.origin, action, tuple(told))
