"""Sums that a rank takes by itself, in half precision: by ops that were measured to, and term by term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from meshwright.compiler.graph.adapter import OpOverload, overload_name
from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.numerics.accumulators import backends, keeps_half, rows
from meshwright.compiler.numerics.casts import HALVES, half

ROWS = 16
"""Addends from which an accumulator in half precision is told."""
USES = 8
"""Terms from which a sum that is taken term by term is told: the gradient of a parameter used so often."""


@dataclass(frozen=True)
class LowAccumulator:
    """An op that keeps partial sums in half precision."""

    node: fx.Node
    dtype: str
    count: int
    """Addends of one sum, at most."""


@dataclass(frozen=True)
class LowChain:
    """``((a + b) + c) + ...``, each partial sum in half precision; ``last`` is the whole sum."""

    last: fx.Node
    partial: tuple[fx.Node, ...]
    """The sums before ``last``, which nothing else reads."""
    terms: tuple[fx.Node, ...]


def low_accumulators(graph: fx.Graph, backend: str | None = None) -> list[LowAccumulator]:
    """The ops over ``ROWS`` addends or more. Without a backend, those that are so on any that was measured."""
    asked = backends() if backend is None else (backend,)
    found = []
    for node in graph.nodes:
        dtype = _summed_dtype(node)
        if dtype is None or not isinstance(node.target, OpOverload):
            continue
        name = overload_name(node.target)
        if any(keeps_half(name, dtype, b) for b in asked) and (count := rows(node)) >= ROWS:
            found.append(LowAccumulator(node, dtype, count))
    return found


def low_chains(graph: fx.Graph) -> list[LowChain]:
    """The sums of ``USES`` terms or more."""
    chains = [_chain(node) for node in graph.nodes if _adds(node) and not _is_inner(node)]
    return [chain for chain in chains if len(chain.terms) >= USES]


def _summed_dtype(node: fx.Node) -> str | None:
    """The half precision dtype of what a node gives, if it gives any."""
    value: Any = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return next((short_name(v.dtype) for v in values if isinstance(v, Tensor) and v.dtype in HALVES), None)


def _adds(node: fx.Node) -> bool:
    """Whether a node adds two tensors in half precision, as they are."""
    plain = isinstance(node.target, OpOverload) and overload_name(node.target) == "aten.add.Tensor"
    return (
        plain and not node.kwargs and len(node.all_input_nodes) == 2 and all(map(half, (node, *node.all_input_nodes)))
    )


def _is_inner(node: fx.Node) -> bool:
    """Whether nothing reads a sum but another one."""
    return len(node.users) == 1 and _adds(next(iter(node.users)))


def _chain(last: fx.Node) -> LowChain:
    partial: list[fx.Node] = []
    terms: list[fx.Node] = []
    waiting = [last]
    while waiting:
        node = waiting.pop()
        for source in node.all_input_nodes:
            if _adds(source) and _is_inner(source):
                partial.append(source)
                waiting.append(source)
            else:
                terms.append(source)
    return LowChain(last, tuple(partial), tuple(terms))
