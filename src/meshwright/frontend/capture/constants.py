"""Values of an exported graph that depend on no input: evaluated at compile time, in little memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.adapter import is_mutable, is_random, untraced

SMALL = 1 << 28
"""Elements up to which a value is searched for dims along which nothing changes."""
LARGEST = 1 << 32
"""Elements up to which a value is computed."""
UNTAGGED = ("__and__", "__or__", "__xor__", "to")
"""Pointwise ops that ATen does not tag so."""
_ALONG = {
    torch.ops.aten.cat.default: (1, 0),
    torch.ops.aten.cumsum.default: (1, 0),
    torch.ops.aten.diff.default: (2, -1),
}
"""Ops that mix elements along one dim alone: the position of that argument, and its default."""


_FILLS = {"full": 0, "ones": 0, "zeros": 0, "new_full": 1, "new_ones": 1, "new_zeros": 1}
"""Ops that give one value to all elements, with the position of the shape."""
_LIKE = ("full_like", "ones_like", "zeros_like")


class TooLarge(Exception):
    """A value has more than LARGEST elements that may differ."""


def constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values depend on no input."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        constant = node.op == "call_function" and all(n in found for n in node.all_input_nodes)
        if constant and not is_random(node.target) and not is_mutable(node.target):
            found.add(node)
    return found


def evaluate(node: fx.Node, values: dict[fx.Node, Any] | None = None) -> Tensor:
    """The real value of a constant node, on the CPU. ``values`` remembers what it was computed from.

    Raises TooLarge.
    """
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
                values[at] = _call(at.target, args, kwargs, at.meta.get("val"))
    found = values[node]
    assert isinstance(found, Tensor)
    return found


def _call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: Any = None) -> Any:
    """The op's value, in as little memory as what differs in it takes. ``like`` has its shape.

    A mask is the same for every sample and head. So a dim along which nothing changes is kept as a view of stride
    0, and a pointwise op on such views is computed once: 16 masks of 8192 x 8192 cost what one costs.
    """
    if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        target = torch.ops.aten.reshape.default  # the strides of what is computed here are its own
    shapes = [a.shape for a in args if isinstance(a, Tensor)]
    name = str(target).split(".")[1]
    pointwise = torch.Tag.pointwise in target.tags or name in UNTAGGED
    if target in _ALONG:
        return _along(target, args, kwargs)
    if name in _FILLS:
        at = _FILLS[name]
        return target(*args[:at], [1] * len(args[at]), *args[at + 1 :], **kwargs).expand(args[at])
    if name in _LIKE:
        return target(once(args[0]), *args[1:], **kwargs).expand(args[0].shape)
    if not pointwise or not shapes:
        views = any(r.alias_info is not None for r in target._schema.returns)
        if isinstance(like, Tensor) and like.numel() > SMALL and not views:
            raise TooLarge
        found = target(*args, **kwargs)
        return _shared(found) if isinstance(found, Tensor) and found.numel() <= SMALL else found
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]  # torch has no types here
    narrow = [once(a) if isinstance(a, Tensor) else a for a in args]
    computed = torch.broadcast_shapes(*(a.shape for a in narrow if isinstance(a, Tensor)))  # type: ignore[no-untyped-call]  # as above
    if computed.numel() > LARGEST:
        raise TooLarge
    return target(*narrow, **kwargs).expand(shape)


def _along(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op along one dim, computed once along the dims in which none of its tensors changes."""
    tensors = [x for a in (*args, *kwargs.values()) for x in (a if isinstance(a, (list, tuple)) else (a,))]
    tensors = [x for x in tensors if isinstance(x, Tensor)]
    position, default = _ALONG[target]
    rank = tensors[0].dim()
    along = (args[position] if len(args) > position else kwargs.get("dim", default)) % max(1, rank)
    alike = all(x.dim() == rank for x in tensors)
    equal = [d for d in range(rank) if alike and d != along and all(x.stride(d) == 0 for x in tensors)]

    def narrowed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [narrowed(v) for v in value]
        for dim in equal if isinstance(value, Tensor) else ():
            value = value.narrow(dim, 0, 1)
        return value

    found = target(*(narrowed(a) for a in args), **{k: narrowed(v) for k, v in kwargs.items()})
    return found.expand([tensors[0].shape[d] if d in equal else n for d, n in enumerate(found.shape)])


def once(x: Tensor) -> Tensor:
    """One of each of the equal slices along dims of stride 0."""
    for dim in range(x.dim()):
        x = x.narrow(dim, 0, 1) if x.stride(dim) == 0 and x.shape[dim] > 1 else x
    return x


def _shared(x: Tensor) -> Tensor:
    """The same values, with stride 0 along dims in which they do not change."""
    for dim in range(x.dim()):
        first = x.narrow(dim, 0, 1)
        if x.shape[dim] > 1 and torch.equal(first, x.narrow(dim, 1, 1)) and bool((x == first).all()):
            x = first.expand(x.shape)
    return x
