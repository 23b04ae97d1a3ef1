"""The bridge between FX nodes and op rules: a node as an :class:`OpCall`, a :class:`LocalCall` as a node or a run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

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


@dataclass(frozen=True)
class _Read:
    """What has been read off a node, and by what one sees that it still holds."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[fx.Node, ...]
    values: tuple[Any, ...]
    call: OpCall

    def holds(self, node: fx.Node) -> bool:
        # a node whose arguments are changed gets new tuples of them
        if node.args is not self.args or node.kwargs is not self.kwargs or node.meta.get("val") is not self.values[0]:
            return False
        return all(n.meta.get("val") is v for n, v in zip(self.operands, self.values[1:], strict=True))


_READ: WeakKeyDictionary[fx.Node, _Read] = WeakKeyDictionary()
"""A step is compiled for many plans; its nodes are read once."""


def op_call(node: fx.Node) -> OpCall | None:
    """The node as a rule sees it, by the fake tensors in ``meta["val"]``; None if it calls no ATen-like op."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    return _read(node, node.target).call


def operand_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes of the tensor operands, in the order of :attr:`OpCall.operands`."""
    assert isinstance(node.target, OpOverload)
    found = _READ.get(node)
    return found.operands if found is not None and found.holds(node) else _operand_nodes(node, node.target)


def _read(node: fx.Node, target: OpOverload) -> _Read:
    found = _READ.get(node)
    if found is None or not found.holds(node):
        operands = _operand_nodes(node, target)
        values = (node.meta.get("val"), *(n.meta.get("val") for n in operands))
        call = describe(target, node.args, node.kwargs, values[0])
        found = _READ[node] = _Read(node.args, node.kwargs, operands, values, call)
    return found


def _operand_nodes(node: fx.Node, target: OpOverload) -> tuple[fx.Node, ...]:
    found: list[fx.Node] = []

    def visit(value: Any) -> None:
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for v in value:
                visit(v)

    args, kwargs = _by_schema(target, node.args, node.kwargs)
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
