"""Let communication run beside the computation: begin it early, wait for it late.

Stored weights are gathered some blocks before their use, gradients are reduced while the backward pass goes on, and
a sum that the next op needs is hidden behind products of its block that nobody waits for. What is computed stays the
same bit for bit; only when messages begin and when they are waited for changes, and the order of the ops around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from meshwright.compiler.analysis.free import free_values
from meshwright.compiler.analysis.kinds import copies
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.begin import Begun, by_block, can_begin, split, verify_waits
from meshwright.compiler.passes.hide_sums import hide_sums


def overlap(local: LocalGraph, mesh: Mesh, prefetch: int) -> LocalGraph:
    """The same graph with its communication begun early and waited for late.

    ``prefetch`` is how many blocks ahead stored weights are gathered: at most ``prefetch + 1`` blocks of them are
    there at any moment. In ``update``, gradients are paid as many messages ahead. Needs ``meta["val"]``; that of the
    new nodes is left to :func:`verify_shapes`.
    """
    _inputs_first(local.module.graph)
    late = _leaving_messages(local, mesh)
    ahead = [n for n in _messages_of_inputs(local, mesh) if n not in late]
    free = free_values(local)
    hide_sums(local.module.graph, mesh, {*late, *ahead}, free)
    _wait_late(local, [split(n, free) for n in late])
    _begin_ahead(local, [split(n, free) for n in ahead], prefetch)
    verify_waits(local.module.graph)
    local.module.graph.lint()
    local.module.recompile()
    return local


def _inputs_first(graph: fx.Graph) -> None:
    """Let all inputs stand in front, so that what reads them may move there."""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for node in graph.find_nodes(op="placeholder"):
        if node > first:
            first.prepend(node)


def _messages_of_inputs(local: LocalGraph, mesh: Mesh) -> list[fx.Node]:
    """The collectives on stored weights and on gradients that come in, or on nothing but casts and views of them."""
    nodes = list(local.module.graph.nodes)
    roles = zip((n for n in nodes if n.op == "placeholder"), local.signature.inputs, strict=True)
    found = {n for n, value in roles if value.kind in ("parameter", "gradient")}
    for node in nodes:
        if copies(node) and node.all_input_nodes[0] in found:
            found.add(node)
    return [n for n in nodes if can_begin(n, mesh) and all(i in found for i in n.all_input_nodes)]


def _begin_ahead(local: LocalGraph, messages: list[Begun], prefetch: int) -> None:
    """Begin the messages of a block where those of the ``prefetch``-th block before it are waited for.

    Each ends where it was asked for. Weights that are gathered again by the very next block (the head, by the first
    one of the backward pass) are kept instead.
    """
    graph = local.module.graph
    groups = by_block(messages)
    places = [g[0].wait for g in groups]
    for i in range(1, len(groups)):
        places[i] = _keep(graph, groups[i - 1], groups[i], places[i])
    order = {n: float(i) for i, n in enumerate(graph.nodes)}
    begins = {b.begin for g in groups for b in g}
    sources = _above(begins)
    start = next(n for n in graph.nodes if n.op != "placeholder" and n not in begins and n not in sources)
    for i, group in enumerate(groups):
        place = places[i - prefetch] if i >= prefetch else start
        for message in group:
            for node in (*_after(place, message.begin, order), message.begin):
                place.prepend(node)
                order[node] = order[place] - 0.5


def _keep(graph: fx.Graph, before: list[Begun], group: list[Begun], place: fx.Node) -> fx.Node:
    """Take out of ``group`` the gathers that ``before`` has done already. Returns where the group's place is then."""
    known = {key: message.result(i) for message in before for i, key in enumerate(message.gathered())}
    for message in list(group):
        keys = message.gathered()
        if not keys or any(key not in known for key in keys):
            continue
        mine = {message.begin, message.wait, *message.wait.users}
        if place in mine:
            while place in mine or place.target in collectives.BEGINS:
                place = place.next
        for result in list(message.wait.users):
            result.replace_all_uses_with(known[keys[int(str(result.args[1]))]])
            graph.erase_node(result)
        graph.erase_node(message.wait)
        graph.erase_node(message.begin)
        group.remove(message)
    return place


def _above(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All that the nodes are computed from."""
    found: set[fx.Node] = set()
    waiting = [i for n in nodes for i in n.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _after(place: fx.Node, begin: fx.Node, order: dict[fx.Node, float]) -> Iterator[fx.Node]:
    """What ``begin`` reads that stands after ``place``, in order: casts and views of inputs."""
    for node in begin.all_input_nodes:
        if order[node] >= order[place]:
            yield from _after(place, node, order)
            yield node


def _leaving_messages(local: LocalGraph, mesh: Mesh) -> list[fx.Node]:
    """The collectives whose results do nothing but leave the graph, by way of casts, views and further ones."""
    nodes = list(local.module.graph.nodes)
    leaving: set[fx.Node] = set()
    for node in reversed(nodes):
        leaves = node.users and all(u.op == "output" or u in leaving for u in node.users)
        if leaves and (copies(node) or can_begin(node, mesh)):
            leaving.add(node)
    return [n for n in nodes if n in leaving and can_begin(n, mesh)]


def _wait_late(local: LocalGraph, messages: list[Begun]) -> None:
    """Wait for each message of a block where its counterpart in the next block begins; for the last ones at the end.

    One that needs the result of another (a sum over further ranks) begins where that is there.
    """
    (end,) = local.module.graph.find_nodes(op="output")
    followers = {m.wait: _followers(m.wait) for m in messages}
    readers = {n: m.wait for m in messages for n in (m.wait, *followers[m.wait])}
    needs = {m.wait: {readers[i] for i in m.begin.all_input_nodes if i in readers} for m in messages}
    blocked = [m for m in messages if needs[m.wait]]
    groups = by_block([m for m in messages if not needs[m.wait]])
    places = [*(m.begin for g in groups for m in g), end]
    later = [*_counterparts([len(g) for g in groups]), len(places) - 1]
    due: list[list[Begun]] = [[] for _ in places]
    for i, message in enumerate(m for g in groups for m in g):
        due[later[i]].append(message)
    there: set[fx.Node] = set()
    for i, place in enumerate(places):
        for message in due[i]:  # grows as it is gone through, at the end
            for node in (message.wait, *followers[message.wait]):
                place.prepend(node)
            there.add(message.wait)
            for other in [m for m in blocked if needs[m.wait] <= there]:
                blocked.remove(other)
                place.prepend(other.begin)
                due[later[i]].append(other)


def _counterparts(sizes: list[int]) -> list[int]:
    """By message of consecutive groups of these sizes: the one of the next group that comes as far in it (or its last
    one); past all of them for those of the last group."""
    found: list[int] = []
    first = 0
    for i, size in enumerate(sizes):
        first += size
        following = sizes[i + 1] if i + 1 < len(sizes) else 1
        found.extend(first + min(k, following - 1) for k in range(size))
    return found


def _followers(wait: fx.Node) -> list[fx.Node]:
    """What is made of the results by casts and views, in order."""
    found: list[fx.Node] = []
    waiting = list(wait.users)
    while waiting:
        node = waiting.pop(0)
        if copies(node) and node not in found:
            found.append(node)
            waiting.extend(node.users)
    return found
