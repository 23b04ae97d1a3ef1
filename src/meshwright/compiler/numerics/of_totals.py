"""Findings about gradients that are added up over microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from meshwright.compiler.graph.dtypes import PRECISIONS, short_name
from meshwright.compiler.numerics.casts import HALVES, dtype_of
from meshwright.compiler.numerics.error_model import error_of_sum, one_rounding
from meshwright.compiler.numerics.finding import Finding
from meshwright.compiler.numerics.looked import Gradient, Looked
from meshwright.compiler.plan import Plan

MICROBATCHES = 4
"""From which an accumulator in half precision is told."""


def findings_of_microbatches(
    looked: Looked, plan: Plan, made: Mapping[str, Gradient], *, rounds: bool
) -> Iterator[Finding]:
    """E0723 of gradients that a graph makes, or E0731 where they were sums over ranks; E0730 of those that it takes in
    half precision, though they were added up in fp32 (``rounds``: where the graph is one of a rank, and sums them over
    ranks). ``made`` says how the graph makes gradients."""
    count = plan.microbatches
    least = PRECISIONS[plan.accumulate]
    for value, node in looked.outputs.items():
        dtype = dtype_of(node)
        if value.kind != "gradient" or dtype not in HALVES or dtype is None:
            continue
        if torch.promote_types(dtype, least) == dtype and count >= MICROBATCHES:
            name = short_name(dtype)
            message = f"gradients are added up over {count} microbatches in {name}"
            error = error_of_sum(name, count)
            yield _finding("E0723", looked, node, message, name, count, error, "main gradients")
        elif made[value.name].summed:
            name = short_name(dtype)
            message = f"a sum over ranks is rounded to {name} before it is added up over {count} microbatches"
            yield _finding("E0731", looked, node, message, name, count, one_rounding(name), "fp32")
    if not rounds or least in HALVES:
        return
    for node, value in looked.inputs.items():
        dtype = dtype_of(node)
        if value.kind == "gradient" and dtype in HALVES:
            name = short_name(dtype)
            message = (
                f"gradients that were added up over {count} microbatches in fp32 are rounded to {name} just before"
            )
            message += " they are summed over ranks"
            yield _finding("E0730", looked, node, message, name, count, one_rounding(name), "move cast")


def _finding(
    code: str, looked: Looked, node: fx.Node, message: str, dtype: str, count: int, error: float, rewrite: str
) -> Finding:
    origin = looked.origin(node)
    return Finding(code, message, looked.name, (node.name,), dtype, count, "random signs", error, rewrite, origin)
