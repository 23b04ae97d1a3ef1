"""Cluster files: TOML with a device and nested tiers of links, or with nodes and links one by one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.compiler.cluster import catalogue, presets
from meshwright.compiler.cluster.catalogue import Entry
from meshwright.compiler.cluster.cluster import Cluster, Degraded, Tier, slowest
from meshwright.compiler.cluster.device import Device
from meshwright.compiler.cluster.device_table import TIER_KEYS, device_table, read_device, read_tier
from meshwright.compiler.cluster.network_table import read_network
from meshwright.compiler.cluster.reading import Reading, Table
from meshwright.compiler.diagnostics import Span, error, nearest, suggestion
from meshwright.compiler.toml_text import TomlText, parse_toml

KEYS = ("name", "description", "ranks", "device", "devices", "tier", "node", "link", "switch", "degraded", "network")


def read_cluster(source: str | Path, ranks: int | None = None) -> Cluster:
    """A cluster by the name of a preset (``h100x64``, ``local``), from a file, or from TOML text (a ``str`` with a
    line break in it).

    ``ranks`` is how many ranks ``local`` has; of any other cluster it must be the number of devices.
    Raises MeshwrightError with every fault that was found, each with its place.
    """
    if isinstance(source, str) and "\n" in source:
        cluster = cluster_of(parse_toml(source, "cluster.toml", "E0411"))
    else:
        path = Path(source)
        named = presets.preset(str(source), ranks) if path.suffix != ".toml" and not path.is_file() else None
        cluster = named or cluster_of(parse_toml(_text_of(path), str(source), "E0411"))
    if ranks is not None and ranks != cluster.ranks:
        raise error(
            "E0419",
            f"the cluster '{cluster.name}' has {cluster.ranks} devices, {ranks} ranks were asked for",
            action=f"ask for {cluster.ranks} ranks, or change the sizes in the cluster file",
        )
    return cluster


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as fault:
        if catalogue.find(str(path)) is not None:
            message = f"'{path}' is a device; a cluster has a number of them"
            raise error("E0410", message, action=f"write {path}x8, or another count") from None
        near = nearest(str(path), (presets.LOCAL, *presets.EXAMPLES))
        action = "give a preset such as h100x64 or local, or the path of a cluster file"
        raise error(
            "E0410",
            f"'{path}' is neither a preset nor a cluster file that can be read: {fault.strerror}",
            action=f"did you mean '{near}'? Otherwise {action}" if near else action,
        ) from None
    except UnicodeDecodeError:
        raise error("E0411", f"{path} is not a text file", action="give the path of a cluster in TOML") from None


def cluster_of(toml: TomlText) -> Cluster:
    """The cluster that a TOML document describes."""
    return ClusterReader(Reading(toml)).cluster()


@dataclass
class ClusterReader:
    """Reads one document."""

    reading: Reading

    def cluster(self) -> Cluster:
        top = self.reading.table(self.reading.toml.values, (), "a cluster", KEYS)
        name = top.text("name", default=Path(self.reading.toml.file).stem)
        explicit = [key for key in ("node", "link", "switch", "network") if top.has(key)]
        if explicit and top.has("tier"):
            self.reading.fault(
                "E0418",
                f"a cluster has tiers or nodes and links, not both: '{explicit[0]}' stands beside 'tier'",
                self.reading.toml.key(explicit[0]),
                "keep the [[tier]] tables, or the [[node]] and [[link]] tables",
            )
            self.reading.finish()
        cluster = self._explicit(top, name) if explicit else self._tiered(top, name)
        self._count(top, cluster)
        self.reading.finish()
        return cluster

    def _tiered(self, top: Table, name: str) -> Cluster:
        kinds = self._devices(top)
        entry = catalogue.find(kinds[0][0].name) if len({device.name for device, _ in kinds}) == 1 else None
        tiers = self._tiers(top, entry)
        mixed = tuple(kinds) if len(kinds) > 1 else ()
        cluster = Cluster(name, slowest(tuple(d for d, _ in kinds)), tiers, mixed, self._degraded(top, tiers))
        given = sum(count for _, count in kinds)
        if mixed and given != cluster.ranks and not self.reading.faults:
            self.reading.fault(
                "E0419",
                f"the devices are {given}, the tiers connect {cluster.ranks}",
                self.reading.toml.key("devices"),
                "let the counts of the devices sum to the product of the tiers' sizes",
            )
        return cluster

    def _devices(self, top: Table) -> list[tuple[Device, int]]:
        """The devices in the order of ranks, each with its count (1 where all are alike)."""
        if top.has("devices") and top.has("device"):
            self.reading.fault(
                "E0418",
                "'device' is for clusters of one kind, 'devices' for mixed ones; both are here",
                self.reading.toml.key("devices"),
                "keep one of the two",
            )
        if top.has("devices"):
            found = [
                (catalogue.named_device(one), one.whole("count"))
                for one in top.tables("devices", "an entry of 'devices'", ("device", "count"))
            ]
            if found or self.reading.faults:
                return found or [(catalogue.placeholder(), 1)]
        if not top.has("device"):
            top.missing("device", '"h100"')
            return [(catalogue.placeholder(), 1)]
        value = top.values["device"]
        if isinstance(value, dict):
            table = device_table(self.reading, value, ("device",), "'device'")
            return [(read_device(table, table.text("name", default="device")), 1)]
        return [(catalogue.named_device(top), 1)]

    def _tiers(self, top: Table, entry: Entry | None) -> tuple[Tier, ...]:
        tables = top.tables("tier", "a tier", TIER_KEYS)
        if not tables and not self.reading.faults:
            self.reading.fault(
                "E0414",
                "the cluster has no links",
                Span(self.reading.toml.file, 1, 1),
                "add [[tier]] tables, innermost first, or [[node]] and [[link]] tables",
            )
        known = {tier.name: tier for tier in entry.tiers} if entry else {}
        tiers: list[Tier] = []
        for table in tables:
            tier = read_tier(table, known.get(str(table.values.get("name"))))
            if any(tier.name == other.name for other in tiers):
                self.reading.fault(
                    "E0420",
                    f"two tiers are called '{tier.name}'",
                    table.value("name"),
                    "give each tier a name of its own",
                )
            tiers.append(tier)
        return tuple(tiers)

    def _degraded(self, top: Table, tiers: tuple[Tier, ...]) -> tuple[Degraded, ...]:
        found = []
        below = 1
        members: dict[str, int] = {}
        ranks = 1
        for tier in tiers:
            ranks *= tier.size
        for tier in tiers:
            members[tier.name] = ranks // below
            below *= tier.size
        for one in top.tables("degraded", "a degraded link", ("tier", "factor", "member", "between")):
            tier_name = one.text("tier", example='"nvlink"')
            if tier_name and tier_name not in members:
                self.reading.fault(
                    "E0421", f"there is no tier '{tier_name}'", one.value("tier"), suggestion(tier_name, members)
                )
            if not one.has("factor"):
                one.missing("factor", "0.5")
            factor = one.number("factor", 1.0, least=0.001, most=1.0)
            found.append(Degraded(tier_name, factor, self._numbers(one, members.get(tier_name))))
        return tuple(found)

    def _numbers(self, table: Table, members: int | None) -> tuple[int, ...]:
        """``member = 3`` or ``between = [3, 5]`` as numbers of members of a tier."""
        if table.has("member"):
            numbers: object = [table.whole("member", least=0)]
        else:
            numbers = table.values.get("between", [])
        key = "member" if table.has("member") else "between"
        if not isinstance(numbers, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
            table.wrong(key, "two numbers of members", "[0, 1]")
            return ()
        if key == "between" and table.has("between") and (len(numbers) != 2 or len(set(numbers)) != 2):
            table.wrong(key, "two different numbers of members", "[0, 1]")
            return ()
        for number in numbers:
            if members is not None and not 0 <= number < members:
                self.reading.fault(
                    "E0421",
                    f"there is no member {number}: the tier connects {members}, counted from 0",
                    table.value(key),
                    f"give a number below {members}",
                )
                return ()
        return tuple(numbers)

    def _explicit(self, top: Table, name: str) -> Cluster:
        for key in ("device", "devices"):
            if top.has(key):
                self.reading.fault(
                    "E0418",
                    f"'{key}' belongs to a cluster of tiers; here every node names its device",
                    self.reading.toml.key(key),
                    f"delete {key}, and give each [[node]] a device",
                )
        return read_network(top, name)

    def _count(self, top: Table, cluster: Cluster) -> None:
        """``ranks`` in the file is a check of what the file means."""
        if not top.has("ranks"):
            return
        ranks = top.whole("ranks")
        if not self.reading.faults and ranks != cluster.ranks:
            self.reading.fault(
                "E0419",
                f"the file says ranks = {ranks}, and describes {cluster.ranks} devices",
                top.value("ranks"),
                "correct the sizes, or delete the line",
            )
