"""Changing a compiled program in one place, as a fault of a compiler would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.rank_program import LocalGraph

PAYING = {
    collectives.all_reduce: 1,
    collectives.all_reduce_many: 1,
    collectives.all_reduce_begin: 1,
    collectives.reduce_scatter: 2,
    collectives.reduce_scatter_many: 2,
    collectives.reduce_scatter_begin: 2,
}
"""Collectives that pay a sum, and where they are told the axes."""


def calls(graph: LocalGraph, target: Any, where: Callable[[fx.Node], bool] = lambda n: True) -> list[fx.Node]:
    """The nodes that call a function, or an op by the beginning of its name, in order; at least one."""

    def fits(node: fx.Node) -> bool:
        called = str(node.target).startswith(target) if isinstance(target, str) else node.target is target
        return node.op == "call_function" and called and where(node)

    found = [n for n in graph.module.graph.nodes if fits(n)]
    assert found, f"no call of {target}"
    return found


def pays(graph: LocalGraph, axis: str, phase: str = "") -> list[fx.Node]:
    """The nodes that pay a sum over an axis alone, as one message of one tensor."""

    def fits(node: fx.Node) -> bool:
        note = node.meta["meshwright"]
        at = PAYING.get(node.target)
        return at is not None and tuple(node.args[at]) == (axis,) and phase in ("", note.phase)

    found = [n for n in graph.module.graph.nodes if fits(n)]
    assert found, f"nothing pays over {axis}"
    return found


def done(graph: LocalGraph) -> None:
    """The graph is as it shall be."""
    graph.module.graph.lint()
    graph.module.recompile()


def set_argument(graph: LocalGraph, node: fx.Node, at: int, value: Any) -> None:
    node.args = (*node.args[:at], value, *node.args[at + 1 :])
    done(graph)


def skip(graph: LocalGraph, node: fx.Node, instead: fx.Node | None = None) -> None:
    """Whoever reads a node reads its first operand, or another node, instead."""
    node.replace_all_uses_with(instead or node.all_input_nodes[0])
    graph.module.graph.erase_node(node)
    done(graph)


def behind(graph: LocalGraph, node: fx.Node, target: Any, *more: Any) -> fx.Node:
    """Put a call on a node behind it, that everybody reads instead."""
    with graph.module.graph.inserting_after(node):
        made = graph.module.graph.call_function(target, (node, *more))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    done(graph)
    return made


def output(graph: LocalGraph, kind: str, at: int = 0) -> tuple[Any, fx.Node]:
    """An output of a kind: what it is, and the node."""
    (node,) = graph.module.graph.find_nodes(op="output")
    pairs = [(v, n) for v, n in zip(graph.signature.outputs, node.args[0], strict=True) if v.kind == kind]
    return pairs[at]


def set_output(graph: LocalGraph, value: Any, made: fx.Node) -> None:
    (node,) = graph.module.graph.find_nodes(op="output")
    pairs = zip(graph.signature.outputs, node.args[0], strict=True)
    node.args = (tuple(made if v == value else n for v, n in pairs),)
    done(graph)


def inputs(graph: LocalGraph, kind: str) -> dict[str, fx.Node]:
    """The placeholders of a kind, by name."""
    nodes = graph.module.graph.find_nodes(op="placeholder")
    return {v.name: n for v, n in zip(graph.signature.inputs, nodes, strict=True) if v.kind == kind}


def swap_readers(graph: LocalGraph, first: fx.Node, second: fx.Node) -> None:
    """Whoever reads one reads the other."""
    readers = [list(n.users) for n in (first, second)]
    for users, old, new in ((readers[0], first, second), (readers[1], second, first)):
        for user in users:
            if user not in readers[0] or user not in readers[1]:
                user.replace_input_with(old, new)
    done(graph)


def scaled(graph: LocalGraph, node: fx.Node, factor: float) -> fx.Node:
    """A multiple of a node's value in its place."""
    return behind(graph, node, torch.ops.aten.mul.Tensor, factor)


def micro(compiled: Compiled) -> LocalGraph:
    return compiled.micro_graphs[0]


def update(compiled: Compiled) -> LocalGraph:
    return compiled.update_graphs[0]
