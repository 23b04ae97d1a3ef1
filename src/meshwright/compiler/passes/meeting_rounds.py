"""Cut the passes of stages where microbatches meet: what comes after a meeting is a pass of its own, a further *round*.

A round is as early as it can be, so that what waits for no meeting goes on to the next stage at once: the activations
of a layer with a balance loss, say, while its gates are added up over the microbatches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from torch import fx

from meshwright.compiler.graph.adapter import graph_module
from meshwright.compiler.graph.meeting import joins, meets
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.passes.stages import Assigned, block_order
from meshwright.compiler.schedules.rounds import FAMILIES, round_of
from meshwright.compiler.summary import Meeting


def meet_once(local: LocalGraph) -> LocalGraph:
    """The graph without sums over microbatches that were met forward and would be met again in the backward pass, where
    what they are made of is computed again. The given graph is left as it is."""
    numbers: dict[Hashable, int] = {}
    number: dict[fx.Node, int] = {}
    first: dict[int, fx.Node] = {}
    again: dict[fx.Node, fx.Node] = {}
    for node in local.module.graph.nodes:
        key: Hashable = node
        if node.op == "call_function":
            key = (node.target, repr(fx.node.map_arg((node.args, node.kwargs), lambda n: f"value {number[n]}")))
        number[node] = numbers.setdefault(key, len(numbers))
        if meets(node) and not joins(node):
            before = first.setdefault(number[node], node)
            if before is not node and annotation(node).phase != "forward":
                again[node] = before
    if not again:
        return local
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in local.module.graph.nodes:
        copies[node] = copies[again[node]] if node in again else graph.node_copy(node, copies.__getitem__)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return LocalGraph(graph_module(local.module, graph), local.signature, local.inputs, local.outputs)


def cut_at_meetings(graph: fx.Graph, assigned: Assigned) -> tuple[str, ...]:
    """Give nodes after a meeting to later rounds of their pass (``F1``, ``F2``, ...); meetings are what a round begins
    with. Returns all passes in order, of all stages."""
    depth = depths(graph, assigned)
    if not any(depth.values()):
        return tuple(FAMILIES)
    found: dict[tuple[int, str], set[int]] = {}
    for node, deep in depth.items():
        found.setdefault(assigned.of[node], set()).add(deep)
    # a stage may have none of the rounds of those before it
    number = {place: {deep: i for i, deep in enumerate(sorted(deeps))} for place, deeps in found.items()}
    for node, deep in depth.items():
        stage, family = assigned.of[node]
        assigned.of[node] = stage, f"{family}{number[stage, family][deep] or ''}"
    kinds = {*FAMILIES, *(kind for _, kind in assigned.of.values())}
    return tuple(sorted(kinds, key=round_of))


def meetings_of(graph: fx.Graph, assigned: Assigned, groups: Iterable[tuple[str, str]]) -> dict[str, Meeting]:
    """How often microbatches meet on the way through each block; nothing where they do not meet. ``assigned`` has every
    block as a stage of its own, by its number, and all of the backward pass as ``I``; of ``groups`` of blocks that
    repeat, the last copy goes as the one before."""
    depth = depths(graph, assigned)
    blocks = block_order(graph)
    begins: dict[tuple[int, str], int] = {}
    aside: set[int] = set()
    for node, deep in depth.items():
        place = assigned.of[node]
        begins[place] = min(begins.get(place, deep), deep)
        if meets(node) and place[1] == "F":
            aside.add(place[0])
    if not any(depth.values()):
        return {}
    found: dict[str, Meeting] = {}
    for number, block in enumerate(blocks):
        forward, backward = (
            max(0, begins.get((number + step, family), 0) - begins.get((number, family), 0))
            for family, step in (("F", 1), ("I", -1))
        )
        found[block] = Meeting(forward, backward, number in aside)
    for first, other in groups:
        if other == blocks[-1] != first:
            found[other] = replace(found[other], forward=found[first].forward)
        if first == blocks[0] != other:
            found[first] = replace(found[first], backward=found[other].backward)
    return found


def depths(graph: fx.Graph, assigned: Assigned) -> dict[fx.Node, int]:
    """How many meetings come before each node in its pass, whichever stages they are in."""
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node in assigned.of:
            family = assigned.of[node][1]
            before = (depth[n] for n in node.all_input_nodes if n in depth and assigned.of[n][1] == family)
            depth[node] = max(before, default=0) + meets(node)
    if any(depth.values()):
        _postpone(depth, assigned)
    return depth


def _postpone(depth: dict[fx.Node, int], assigned: Assigned) -> None:
    """Let backward nodes that nothing reads before a meeting stand behind it: what is made of forward values alone need
    not be there for all microbatches at once."""
    for node in reversed(depth):
        own = assigned.of[node]
        users = [user for user in node.users if assigned.of.get(user) == own]
        if own[1] != "F" and users and len(users) == len(node.users):
            depth[node] = max(depth[node], min(depth[user] - meets(user) for user in users))
