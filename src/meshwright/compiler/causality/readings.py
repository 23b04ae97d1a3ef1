"""Where the dependence of a step's outputs is read, in a graph that returns nothing but a loss.

A step returns one number. Back from it, through values that have no positions, stand those that have them: the losses
of single tokens, and whatever else is averaged over tokens (the choices of a router in a balance loss). Behind these
stand the logits that a cross entropy is given, which no label has entered yet. The verdict is read at the logits, or at
the losses if there are none; the comparison with one device at both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram
from meshwright.compiler.graph.program import Value, annotation
from meshwright.compiler.graph.rank_program import RankProgram

OF_LOGITS = ("meshwright.pick", "meshwright.cross_entropy", "meshwright.logsumexp")
"""Ops of a cross entropy, whose first operand are logits."""
MOVES = (
    collectives.all_gather,
    collectives.reduce_scatter,
    collectives.all_reduce,
    collectives.all_to_all,
    collectives.shard,
    collectives.owe,
    collectives.fill_padding,
)
"""What ranks do to hold the same value otherwise."""


@dataclass(frozen=True)
class Points:
    """The nodes that are read, by name; of logits those that read them as well, by which they are known again."""

    losses: tuple[str, ...]
    readers: tuple[str, ...] = ()
    logits: tuple[str, ...] = ()

    @property
    def verdict_names(self) -> tuple[str, ...]:
        """Where outputs are read that no label has entered, if there are such."""
        return tuple(dict.fromkeys(n for n in self.logits if n)) or self.losses

    def names(self) -> frozenset[str]:
        return frozenset(n for n in (*self.losses, *self.logits) if n)

    def pairs(self, there: Points) -> Iterator[tuple[str, str]]:
        """The same values here and in another program."""
        yield from zip(self.losses, there.losses, strict=True)
        yield from dict.fromkeys(zip(self.logits, there.logits, strict=True))

    def within(self, compiled: Compiled) -> Points:
        """The same values in another program of the same step; '' for what is not there."""
        nodes = {node.name: node for node in forward_nodes(compiled)}
        logits = tuple(_logits(nodes[r]).name if r in nodes else "" for r in self.readers)
        return Points(tuple(n if n in nodes else "" for n in self.losses), self.readers, logits)


def forward_nodes(compiled: Compiled) -> Iterator[fx.Node]:
    """All calls of the forward pass, stage by stage; those that several stages make come more than once."""
    if isinstance(compiled, PipelineProgram):
        graphs = [graph for stage in compiled.stages for kind, graph in stage.passes.items() if kind[0] == "F"]
    else:
        graphs = [compiled.micro]
    for graph in graphs:
        for node in graph.module.graph.nodes:
            if node.op == "call_function" and annotation(node).phase == "forward":
                yield node


def points_of(alone: RankProgram, rows: int, length: int) -> Points:
    """The points of a step that is compiled for one rank, whose shapes are whole."""
    (output,) = alone.micro.module.graph.find_nodes(op="output")
    returned = dict(zip(alone.micro.signature.outputs, output.args[0], strict=True))
    losses: dict[fx.Node, None] = {}
    waiting, known = [returned[Value("loss", "loss")]], set()
    while waiting:
        node = waiting.pop()
        if node in known or node.op != "call_function":
            continue
        known.add(node)
        if has_positions(annotation(node).shape, rows, length):
            losses[node] = None
        else:
            waiting.extend(node.all_input_nodes)
    readers: dict[fx.Node, None] = {}
    waiting, known = list(losses), set()
    while waiting:
        node = waiting.pop()
        if node in known or node.op != "call_function":
            continue
        known.add(node)
        if str(node.target).startswith(OF_LOGITS) and has_positions(annotation(_logits(node)).shape, rows, length):
            readers[node] = None
        else:
            waiting.extend(node.all_input_nodes)
    return Points(
        tuple(n.name for n in losses), tuple(n.name for n in readers), tuple(_logits(n).name for n in readers)
    )


def has_positions(shape: tuple[int, ...], rows: int, length: int) -> bool:
    """Whether a whole shape begins with rows and positions, apart or as one dim; one or two positions may be missing,
    where tokens are compared with those that follow them."""
    lengths = range(max(length - 2, 1), length + 1)
    apart = len(shape) > 1 and shape[0] == rows and shape[1] in lengths
    return apart or (len(shape) > 0 and shape[0] in [rows * n for n in lengths])


def _logits(reader: fx.Node) -> fx.Node:
    """The first operand, before what ranks do to it."""
    node = reader.all_input_nodes[0]
    while node.target in MOVES and annotation(node).sharding is None:
        node = node.all_input_nodes[0]
    return node


Whole = Callable[[fx.Node], list[Tensor]]
"""Of a node the sets of its whole value, of each copy of it."""


@dataclass(frozen=True)
class First:
    """The first node that differs, and what leads to it that ranks have alone: the fault is in one of these."""

    node: fx.Node
    alone: tuple[fx.Node, ...] = ()


Apart = Callable[[Tensor, Tensor], Tensor]
"""Of the sets of a value on ranks and on one device: what of them must not differ and does."""


def first_node(
    alone: Sequence[fx.Node], nodes: Sequence[fx.Node], here: Whole, there: Whole, points: Points, apart: Apart
) -> First | None:
    """The first node of the ranks' program that is ``apart`` from one device, of those that outputs
    depend on; a node that ranks have alone, to move a value, is compared with what it moves."""
    single = {node.name: node for node in alone}
    same = _same(single, {node.name: node for node in nodes})
    needed = set(points.names())
    for node in reversed(nodes):
        if node.name in needed:
            needed.update(n.name for n in node.all_input_nodes)
    for node in nodes:
        if node.name not in needed or not (node.name in same or node.target in MOVES):
            continue
        expected = here(single[node.name]) if node.name in same else there(node.all_input_nodes[0])
        for copy in there(node):
            for whole in expected[:1]:
                if copy.shape == whole.shape and bool(apart(copy, whole).any()):
                    return First(node, tuple(_leading_to(node, nodes, same, there)))
    return None


def _leading_to(node: fx.Node, nodes: Sequence[fx.Node], same: set[str], there: Whole) -> Iterator[fx.Node]:
    """What a node is made by, back to what one device has too, as far as it holds something of tokens."""
    found: set[fx.Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        other = waiting.pop()
        if other not in found and other.op == "call_function" and other.name not in same:
            found.add(other)
            waiting.extend(other.all_input_nodes)
    for other in dict.fromkeys(nodes):
        wholes = there(other) if other in found else []
        if other in found and (not wholes or any(bool(w.any()) for w in wholes)):
            yield other


def _same(one: Mapping[str, fx.Node], other: Mapping[str, fx.Node]) -> set[str]:
    """The names of what is the same node in both: of ops that one program has more of, names do not tell."""
    counts = [Counter(str(node.target) for node in nodes.values()) for nodes in (one, other)]
    found = {name for name, node in one.items() if name in other and other[name].target is node.target}
    return {name for name in found if counts[0][str(one[name].target)] == counts[1][str(one[name].target)]}
