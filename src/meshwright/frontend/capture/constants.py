"""Values of an exported graph that depend on no input: evaluated at compile time, in little memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.adapter import is_mutable, is_random, untraced

SMALL = 1 << 20
"""Elements up to which a value is searched for dims along which nothing changes."""
UNTAGGED = ("__and__", "__or__", "__xor__", "to")
"""Pointwise ops that ATen does not tag so."""


def constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values depend on no input."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        constant = node.op == "call_function" and all(n in found for n in node.all_input_nodes)
        if constant and not is_random(node.target) and not is_mutable(node.target):
            found.add(node)
    return found


def evaluate(node: fx.Node, values: dict[fx.Node, Any] | None = None) -> Tensor:
    """The real value of a constant node, on the CPU. ``values`` remembers what it was computed from."""
    values = {} if values is None else values
    pending = [node]
    while pending:
        at = pending[-1]
        missing = [n for n in at.all_input_nodes if n not in values]
        if missing:
            pending.extend(missing)
            continue
        pending.pop()
        if at not in values:
            args, kwargs = fx.map_arg((at.args, at.kwargs), lambda n: values[n])
            if "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            with untraced():
                values[at] = _call(at.target, args, kwargs)
    found = values[node]
    assert isinstance(found, Tensor)
    return found


def _call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op's value, in as little memory as what differs in it takes.

    A mask is the same for every sample and head. So a dim along which nothing changes is kept as a view of stride
    0, and a pointwise op on such views is computed once: 16 masks of 8192 x 8192 cost what one costs.
    """
    if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        target = torch.ops.aten.reshape.default  # the strides of what is computed here are its own
    shapes = [a.shape for a in args if isinstance(a, Tensor)]
    pointwise = torch.Tag.pointwise in target.tags or str(target).split(".")[1] in UNTAGGED
    if not pointwise or not shapes:
        found = target(*args, **kwargs)
        return _shared(found) if isinstance(found, Tensor) and found.numel() <= SMALL else found
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]  # torch has no types here
    found = target(*(_once(a) if isinstance(a, Tensor) else a for a in args), **kwargs)
    return found.expand(shape)


def _once(x: Tensor) -> Tensor:
    """One of each of the equal slices along dims of stride 0."""
    for dim in range(x.dim()):
        x = x.narrow(dim, 0, 1) if x.stride(dim) == 0 and x.shape[dim] > 1 else x
    return x


def _shared(x: Tensor) -> Tensor:
    """The same values, with stride 0 along dims in which they do not change."""
    for dim in range(x.dim()):
        first = x.narrow(dim, 0, 1)
        if x.shape[dim] > 1 and bool((x == first).all()):
            x = first.expand(x.shape)
    return x
