"""Reads an explicit network: ``[[node]]``, ``[[switch]]``, ``[[link]]`` and ``[network]`` tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import product

from meshwright.compiler.cluster import catalogue, presets
from meshwright.compiler.cluster.catalogue import named_device
from meshwright.compiler.cluster.cluster import Cluster, Degraded, Link, Network, Node, Tier, slowest
from meshwright.compiler.cluster.device import Device
from meshwright.compiler.cluster.device_table import TIER_KEYS, device_table, read_device, read_tier
from meshwright.compiler.cluster.reading import Table
from meshwright.compiler.diagnostics import suggestion
from meshwright.compiler.mesh import Mesh

MOST = 2048
"""Nodes of one entry: routes between all pairs are looked for."""
NODE_KEYS = ("name", "device", "count", "repeat", "inner")
LINK_KEYS = ("between", "bandwidth", "latency")
NETWORK_KEYS = ("name", "efficiency", "overhead", "ramp", "floor", "collectives")


@dataclass
class NetworkReader:
    """Reads the nodes and links of one document."""

    top: Table
    nodes: dict[str, Node] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    """By node: its device."""

    def network(self) -> tuple[Network, tuple[Degraded, ...]]:
        for table in self.top.tables("node", "a node", NODE_KEYS):
            self._node(table)
        if not self.devices:
            self.top.missing("node", 'device = "h100", count = 8 below [[node]]')
        for table in self.top.tables("switch", "a switch", ("name", "repeat")):
            for name in self._names(table, table.text("name", example='"leaf"')):
                self._add(table, Node(name))
        links = [link for table in self.top.tables("link", "a link", LINK_KEYS) for link in self._links(table)]
        degraded = []
        for table in self.top.tables("degraded", "a degraded link", ("node", "between", "factor")):
            slow, links = self._degrade(table, links)
            degraded.append(slow)
        return Network(tuple(self.nodes.values()), tuple(links), self._tier()), tuple(degraded)

    def _node(self, table: Table) -> None:
        device: Device
        entry = None
        if isinstance(table.values.get("device"), dict):
            own = device_table(table.reading, table.values["device"], (*table.path, "device"), "'device'")
            device = read_device(own, own.text("name", default="device"))
        elif table.has("device"):
            device = named_device(table)
            entry = catalogue.find(device.name)
        else:
            table.missing("device", '"h100"')
            device = catalogue.placeholder()
        count = table.whole("count", default=1)
        inner = presets.cut(entry.tiers[0], count) if entry and count > 1 else None
        if table.has("inner"):
            inner = self._inner(table, inner, count)
        elif count > 1 and inner is None and not table.reading.faults:
            table.missing("inner", '{ name = "nvlink", bandwidth = "450 GB/s", latency = "1 us" }')
        for name in self._names(table, table.text("name", default=f"node{len(self.devices)}")):
            self._add(table, Node(name, count, inner))
            self.devices[name] = device

    def _inner(self, table: Table, usual: Tier | None, count: int) -> Tier | None:
        values = table.values["inner"]
        if not isinstance(values, dict):
            table.wrong("inner", "a table", '{ bandwidth = "450 GB/s", latency = "1 us" }')
            return usual
        keys = tuple(key for key in TIER_KEYS if key not in ("size", "oversubscription"))
        own = table.reading.table(values, (*table.path, "inner"), "'inner'", keys)
        return replace(read_tier(own, usual, sized=False, name=usual.name if usual else "inner"), size=count)

    def _names(self, table: Table, name: str) -> list[str]:
        """The name, or with ``repeat`` the name followed by 0, 1, ..."""
        if not table.has("repeat"):
            return [name]
        count = table.whole("repeat")
        if count > MOST:
            table.wrong("repeat", f"a number up to {MOST}; larger clusters are told by [[tier]]", str(MOST))
        return [f"{name}{i}" for i in range(min(count, MOST))]

    def _add(self, table: Table, node: Node) -> None:
        if node.name in self.nodes:
            place = table.value("name") if table.has("name") else table.reading.toml.key(*table.path)
            table.reading.fault(
                "E0420", f"two nodes are called '{node.name}'", place, "give each node a name of its own"
            )
        self.nodes[node.name] = node

    def _links(self, table: Table) -> list[Link]:
        bandwidth = table.quantity("bandwidth", "rate")
        latency = table.quantity("latency", "seconds", 1e-6, zero=True)
        return [Link(pair, bandwidth, latency) for pair in self._pairs(table)]

    def _pairs(self, table: Table) -> list[tuple[str, str]]:
        """The pairs of nodes that ``between`` names; ``*`` in a name stands for any text."""
        if not table.has("between"):
            table.missing("between", '["a", "b"]')
            return []
        value = table.values["between"]
        if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, str) for v in value):
            table.wrong("between", "two names of nodes", '["a", "b"]')
            return []
        ends = []
        for pattern in value:
            found = [name for name in self.nodes if fnmatchcase(name, pattern)]
            if not found:
                table.reading.fault(
                    "E0421",
                    f"there is no node '{pattern}'",
                    table.reading.toml.value(*table.path, "between", piece=pattern),
                    suggestion(pattern, self.nodes),
                )
            ends.append(found)
        # ["n*", "n*"] connects each pair once
        pairs = {frozenset(pair): pair for pair in product(ends[0], ends[1]) if pair[0] != pair[1]}
        if not pairs and all(ends):
            table.wrong("between", "two different nodes", '["a", "b"]')
        return list(pairs.values())

    def _degrade(self, table: Table, links: list[Link]) -> tuple[Degraded, list[Link]]:
        if not table.has("factor"):
            table.missing("factor", "0.5")
        factor = table.number("factor", 1.0, least=0.001, most=1.0)
        order = list(self.nodes)
        if table.has("node"):
            name = table.text("node")
            if name not in self.nodes:
                table.reading.fault(
                    "E0421", f"there is no node '{name}'", table.value("node"), suggestion(name, self.nodes)
                )
                return Degraded("", factor), links
            node = self.nodes[name]
            if node.inner is not None:
                slower = replace(node.inner, bandwidth=node.inner.bandwidth * factor)
                self.nodes[name] = replace(node, inner=slower)
            hit = {link for link in links if name in link.ends}
            members: tuple[int, ...] = (order.index(name),)
        else:
            pairs = {frozenset(pair) for pair in self._pairs(table)}
            hit = {link for link in links if frozenset(link.ends) in pairs}
            members = tuple(sorted({order.index(n) for pair in pairs for n in pair}))
            if pairs and not hit:
                table.reading.fault(
                    "E0421",
                    "there is no link between these nodes",
                    table.value("between"),
                    "name the ends of a [[link]]",
                )
        changed = [replace(link, bandwidth=link.bandwidth * factor) if link in hit else link for link in links]
        return Degraded("network", factor, members), changed

    def _tier(self) -> Tier:
        values = self.top.values.get("network", {})
        if not isinstance(values, dict):
            self.top.wrong("network", "a table", "a table [network]", write=False)
            values = {}
        table = self.top.reading.table(values, ("network",), "[network]", NETWORK_KEYS)
        return read_tier(
            table, Tier("network", 1, 1.0, 0.0, efficiency=0.9, overhead=20e-6), sized=False, name="network"
        )


def read_network(top: Table, name: str) -> Cluster:
    """The cluster of a document's nodes and links."""
    reader = NetworkReader(top)
    network, degraded = reader.network()
    devices: list[tuple[Device, int]] = []
    for node in network.nodes:
        if node.count and devices and devices[-1][0] == reader.devices[node.name]:
            devices[-1] = (devices[-1][0], devices[-1][1] + node.count)
        elif node.count:
            devices.append((reader.devices[node.name], node.count))
    device = slowest(tuple(d for d, _ in devices)) if devices else catalogue.placeholder()
    mixed = tuple(devices) if len(devices) > 1 else ()
    whole = Cluster(name, device, (replace(network.tier, size=max(1, network.devices)),), mixed, degraded, network)
    if top.reading.faults or not _connected(top, network):
        return whole
    return replace(whole, tiers=_summary(network))


