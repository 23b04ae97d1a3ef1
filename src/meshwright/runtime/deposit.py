"""A graph that runs for each microbatch, as it is run: gradients of several are added up where they are made.

It then returns none of them: each is handed to its accumulator as soon as it is there, and freed. Beside accumulators,
only the gradients of one block live at a time, not those of the whole model. The gradient of a linear layer's weight is
handed over as the product that it is, which a kernel adds to what is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, fx

from meshwright.compiler.analysis.lifetimes import deposited
from meshwright.compiler.graph.adapter import write_code
from meshwright.compiler.graph.ops import contraction
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.runtime.accumulate import Product

Put = Callable[[int, Tensor | Product], None]
"""Takes an output of ``micro``: its position, and the tensor or the product."""

_put: ContextVar[Put] = ContextVar("put")
_known: weakref.WeakKeyDictionary[fx.GraphModule, dict[bool, fx.GraphModule]] = weakref.WeakKeyDictionary()


def deposit(value: Tensor, position: int) -> None:
    """Hand an output over to whoever is :func:`taking` them."""
    _put.get()(position, value)


def deposit_product(equation: str, x: Tensor, y: Tensor, position: int) -> None:
    """The same of a product that is not made yet."""
    _put.get()(position, Product(*contraction.factors(equation, x, y)))


@contextmanager
def taking(put: Put) -> Iterator[None]:
    """Within the context, ``put`` is given what ``micro`` deposits."""
    token = _put.set(put)
    try:
        yield
    finally:
        _put.reset(token)


def runnable(graph: LocalGraph, *, deposits: bool) -> fx.GraphModule:
    """The module of a graph that runs for each microbatch, as it is run: its products call their kernels. With
    ``deposits`` it hands its gradients over and returns None for them. Of a shared graph there is one."""
    known = _known.setdefault(graph.module, {})
    if deposits not in known:
        copy = fx.GraphModule(graph.module, fx.Graph())
        named: dict[fx.Node, fx.Node] = {}
        copy.graph.output(copy.graph.graph_copy(graph.module.graph, named))
        if deposits:
            _deposit(copy.graph, {position: named[node] for position, node in deposited(graph).items()})
        for node in copy.graph.find_nodes(op="call_function", target=torch.ops.meshwright.einsum.default):
            node.target = contraction.written(node.args[0])
        copy.recompile()
        write_code(copy)
        known[deposits] = copy
    return known[deposits]


def _deposit(graph: fx.Graph, gradients: Mapping[int, fx.Node]) -> None:
    (output,) = graph.find_nodes(op="output")
    returned = list(output.args[0])
    products = {position for position, made in gradients.items() if _is_product(made)}
    for position in gradients:
        returned[position] = None
    output.args = (tuple(returned),)
    for position, made in gradients.items():
        with graph.inserting_after(made):
            if position in products and not made.users:
                graph.call_function(deposit_product, (*made.args, position))
            else:
                graph.call_function(deposit, (made, position))
    for made in {gradients[position] for position in products}:
        if not made.users:
            graph.erase_node(made)


def _is_product(gradient: fx.Node) -> bool:
    """Whether it is a product of two matrices that nobody else reads."""
    product = gradient.target is torch.ops.meshwright.einsum.default
    return product and contraction.is_outer(str(gradient.args[0])) and {u.op for u in gradient.users} == {"output"}
