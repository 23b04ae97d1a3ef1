"""Reads a precision as a ``.mw`` file says it: ``bf16 compute, fp32 weights, fp32 reductions``, or ``bf16`` alone."""

from __future__ import annotations

from meshwright.compiler.diagnostics import error, suggestion
from meshwright.compiler.plan import Precision
from meshwright.compiler.plan_reader import DTYPES

USES = {"compute": "compute", "weights": "weights", "reductions": "reduce"}
"""By the word for it: what a dtype is used for."""


def parse_precision(text: str) -> Precision:
    """What is not said is fp32; a dtype alone is that of computation. Raises MeshwrightError E0321."""
    said: dict[str, str] = {}
    for part in text.split(","):
        words = part.split()
        dtype, use, *more = words if len(words) > 1 else ("".join(words), "compute")
        if dtype not in DTYPES:
            raise error("E0321", f"unknown precision '{dtype}'", action=suggestion(dtype, DTYPES))
        if use not in USES or more:
            said_of = " ".join((use, *more))
            raise error("E0321", f"unknown use '{said_of}' of a precision", action=suggestion(said_of, USES))
        if USES[use] in said:
            raise error("E0321", f"the precision of '{use}' is said twice", action="say it once")
        said[USES[use]] = dtype
    return Precision(**said)