def _connected(top: Table, network: Network) -> bool:
    """Whether every device reaches every other one; a fault if not."""
    from meshwright.compiler.cluster.topology import unreachable  # networkx takes a while to import

    cut_off = unreachable(network)
    if cut_off:
        first = next(node.name for node in network.nodes if node.count)
        top.reading.fault(
            "E0422",
            f"no way leads from node '{first}' to {', '.join(repr(n) for n in cut_off[:3])}"
            + (f" and {len(cut_off) - 3} more" if len(cut_off) > 3 else ""),
            top.reading.toml.key("link") if top.has("link") else top.reading.toml.key("node"),
            f'add a [[link]] with between = ["{first}", "{cut_off[0]}"], or over a switch',
        )
    return not cut_off


def _summary(network: Network) -> tuple[Tier, ...]:
    """The network as tiers, for those who look at sizes and rates: what a group of all devices finds."""
    from meshwright.compiler.cluster.topology import network_crossings

    counts = {node.count for node in network.nodes if node.count}
    crossed = network_crossings(network, Mesh((("all", network.devices),)), ("all",))
    if not crossed:
        return (replace(network.tier, size=1),)
    if len(counts) == 1 and len(crossed) > 1:
        (inside,) = counts
        sizes = [inside, network.devices // inside]
    elif len(crossed) == 1:
        sizes = [network.devices]
    else:
        crossed, sizes = crossed[-1:], [network.devices]
    return tuple(
        replace(c.tier, size=size, bandwidth=c.bandwidth, oversubscription=1.0, direct=False)
        for c, size in zip(crossed, sizes, strict=True)
    )
