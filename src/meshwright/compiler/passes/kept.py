"""What a recomputed block keeps of its forward pass.

Never computed twice, whatever a plan says, is a choice that depends on values: which experts a token goes to must be
the same in both passes, also where a kernel adds in another order the second time. Nor is a statistic of the batch,
which is small, and for which ranks and microbatches would have to meet again. With ``matmuls``, what takes long or may
need communication is kept too.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from meshwright.compiler.analysis.strides import as_view
from meshwright.compiler.graph.calls import op_call
from meshwright.compiler.plan import Save
from meshwright.compiler.rules import rule_of

CONTRACTIONS = frozenset(
    f"{space}::{name}"
    for space, names in (
        ("meshwright", ("einsum", "attention", "routed_mm", "grouped_mm")),
        ("aten", ("mm", "bmm", "addmm", "baddbmm", "addbmm", "dot", "mv", "addmv", "_grouped_mm", "convolution")),
    )
    for name in names
)
"""Ops whose time grows faster than their results."""

CHOICES = frozenset(
    f"aten::{name}"
    for name in ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "mode", "median", "nanmedian", "nonzero",
                 "max.dim", "min.dim", "searchsorted", "bucketize", "histc", "bincount")
) | {"meshwright::count"}  # fmt: skip
"""Ops whose results say where something goes."""


REDUCTIONS = frozenset(
    f"aten::{name}"
    for name in ("sum", "mean", "amax", "amin", "prod", "logsumexp", "var", "std", "var_mean", "std_mean")
)
"""Ops that make of samples something that is no larger for more of them."""


def of_the_batch(node: fx.Node) -> bool:
    """Whether an op reduces the first dim, which is that of samples, or all dims."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in REDUCTIONS:
        return False
    before = node.all_input_nodes[0].meta.get("val")
    if not isinstance(before, Tensor) or not before.ndim:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    dims = node.kwargs.get("dim", node.args[names.index("dim")] if "dim" in names[: len(node.args)] else None)
    listed = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, (list, tuple)) else []
    return not listed or 0 in listed or -before.ndim in listed


def kept_by_policy(node: fx.Node, save: Save) -> bool:
    """Whether the results of an op are kept for what it is."""
    if _named(node, CHOICES):
        return True
    if save == "nothing":
        return False
    return save == "all" or _named(node, CONTRACTIONS) or _whole_operands(node)


def is_view(node: fx.Node) -> bool:
    """Whether a node's value lies in the memory of its operand, so that keeping it takes nothing."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if not any(r.alias_info is not None for r in node.target._schema.returns):
        return False
    if node.target._schema.name not in ("aten::reshape", "aten::contiguous", "aten::flatten"):
        return True
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    if node.target._schema.name == "aten::contiguous":
        return before.is_contiguous()
    return as_view(before.shape, before.stride(), after.shape)


def _whole_operands(node: fx.Node) -> bool:
    """Whether an op has no rule: it needs whole operands, which have to be gathered each time."""
    call = op_call(node)
    return call is not None and rule_of(call) is None


def _named(node: fx.Node, names: frozenset[str]) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return schema.name in names or f"{schema.name}.{schema.overload_name}" in names
