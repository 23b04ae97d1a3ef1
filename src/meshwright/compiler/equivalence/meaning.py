"""Ops that change no value: views, copies, casts between floats; and ops that add."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from meshwright.compiler.analysis.offloading import TO_DEVICE
from meshwright.compiler.graph.adapter import OpOverload, overload_name

aten = torch.ops.aten
SAME = frozenset(
    {
        aten.clone.default,
        aten.detach.default,
        aten.alias.default,
        aten.contiguous.default,
        aten.lift_fresh_copy.default,
        aten.lift_fresh.default,
        TO_DEVICE,
    }
)
"""What gives its first operand again."""
VIEWS = frozenset(
    f"aten.{name}"
    for name in "view reshape _unsafe_view flatten unflatten view_copy unsqueeze squeeze unsqueeze_copy".split()
)
"""What regroups the elements of its operand and keeps their order, by name without the overload."""
CASTS = frozenset({"aten._to_copy.default", "aten.to.dtype", "prims.convert_element_type.default"})
ADD = aten.add.Tensor
TOTAL = "meshwright.total.default"


def is_view(target: Any) -> bool:
    """Whether an op is a view of the elements in their order."""
    name = overload_name(target)
    return name.rpartition(".")[0] in VIEWS and name != "aten.view.dtype"


def adds(node: fx.Node) -> bool:
    """Whether a node adds two tensors, and nothing else."""
    tensors = [a for a in node.args if isinstance(a, fx.Node)]
    return node.target is ADD and len(tensors) == 2 and bool(node.kwargs.get("alpha", 1) == 1)


def cast_to(node: fx.Node) -> torch.dtype | None:
    """The dtype that a cast gives; None for any other op."""
    if not isinstance(node.target, OpOverload) or overload_name(node.target) not in CASTS:
        return None
    given = [*node.args[1:], *node.kwargs.values()]
    return next((a for a in given if isinstance(a, torch.dtype)), None)


def is_item(node: fx.Node) -> bool:
    """Whether a node takes one of several results."""
    return node.target is operator.getitem


def local_shape(node: fx.Node, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that a view gives of a tensor of a shape; None if that cannot be read off the node."""
    assert isinstance(node.target, OpOverload)
    name = overload_name(node.target).split(".")[1]
    args: list[Any] = list(node.args[1:])
    if name in ("view", "reshape", "_unsafe_view", "view_copy") and isinstance(args[0], (list, tuple)):
        sizes = [n for n in args[0] if isinstance(n, int)]
        return _filled(sizes, shape) if len(sizes) == len(args[0]) else None
    if name in ("unsqueeze", "unsqueeze_copy"):
        at = args[0] % (len(shape) + 1)
        return (*shape[:at], 1, *shape[at:])
    if name == "squeeze":
        given = args[0] if args else range(len(shape))
        gone = {d % max(len(shape), 1) for d in ([given] if isinstance(given, int) else given)}
        return tuple(n for d, n in enumerate(shape) if not (d in gone and n == 1))
    if name == "flatten":
        first, last = (a % len(shape) for a in (*args, *(0, -1)[len(args) :]))
        return (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])
    return None


def _filled(sizes: list[int], shape: tuple[int, ...]) -> tuple[int, ...]:
    rest = math.prod(n for n in sizes if n != -1)
    return tuple(math.prod(shape) // rest if n == -1 else n for n in sizes)
