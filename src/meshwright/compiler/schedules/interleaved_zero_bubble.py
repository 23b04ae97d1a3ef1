"""Interleaved 1F1B whose gradients of the weights come later, where the pipeline would wait (Qi et al. 2023)."""

from __future__ import annotations

from meshwright.compiler.schedules.interleaved import ahead, passes
from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.table import Schedule, alternate, only, single
from meshwright.compiler.schedules.zero_bubble_h1 import late_weights

NAME = "interleaved-zb"
VIRTUAL = 2


def schedule(request: Request) -> Schedule:
    """In flight: no more than interleaved 1F1B has on its first rank."""
    p, m, v = request.ranks, request.microbatches, request.virtual
    rows = []
    for r in range(p):
        row = alternate(*passes(request, r), ahead(request, r))
        rows.append(single(late_weights(row, r if v == 1 else 2 * r)))
    return Schedule(NAME, (tuple(s % p for s in range(v * p)),), m, only(rows, m))
