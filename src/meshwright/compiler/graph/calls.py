"""The bridge between FX nodes and op rules: a node as an :class:`OpCall`, a :class:`LocalCall` as a node or a run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.adapter import OpOverload, overload_name
from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.rules.rule import LocalCall, Offset, OpCall, Operand, TensorType


@cache
def overload(name: str) -> OpOverload:
    """``aten.add.Tensor`` -> ``torch.ops.aten.add.Tensor``. Raises AttributeError for an unknown op."""
    namespace, op, variant = name.split(".", 2)
    if namespace == "meshwright":
        importlib.import_module("meshwright.compiler.graph.ops")  # registers them
    found = getattr(getattr(getattr(torch.ops, namespace), op), variant)
    assert isinstance(found, OpOverload)
    return found


def op_call(node: fx.Node) -> OpCall | None:
    """The node as a rule sees it, by the fake tensors in ``meta["val"]``; None if it calls no ATen-like op."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    return describe(node.target, node.args, node.kwargs, node.meta.get("val"))


def operand_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes of the tensor operands, in the order of :attr:`OpCall.operands`."""
    assert isinstance(node.target, OpOverload)
    found: list[fx.Node] = []

    def visit(value: Any) -> None:
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for v in value:
                visit(v)

    args, kwargs = _by_schema(node.target, node.args, node.kwargs)
    visit(args)
    visit(list(kwargs.values()))
    return tuple(found)


def describe(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> OpCall:
    """The call of an op on tensors (or nodes that have fake ones), ``value`` being what it returns."""
    operands: list[TensorType] = []

    def abstract(value: Any) -> Any:
        if isinstance(value, fx.Node):
            value = value.meta["val"]
        if isinstance(value, Tensor):
            operands.append(_type(value))
            return operands[-1]
        if isinstance(value, torch.SymInt):
            return int(value)
        if isinstance(value, (list, tuple)):
            return [abstract(v) for v in value]
        return value

    ordered, named = _by_schema(target, args, kwargs)
    positional = tuple(abstract(a) for a in ordered)
    keywords = {k: abstract(v) for k, v in named.items()}
    values = value if isinstance(value, (list, tuple)) else (value,)
    results = tuple(_type(v) if isinstance(v, Tensor) else None for v in values)
    pointwise = torch.Tag.pointwise in target.tags
    return OpCall(overload_name(target), positional, keywords, tuple(operands), results, pointwise)


def _by_schema(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Every positional parameter in order, defaults filled in, and the keyword-only ones that are given."""
    ordered: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in target._schema.arguments:
        if parameter.kwarg_only:
            if parameter.name in kwargs:
                named[parameter.name] = kwargs[parameter.name]
        elif len(ordered) < len(args):
            ordered.append(args[len(ordered)])
        else:
            ordered.append(kwargs.get(parameter.name, parameter.default_value))
    return ordered, named


def _type(tensor: Tensor) -> TensorType:
    return TensorType(tuple(int(n) for n in tensor.shape), short_name(tensor.dtype))


def bind(
    local: LocalCall, operands: Sequence[Any], offset: Callable[[Offset], Any]
) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
    """Target and arguments with operands and offsets in their places."""

    def concrete(value: Any) -> Any:
        if isinstance(value, Operand):
            return operands[value.index]
        if isinstance(value, Offset):
            return offset(value)
        if isinstance(value, (list, tuple)):
            return [concrete(v) for v in value]
        return value

    args = tuple(concrete(a) for a in local.args)
    return overload(local.name), args, {k: concrete(v) for k, v in local.kwargs.items()}


def emit(graph: fx.Graph, local: LocalCall, operands: Sequence[fx.Node], offset: Callable[[Offset], Any]) -> fx.Node:
    """A node that makes the local call; ``offset`` gives an int or a node for each :class:`Offset`."""
    target, args, kwargs = bind(local, operands, offset)
    return graph.call_function(target, args, kwargs)


def run(local: LocalCall, operands: Sequence[Tensor], offset: Callable[[Offset], int]) -> Any:
    """The local call carried out."""
    target, args, kwargs = bind(local, operands, offset)
    return target(*args, **kwargs)
