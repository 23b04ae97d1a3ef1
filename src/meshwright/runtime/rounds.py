"""``micro`` cut where microbatches meet, into rounds: each is run for all microbatches before the next one begins.

What a microbatch has made and later rounds read is kept for it; what lies at a meeting is reduced or joined over all of
them, and each goes on with its part of that.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.adapter import write_code
from meshwright.compiler.graph.meeting import axes_of, meets
from meshwright.compiler.mesh import MICRO
from meshwright.runtime.inplace import InputsFromList
from meshwright.runtime.layout import reduce_in_order

Kept = dict[str, Any]
"""What there is of a microbatch, by the names of nodes."""


@dataclass(frozen=True)
class Round:
    """What is run of every microbatch, and the meetings after it."""

    module: fx.GraphModule
    """Takes one list of what the round reads, which it empties; returns what it ``gives`` (the last round: the outputs
    of the graph)."""
    reads: tuple[str, ...]
    ends: frozenset[str]
    """Of what it reads, what nothing reads after it."""
    gives: tuple[str, ...]
    """What later rounds and meetings read of what it makes."""
    meetings: tuple[fx.Node, ...]
    over: tuple[str, ...]
    """What nothing reads after the meetings."""

    def run(self, kept: Kept) -> list[Any]:
        """Run the round for the microbatch of which there is ``kept``; what is made of it is kept too, or returned by
        the last round."""
        inputs = [kept.pop(name) if name in self.ends else kept[name] for name in self.reads]
        made = list(self.module(inputs))
        if not self.meetings:
            return made
        kept.update(zip(self.gives, made, strict=True))
        return []

    def meet(self, kept: Sequence[Kept], communicator: Microbatches) -> None:
        """Reduce or join what all microbatches hold, and give each its part."""
        for node in self.meetings:
            (operand,) = node.all_input_nodes
            parts = [each[operand.name] for each in kept]
            for each, result in zip(kept, met(node, parts, communicator), strict=True):
                each[node.name] = result
        for each in kept:
            for name in self.over:
                del each[name]


class Microbatches(collectives.Communicator, Protocol):
    """A communicator that is told which microbatch runs."""

    microbatch: int


_known: weakref.WeakKeyDictionary[fx.GraphModule, tuple[Round, ...]] = weakref.WeakKeyDictionary()


def rounds_of(module: fx.GraphModule) -> tuple[Round, ...]:
    """The rounds of a module that is run for each microbatch; none where microbatches do not meet."""
    if module not in _known:
        _known[module] = tuple(_cut(module)) if any(meets(node) for node in module.graph.nodes) else ()
    return _known[module]


def _cut(module: fx.GraphModule) -> Iterator[Round]:
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    (output,) = module.graph.find_nodes(op="output")
    number: dict[fx.Node, int] = {}
    meetings: list[list[fx.Node]] = [[]]
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node.target is operator.getitem and node.all_input_nodes[0] in number:
            number[node] = number[node.all_input_nodes[0]]  # a part of what was made there
            continue
        if meetings[-1] and (not meets(node) or node.all_input_nodes[0] in meetings[-1]):
            meetings.append([])
        number[node] = len(meetings) - 1
        if meets(node):
            meetings[-1].append(node)
    if meetings[-1]:
        meetings.append([])
    last = len(meetings) - 1

    def read_by(node: fx.Node) -> int:
        """The last that reads a value: round k is 2 k, its meetings are 2 k + 1."""
        times = [2 * last if user is output else 2 * number[user] + meets(user) for user in node.users]
        return max(times, default=-1)

    reading = {node: read_by(node) for node in nodes}
    for at, stops in enumerate(meetings):
        mine = [n for n in nodes if number.get(n) == at and n not in stops]
        made = set(mine)
        readers = [*mine, output] if at == last else mine
        reads = [n for n in dict.fromkeys(s for r in readers for s in r.all_input_nodes) if n not in made]
        gives = [n for n in mine if reading[n] > 2 * at]
        yield Round(
            _module(module, reads, mine, output if at == last else gives),
            tuple(n.name for n in reads),
            frozenset(n.name for n in reads if reading[n] == 2 * at),
            tuple(n.name for n in gives),
            tuple(stops),
            tuple(n.name for n in nodes if reading[n] == 2 * at + 1),
        )


def _module(
    root: fx.GraphModule, reads: Sequence[fx.Node], members: Sequence[fx.Node], gives: fx.Node | Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph(owning_module=root)
    copies = {node: graph.placeholder(node.name) for node in reads}
    for node in members:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if isinstance(gives, fx.Node):
        graph.output(tuple(copies[n] if isinstance(n, fx.Node) else n for n in _outputs(gives)))
    else:
        graph.output(tuple(copies[n] for n in gives))
    graph.set_codegen(InputsFromList())
    made = fx.GraphModule(root, graph)
    write_code(made)
    return made


def _outputs(output: fx.Node) -> tuple[Any, ...]:
    returned: Any = output.args[0]
    return tuple(returned)


@dataclass(frozen=True)
class Opening:
    """A module that begins with meetings, without them: their results are further inputs, behind those that it had."""

    module: fx.GraphModule
    meetings: tuple[fx.Node, ...]
    operands: tuple[int, ...]
    """By meeting, which input is added up or joined."""


def opening_of(module: fx.GraphModule) -> Opening | None:
    """None for a module that begins with no meeting."""
    meetings = tuple(node for node in module.graph.nodes if meets(node))
    if not meetings:
        return None
    inputs = list(module.graph.find_nodes(op="placeholder"))
    graph = fx.Graph(owning_module=module)
    copies = {node: graph.placeholder(node.name) for node in (*inputs, *meetings)}
    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
        elif node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    made = fx.GraphModule(module, graph)
    write_code(made)
    return Opening(made, meetings, tuple(inputs.index(node.all_input_nodes[0]) for node in meetings))


def met(node: fx.Node, parts: Sequence[Tensor], communicator: Microbatches) -> list[Tensor]:
    """What a meeting makes of the microbatches' values for each of them, in the order of the microbatches."""
    arguments: tuple[Any, ...] = node.args[1:]
    if node.target is collectives.all_reduce:
        _, reduction = arguments
        total = _reduced(parts, reduction)
        ranks = tuple(axis for axis in axes_of(node) if axis != MICRO)
        # over ranks it is paid once, not for each microbatch
        total = collectives.all_reduce(total, ranks, reduction) if ranks else total
        return [total] * len(parts)
    if node.target is collectives.all_gather:
        dim, _, size = arguments
        return [torch.cat(list(parts), dim).narrow(dim, 0, size)] * len(parts)
    if node.target is collectives.reduce_scatter:
        dim, _ = arguments
        return _pieces(_reduced(parts, "sum"), dim, len(parts), communicator)
    if node.target is collectives.all_to_all:
        split, join, _, size = arguments
        return _pieces(torch.cat(list(parts), join).narrow(join, 0, size), split, len(parts), communicator)
    raise InternalError(f"microbatches cannot meet at {node.format_node()}")


def _pieces(whole: Tensor, dim: int, count: int, communicator: Microbatches) -> list[Tensor]:
    found = []
    for number in range(count):
        communicator.microbatch = number
        found.append(collectives.shard(whole, dim, (MICRO,)))
    return found


def _reduced(parts: Sequence[Tensor], reduction: str) -> Tensor:
    """The reduction, of sums in no narrower a dtype than float32 on the way."""
    dtype = parts[0].dtype
    if reduction != "sum" or not dtype.is_floating_point or dtype.itemsize >= 4:
        return reduce_in_order(list(parts), reduction)
    return reduce_in_order([part.float() for part in parts], reduction).to(dtype)
