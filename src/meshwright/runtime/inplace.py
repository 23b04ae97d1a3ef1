"""Turn ``update`` into a program that writes each parameter and state tensor as soon as it is known.

The captured ``update`` is functional: it returns all new values at once, so old and new ones of
the whole model would live together. Here the nodes are put into an order in which one parameter is
finished after the other, and ops write over operands that nothing reads any more. New values that
are not in place by then are copied into the old ones once nothing reads those. The inputs are taken
from a list that is emptied, so that a gradient lives no longer than its last use. The order is the
same on every rank, since every rank has the same program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.graph import CodeGen

from meshwright.compiler.graph.program import Value
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.runtime.reuse import Memory, in_place_target

MUTABLE = ("parameter", "state")


@dataclass(frozen=True)
class InPlaceUpdate:
    """``module`` takes one list of the inputs, empties it, and returns the ``outputs``."""

    module: fx.GraphModule
    outputs: tuple[Value, ...]
    """What it returns: the outputs that are not written into an input (norm, results)."""


class _InputsFromList(CodeGen):
    """Generates ``forward(self, inputs)`` that unpacks and empties the list."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        unpack = f"[{', '.join(names)}] = inputs; inputs.clear()" if names else "pass"
        return f"def {self._func_name}(self, inputs){maybe_return_annotation}:\n    {unpack}"


def update_in_place(graph: LocalGraph) -> InPlaceUpdate:
    """The update graph as described above; the given one is left as it is."""
    placeholders = [n for n in graph.module.graph.nodes if n.op == "placeholder"]
    old = dict(zip(graph.signature.inputs, placeholders, strict=True))
    (output,) = (n for n in graph.module.graph.nodes if n.op == "output")
    new = dict(zip(graph.signature.outputs, output.args[0], strict=True))
    written = {v: n for v, n in new.items() if v.kind in MUTABLE and n is not old[v]}
    returned = {v: n for v, n in new.items() if v.kind not in MUTABLE}
    order = _depth_first(placeholders, [*returned.values(), *_one_parameter_after_the_other(written)])
    targets = {old[v] for v in written}
    writable = targets | {n for v, n in old.items() if v.kind == "gradient"}
    memory = Memory(order, writable, {*written.values(), *returned.values()})
    done = {n for v, n in written.items() if memory.written.get(n) is old[v]}

    # a value that lives in the memory of something else that is written is copied out while it still holds
    keep = {n for n in (*written.values(), *returned.values()) if n not in done and memory.owners[n] & targets}
    due: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
    position = {n: i for i, n in enumerate(order)}
    last = dict.fromkeys(targets, 0)
    for node in order:
        read = max((position[u] for u in node.users if u in position), default=0)
        for target in memory.owners[node] & targets:
            last[target] = max(last[target], position[node], read)
    for value, node in written.items():
        if node not in done:
            after = order[max(position[node], last[old[value]])]
            due.setdefault(after, []).append((old[value], node))

    made = fx.Graph(owning_module=graph.module)
    copies: dict[fx.Node, fx.Node] = {}
    kept: dict[fx.Node, fx.Node] = {}
    for node in order:
        copies[node] = made.node_copy(node, copies.__getitem__)
        if node in memory.reused:
            copies[node].target = in_place_target(node) or node.target
        if node in keep:
            kept[node] = made.call_function(torch.ops.aten.clone.default, (copies[node],))
        for target, source in due.get(node, ()):
            made.call_function(torch.ops.aten.copy_.default, (copies[target], kept.get(source, copies[source])))
    made.output(tuple(kept.get(n, copies[n]) for n in returned.values()))
    made.set_codegen(_InputsFromList())
    return InPlaceUpdate(fx.GraphModule(graph.module, made), tuple(returned))


def _one_parameter_after_the_other(written: dict[Value, fx.Node]) -> list[fx.Node]:
    """The new values grouped by parameter, state first."""
    groups: dict[str, list[fx.Node]] = {}
    for kind in reversed(MUTABLE):
        for value, node in written.items():
            if value.kind == kind:
                groups.setdefault(value.name.partition("/")[0], []).append(node)
    return [node for group in groups.values() for node in group]


def _depth_first(first: Iterable[fx.Node], goals: Iterable[fx.Node]) -> list[fx.Node]:
    """All of ``first``, then what each goal needs, in turn, in the order of the graph's dependencies."""
    done: dict[fx.Node, None] = dict.fromkeys(first)
    for goal in goals:
        stack = [goal]
        while stack:
            node = stack[-1]
            missing = [n for n in node.all_input_nodes if n not in done]
            if node in done or not missing:
                done.setdefault(stack.pop())
            else:
                stack.extend(reversed(missing))
    return list(done)
