"""Compute values of the forward pass again in the backward pass, instead of keeping them.

FX in, FX out, on the micro graph of the whole step, before shardings are known: the copies are ordinary ops of the
backward pass, so that weights are gathered for them as for the gradients beside them, and every later pass treats
them like any other. A copy stands just before its first reader in backward. It gives the same values: dropout draws
its mask from the step's key and the element's position, and choices that depend on values are kept. Inputs of a block
and values that others read are kept; updates of buffers are outputs of the step and happen once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from meshwright.compiler.analysis.storage import tensor_bytes
from meshwright.compiler.graph.adapter import graph_module
from meshwright.compiler.graph.program import Graph, annotation
from meshwright.compiler.passes.kept import is_view, kept_by_policy, of_the_batch
from meshwright.compiler.passes.treated import treated, without_effect
from meshwright.compiler.plan import Recompute, Save

SMALL = 4
"""Of an op with several results of which some are kept anyway, the others are kept too if they are so much smaller
(the mean and deviation of a norm)."""


def recompute(graph: Graph, entries: Sequence[Recompute]) -> Graph:
    """The micro graph with the values of the entries' blocks computed again where backward reads them.

    The given graph is left as it is. Raises E0335 for a pattern that fits no block.
    """
    blocks = treated(graph, entries) if entries else {}
    if without_effect(entries) or not blocks:
        return graph
    return _Recomputation(graph, blocks).run()


class _Recomputation:
    def __init__(self, graph: Graph, blocks: dict[fx.Node, tuple[str, Save]]) -> None:
        self._graph = graph
        self._dropped = _dropped(graph.module.graph, blocks)
        """Values that do not live until backward, with their place in forward."""
        self._new = fx.Graph()
        self._first: dict[fx.Node, fx.Node] = {}
        self._again: dict[fx.Node, fx.Node] = {}

    def run(self) -> Graph:
        for node in self._graph.module.graph.nodes:
            backward = node.op == "call_function" and annotation(node).phase == "backward"
            if backward:
                self._compute_again([n for n in node.all_input_nodes if n in self._dropped])
            self._first[node] = self._copied(node, again=backward)
        self._drop_unread()
        self._new.lint()
        return Graph(graph_module(self._graph.module, self._new), self._graph.signature)

    def _copied(self, node: fx.Node, again: bool) -> fx.Node:
        copy = self._new.node_copy(node, self._latest if again else self._first.__getitem__)
        copy.meta = dict(node.meta)
        return copy

    def _latest(self, node: fx.Node) -> fx.Node:
        return self._again.get(node) or self._first[node]

    def _compute_again(self, wanted: list[fx.Node]) -> None:
        """Copies of the values and of what they are computed from, as far as it is not there, in forward's order."""
        missing: set[fx.Node] = set()
        while wanted:
            node = wanted.pop()
            if node not in missing and node not in self._again:
                missing.add(node)
                wanted += [n for n in node.all_input_nodes if n in self._dropped]
        for node in sorted(missing, key=self._dropped.__getitem__):
            copy = self._new.node_copy(node, self._latest)
            copy.meta = dict(node.meta)
            copy.meta["meshwright"] = replace(annotation(node), phase="backward", recomputed=True)
            self._again[node] = copy

    def _drop_unread(self) -> None:
        """What forward does not need by itself is computed in backward alone."""
        for node in reversed(self._dropped):
            first = self._first[node]
            if not first.users:
                self._new.erase_node(first)
                if node in self._again:
                    annotation(self._again[node]).recomputed = False
        for node, copy in self._again.items():
            if node.target is operator.getitem:
                # taking a part is of one piece with the op that makes it
                annotation(copy).recomputed = annotation(copy.all_input_nodes[0]).recomputed


def _dropped(graph: fx.Graph, blocks: dict[fx.Node, tuple[str, Save]]) -> dict[fx.Node, int]:
    """The ops of forward whose values backward gets from a copy, with their positions."""
    dropped: dict[fx.Node, int] = {}
    by_policy: set[fx.Node] = set()
    statistics: set[fx.Node] = set()
    for position, node in enumerate(graph.nodes):
        if node not in blocks:
            continue
        block, save = blocks[node]
        if of_the_batch(node) or _of_statistics(node, statistics):
            statistics.add(node)
            continue
        if kept_by_policy(node, save) or (node.target is operator.getitem and node.args[0] in by_policy):
            by_policy.add(node)
        elif is_view(node) and node.all_input_nodes[0] not in dropped:
            continue
        elif not any(_outside(user, block, blocks) for user in node.users):
            dropped[node] = position
    for node in [n for n in dropped if isinstance(n.meta.get("val"), (tuple, list))]:
        parts = [part for part in node.users if part in dropped]
        kept = sum(sum(tensor_bytes(part)) for part in node.users if part not in dropped)
        if kept and kept >= SMALL * sum(sum(tensor_bytes(part)) for part in parts):
            for part in (node, *parts):
                del dropped[part]
    return dropped


def _of_statistics(node: fx.Node, statistics: set[fx.Node]) -> bool:
    """Whether a value is made of statistics of the batch, and is as small."""
    found = [n for n in node.all_input_nodes if n.op == "call_function"]
    if not found or any(n not in statistics for n in found):
        return False
    return sum(tensor_bytes(node)) <= max(sum(tensor_bytes(n)) for n in found)


def _outside(user: fx.Node, block: str, blocks: dict[fx.Node, tuple[str, Save]]) -> bool:
    """Whether a reader of a value is outside of the block's own passes, so that the value is there anyway."""
    if user.op == "output":
        return True
    return annotation(user).phase != "backward" and blocks.get(user, ("", ""))[0] != block
