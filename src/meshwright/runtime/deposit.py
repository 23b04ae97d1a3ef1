"""Gradients of several microbatches are added up where they are made.

``micro`` then returns none: each is handed to its accumulator as soon as it is there, and freed. Beside accumulators,
only the gradients of one block live at a time, not those of the whole model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, fx

from meshwright.compiler.analysis.lifetimes import deposited
from meshwright.compiler.graph.adapter import write_code
from meshwright.compiler.graph.rank_program import LocalGraph

Put = Callable[[int, Tensor], None]
"""Takes an output of ``micro``: its position, and the tensor."""

_put: ContextVar[Put] = ContextVar("put")
_known: weakref.WeakKeyDictionary[fx.GraphModule, fx.GraphModule] = weakref.WeakKeyDictionary()


def deposit(value: Tensor, position: int) -> None:
    """Hand an output over to whoever is :func:`taking` them."""
    _put.get()(position, value)


@contextmanager
def taking(put: Put) -> Iterator[None]:
    """Within the context, ``put`` is given what ``micro`` deposits."""
    token = _put.set(put)
    try:
        yield
    finally:
        _put.reset(token)


def depositing(micro: LocalGraph) -> fx.GraphModule:
    """The module of ``micro`` that deposits its gradients and returns None for them; of a shared graph there is one."""
    if micro.module not in _known:
        copy = fx.GraphModule(micro.module, fx.Graph())
        named: dict[fx.Node, fx.Node] = {}
        copy.graph.output(copy.graph.graph_copy(micro.module.graph, named))
        (output,) = copy.graph.find_nodes(op="output")
        returned = list(output.args[0])
        for position, node in deposited(micro).items():
            made = named[node]
            with copy.graph.inserting_after(made):
                copy.graph.call_function(deposit, (made, position))
            returned[position] = None
        output.args = (tuple(returned),)
        copy.recompile()
        write_code(copy)
        _known[micro.module] = copy
    return _known[micro.module]
