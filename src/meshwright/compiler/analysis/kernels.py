"""One op of a rank program as a kernel: what it computes, reads and writes, from the sizes of its tensors alone."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.analysis.parts import parts
from meshwright.compiler.analysis.strides import as_view, elements
from meshwright.compiler.analysis.workspace import explicit, workspace
from meshwright.compiler.graph.adapter import OpOverload, overload_name
from meshwright.compiler.graph.calls import op_call
from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.graph.ops.contraction import parse
from meshwright.compiler.rules import rule_of
from meshwright.compiler.rules.rule import OpCall, Rule
from meshwright.compiler.summary import Kernel, KernelKind

_COPIES = {
    "clone", "contiguous", "reshape", "_to_copy", "copy", "cat", "stack", "constant_pad_nd", "slice_backward",
    "select_backward", "repeat", "roll", "flip", "slice_scatter", "select_scatter", "repeat_interleave", "tril", "triu",
}  # fmt: skip
_LOOKUPS = {
    "embedding", "embedding_backward", "embedding_dense_backward", "pick", "index", "index_select", "index_put",
    "gather", "scatter", "scatter_add", "index_add", "scatter_reduce", "masked_select", "nonzero",
}  # fmt: skip
_TABLES = {"embedding", "pick", "index", "index_select", "gather"}
"""Lookups that read no more of their first operand than they return."""
_ROUTED = {"routed_mm", "routed_outer", "grouped_mm", "grouped_outer"}
_CONTRACTIONS = {"einsum", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot"} | _ROUTED
_COMPOSED = ("elementwise", "reduction", "lookup")
"""Kinds of ops that may be written in others; matrix products and fused attention are one kernel each."""
_NUMBERING = ("site",)
"""Arguments that only tell calls apart."""
_VIEW = {"_unsafe_view"}
"""Ops that share memory though their schema does not say so."""


Known = dict[Hashable, tuple[Kernel, int]]
"""Kernels and their work space, by call."""


def kernel(node: fx.Node, known: Known) -> tuple[Kernel, int]:
    """The kernel of a node that calls a torch op or an operator, and the bytes that it takes while it runs. ``known``
    keeps those of equal calls."""
    names = [a.name for a in node.target._schema.arguments] if isinstance(node.target, OpOverload) else []
    given = (_seen(a) for i, a in enumerate(node.args) if i >= len(names) or names[i] not in _NUMBERING)
    key = (node.target, *given, *((k, _seen(v)) for k, v in node.kwargs.items() if k not in _NUMBERING))
    if key not in known:
        found = _kernel(node)
        composed = found.kind in _COMPOSED or (found.kind == "attention" and explicit(node))
        known[key] = replace(found, parts=parts(node, _kind)) if composed else found, workspace(node)
    return known[key]


def flops(node: fx.Node) -> float:
    """The floating point operations of a node that calls a torch op or an operator."""
    return _kernel(node).flops


def is_view(node: fx.Node) -> bool:
    """Whether the result lives in the memory of the first operand: by the op's schema, and as the memory lies."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    name = _op(node.target)
    if name in _VIEW:
        return True
    if not any(r.alias_info is not None for r in node.target._schema.returns):
        return False
    source, result = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(source, Tensor) or not isinstance(result, Tensor):
        return True
    if name == "contiguous":
        return source.is_contiguous()
    if name in ("reshape", "flatten"):
        return as_view(source.shape, source.stride(), result.shape)
    return True


def _op(target: OpOverload) -> str:
    return target._schema.name.partition("::")[2]


