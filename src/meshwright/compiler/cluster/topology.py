"""The networkx graph of a cluster, and what the links of an explicit one give to the groups of some mesh axes.

The rate of a group is bounded by every cut of the graph that separates its members: the capacity of the cut, shared
by all groups that it separates. Rings over several paths come close to the smallest of these bounds (that is how NCCL
searches its rings), so it is taken as the rate. Nodes that have devices relay for others only where no way leads
around them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import networkx as nx

from meshwright.compiler.cluster.cluster import Cluster, Network, Tier
from meshwright.compiler.cluster.crossing import Crossing
from meshwright.compiler.mesh import Mesh


def graph_of(cluster: Cluster) -> nx.Graph:
    """Devices, nodes and switches as vertices (attribute ``kind``), links as edges (``bandwidth``, ``latency``).

    Of tiers every unit becomes a switch; an edge out of it carries what its devices can send together.
    """
    graph = nx.Graph(name=cluster.name)
    if cluster.network is not None:
        graph = network_graph(cluster.network).copy()
        graph.graph["name"] = cluster.name
        return graph
    below = [("device", rank) for rank in range(cluster.ranks)]
    graph.add_nodes_from(below, kind="device")
    inside = 1
    for tier in cluster.tiers:
        above = []
        for unit in range(len(below) // tier.size):
            switch = (tier.name, unit)
            graph.add_node(switch, kind="switch")
            for member in below[unit * tier.size : (unit + 1) * tier.size]:
                graph.add_edge(member, switch, bandwidth=tier.rate * inside, latency=tier.latency / 2)
            above.append(switch)
        inside *= tier.size
        below = above
    for slow in cluster.degraded:
        _degrade(graph, cluster, slow.tier, slow.members, slow.factor)
    return graph


def unreachable(network: Network) -> list[str]:
    """The nodes with devices that the first one cannot reach."""
    graph = network_graph(network)
    nodes = [node.name for node in network.nodes if node.count]
    reached = nx.node_connected_component(graph, nodes[0])
    return [name for name in nodes if name not in reached]


def _degrade(graph: nx.Graph, cluster: Cluster, name: str, members: tuple[int, ...], factor: float) -> None:
    level = [tier.name for tier in cluster.tiers].index(name)
    below = cluster.tiers[level - 1].name if level else "device"
    for one, other, data in graph.edges(data=True):
        down = one if one[0] == below else other
        if name in (one[0], other[0]) and down[0] == below and (not members or down[1] in members):
            data["bandwidth"] *= factor


@lru_cache(maxsize=64)
def network_graph(network: Network) -> nx.Graph:
    """Nodes and switches by name; several cables between two of them are one edge with their sum."""
    graph = nx.Graph()
    for node in network.nodes:
        graph.add_node(node.name, kind="node" if node.count else "switch", count=node.count)
    for link in network.links:
        one, other = link.ends
        if graph.has_edge(one, other):
            data = graph.edges[one, other]
            data["bandwidth"] += link.bandwidth
            data["latency"] = max(data["latency"], link.latency)
        else:
            graph.add_edge(one, other, bandwidth=link.bandwidth, latency=link.latency)
    return graph


@dataclass(frozen=True)
class _Group:
    """The nodes of a group in the order of ranks, and how many members each has."""

    nodes: tuple[str, ...]
    members: tuple[int, ...]


def network_crossings(network: Network, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Crossing, ...]:
    """The crossings of the groups of these axes: within nodes, and between them. The worst of all groups counts."""
    groups = _groups(network, mesh, axes)
    found = []
    inner = [
        tier for group in groups for name, count in zip(group.nodes, group.members, strict=True)
        if count > 1 and (tier := _inner(network, name)) is not None
    ]  # fmt: skip
    if inner:
        tier = min(inner, key=lambda t: t.rate * t.efficiency)
        most = max(max(group.members) for group in groups)
        hops = max(sum(group.members) - len(group.nodes) for group in groups)
        bandwidth = tier.rate * (min(1.0, (most - 1) / (tier.size - 1)) if tier.direct else 1.0)
        found.append(Crossing(tier, bandwidth, 1, hops, most))
    across = [group for group in groups if len(group.nodes) > 1]
    if across:
        rate = min(group_rate(network, group, groups) for group in _distinct(across))
        inside = min(min(group.members) for group in across)
        spread = max(len(group.nodes) for group in across)
        latency = max(ring_latency(network, group.nodes) for group in _distinct(across))
        tier = replace(network.tier, latency=latency)
        found.append(Crossing(tier, rate / inside, inside, spread - 1, spread))
    return tuple(found)


def _inner(network: Network, name: str) -> Tier | None:
    return next(node.inner for node in network.nodes if node.name == name)


def _groups(network: Network, mesh: Mesh, axes: tuple[str, ...]) -> Counter[_Group]:
    """The groups of the axes by where they lie, with how many there are of each."""
    places = [node.name for node in network.nodes for _ in range(node.count)]
    found: Counter[_Group] = Counter()
    done: set[int] = set()
    for rank in range(mesh.ranks):
        if rank in done:
            continue
        ranks = sorted(mesh.group(rank, axes))
        done.update(ranks)
        counts = Counter(places[r] for r in ranks)
        found[_Group(tuple(counts), tuple(counts.values()))] += 1
    return found


def _distinct(groups: Iterable[_Group]) -> list[_Group]:
    return list({frozenset(group.nodes): group for group in groups}.values())


def group_rate(network: Network, group: _Group, groups: Counter[_Group]) -> float:
    """Bytes per second that a ring of this group moves past each node while all ``groups`` send."""
    graph = network_graph(network)
    best = float("inf")
    for cut in [*_own_cuts(graph, group), *_unit_cuts(network)]:
        labels = _labels(graph, cut)
        if len({labels[name] for name in group.nodes}) == 1:
            continue  # other ways lead around these links
        capacity = sum(graph.edges[edge]["bandwidth"] for edge in cut)
        sharing = sum(count for other, count in groups.items() if len({labels[n] for n in other.nodes}) > 1)
        best = min(best, capacity / sharing)
    reach = _reach(graph, group)
    own = min(nx.maximum_flow_value(reach, group.nodes[0], n, capacity="bandwidth") for n in group.nodes[1:])
    return float(min(best, own))


def _reach(graph: nx.Graph, group: _Group) -> nx.Graph:
    """The part of the graph that the group uses: its own nodes and switches, or all if these do not connect it."""
    kept = graph.subgraph([n for n, data in graph.nodes(data=True) if data["kind"] == "switch" or n in group.nodes])
    connected = nx.node_connected_component(kept, group.nodes[0])
    return kept.subgraph(connected) if set(group.nodes) <= connected else graph


def _own_cuts(graph: nx.Graph, group: _Group) -> list[frozenset[tuple[str, str]]]:
    """The smallest cuts between the first node of a group and each other one."""
    reach = _reach(graph, group)
    found = set()
    for name in group.nodes[1:]:
        _, (one, other) = nx.minimum_cut(reach, group.nodes[0], name, capacity="bandwidth")
        found.add(frozenset(nx.edge_boundary(reach, one, other)))
    return list(found)


@lru_cache(maxsize=64)
def _unit_cuts(network: Network) -> tuple[frozenset[tuple[str, str]], ...]:
    """The links out of each node, and out of each switch together with what hangs on it alone. All groups share them,
    whether or not they are the smallest cut of any one group."""
    graph = network_graph(network)
    found = []
    for name in graph.nodes:
        unit = {name}
        if graph.nodes[name]["kind"] == "switch":
            unit |= {n for n in graph.neighbors(name) if set(graph.neighbors(n)) == {name}}
        cut = frozenset(nx.edge_boundary(graph, unit))
        if cut:
            found.append(cut)
    return tuple(found)


def _labels(graph: nx.Graph, cut: frozenset[tuple[str, str]]) -> dict[str, int]:
    """By node: the number of the piece in which it lies once the links of the cut are gone."""
    rest = nx.restricted_view(graph, [], list(cut))
    return {name: i for i, piece in enumerate(nx.connected_components(rest)) for name in piece}


def ring_latency(network: Network, nodes: tuple[str, ...]) -> float:
    """Seconds of the longest hop of a ring over these nodes, along the quickest path."""
    graph = network_graph(network)
    pairs = zip(nodes, (*nodes[1:], nodes[0]), strict=True)
    return max(float(nx.shortest_path_length(graph, one, other, weight="latency")) for one, other in pairs)