def _seen(value: Any) -> Hashable:
    """What a call depends on: dtype, shape and strides of tensors; numbers and names as they are."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
        if not isinstance(value, (Tensor, list, tuple)):
            return "number"
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, (list, tuple)):
        return tuple([_seen(v) for v in value])
    return (type(value), value) if isinstance(value, (bool, int, float)) else str(value)


def _kernel(node: fx.Node) -> Kernel:
    target = node.target
    results = list(_tensors(node.meta.get("val")))
    operands = [n.meta.get("val") for n in node.all_input_nodes]
    dtype = _dtype(results, operands)
    if not isinstance(target, OpOverload):
        return Kernel(f"operator.{getattr(target, '__name__', '')}", "view", 0.0, 0, 0, dtype)
    name = overload_name(target)
    if is_view(node):
        return Kernel(name, "view", 0.0, 0, 0, dtype)
    written = sum(int(v.numel()) * v.element_size() for v in results)
    read = sum(_bytes_read(v) for v in operands)
    call = op_call(node)
    assert call is not None
    rule = rule_of(call)
    kind = _kind(target)
    if _op(target) in _TABLES:
        table = call.operands[0]
        read -= _bytes_read(operands[0])
        read += min(_bytes_read(operands[0]), written)
        assert table is not None
    work = rule.flops if rule is not None and rule.flops is not None else None
    if work is None:
        counted = operands if kind == "reduction" else results
        work = float(max((int(v.numel()) for v in _tensors(counted)), default=0)) if kind != "copy" else 0.0
    return Kernel(name, kind, float(work), read, written, dtype, _sizes(call, rule, kind))


def _kind(target: OpOverload) -> KernelKind:
    name = _op(target)
    if name in _CONTRACTIONS or name in ("convolution", "convolution_backward"):
        return "matmul"
    if name in ("attention", "attention_backward"):
        return "attention"
    if name in _COPIES:
        return "copy"
    if name in _LOOKUPS:
        return "lookup"
    if torch.Tag.pointwise in target.tags or name == "dropout":
        return "elementwise"
    takes = any("Tensor" in str(a.type) for a in target._schema.arguments)
    return "reduction" if takes else "elementwise"


def _sizes(call: OpCall, rule: Rule | None, kind: KernelKind) -> tuple[int, ...]:
    if kind == "attention":
        first = 1 if "backward" in call.name else 0
        query, key = call.operands[first].shape, call.operands[first + 1].shape
        return (query[0], query[1], query[2], key[2], query[3])
    if kind != "matmul" or rule is None or rule.results[0] is None:
        return ()
    if "convolution" in call.name:
        return _convolution_sizes(call)
    if call.name.startswith("meshwright.einsum"):
        a, b, out = (set(t) for t in parse(str(call.args[0])))
    elif call.name.split(".")[1] in _ROUTED:
        # each row has one of the weights
        a, b, out = ({f for fs in dims for f in fs} - {"e"} for dims in (*rule.operands[:2], rule.results[0]))
    else:
        # of addmm, the bias comes first
        a, b = ({f for factors in dims for f in factors} for dims in rule.operands[-2:])
        out = {f for factors in rule.results[0] for f in factors}
    parts = (a & b & out, (a - b) & out, (b - a) & out, (a | b) - out)
    return tuple(math.prod(rule.sizes[f] for f in part) for part in parts)


def _convolution_sizes(call: OpCall) -> tuple[int, ...]:
    """``(groups, positions, output channels, window)`` of the product that a convolution forward is."""
    backward = "backward" in call.name
    weight = call.operands[2 if backward else 1].shape
    output = call.operands[0] if backward else call.results[0]
    assert output is not None
    groups = int(call.args[9 if backward else 8])
    positions = output.shape[0] * math.prod(output.shape[2:])
    return (groups, positions, weight[0] // groups, math.prod(weight[1:]))


def _bytes_read(value: Any) -> int:
    """The bytes of a value's tensors; what is expanded counts once."""
    return sum(elements(v.shape, v.stride()) * v.element_size() for v in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _dtype(results: list[Tensor], operands: list[Any]) -> str:
    """The dtype of computation: the first floating one of the operands, else of the results."""
    found = [*_tensors(operands), *results]
    floating = [t for t in found if t.is_floating_point()]
    chosen = (floating or found)[:1]
    return short_name(chosen[0].dtype) if chosen else "f32"
