"""A cluster as text: its device, and its links as a tree, with rates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from meshwright.compiler.cluster.cluster import Cluster, Degraded, Network, Tier
from meshwright.compiler.cluster.device import Device
from meshwright.compiler.cluster.units import amount, flops, rate, seconds


def draw(cluster: Cluster) -> str:
    """The cluster as text."""
    lines = [f"{cluster.name}: {_count(cluster.ranks, 'device')}"]
    kinds = cluster.mixed or ((cluster.device, cluster.ranks),)
    lines += [f"  {count} x {device_line(device)}" for device, count in kinds]
    if cluster.mixed:
        lines += [f"  all ranks wait for: {device_line(cluster.device)}"]
    lines += ["", *(network_lines(cluster.network) if cluster.network else tier_lines(cluster))]
    lines += [degraded_line(slow, cluster.network) for slow in cluster.degraded]
    return "\n".join(lines) + "\n"


def device_line(device: Device) -> str:
    """One line on a device: memory and rates."""
    rates = ", ".join(f"{dtype} {flops(value)}" for dtype, value in device.flops.items())
    return f"{device.name}: {amount(device.memory)} at {rate(device.bandwidth)}; {rates}; host {rate(device.host_link)}"


def tier_lines(cluster: Cluster) -> list[str]:
    """A tree, the outermost tier at the top; units of a tier are alike, so one stands for all."""
    lines = []
    outermost = len(cluster.tiers) - 1
    for depth, level in enumerate(range(outermost, -1, -1)):
        alike = cluster.tiers[level + 1].size if level < outermost else 1
        branch = "   " * (depth - 1) + "└─ " if depth else ""
        lines.append(f"{branch}{f'{alike} x ' if alike > 1 else ''}{tier_line(cluster.tiers[level])}")
    return lines


def tier_line(tier: Tier) -> str:
    """Name, size and rates of a tier."""
    over = f" / {tier.oversubscription:g}:1" if tier.oversubscription != 1 else ""
    parts = [
        f"{tier.name}: connects {tier.size}",
        f"{rate(tier.bandwidth)}{over} for each device",
        f"{_reached(tier)} of it reached" + (f" ({tier.in_switch:.0%} in the switch)" if tier.in_switch else ""),
    ]
    if tier.latency:
        parts.append(f"{seconds(tier.latency)} a hop")
    if tier.overhead:
        parts.append(f"{seconds(tier.overhead)} a call")
    return ", ".join(parts)


def _reached(tier: Tier) -> str:
    shares = [c.efficiency for c in tier.collectives] or [tier.efficiency]
    least, most = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return least if least == most else f"{least} to {most}"


def network_lines(network: Network) -> list[str]:
    """Every node with its links, and of switches those to other switches; equal nodes in a row are counted."""
    switches = {node.name for node in network.nodes if not node.count}
    groups: list[tuple[list[str], list[str]]] = []
    for node in network.nodes:
        kind = "switch" if not node.count else _count(node.count, "device")
        inner = f", inside {node.inner.name} {rate(node.inner.bandwidth)} for each" if node.inner else ""
        body = [f"{kind}{inner}"]
        for link in network.links:
            if node.name in link.ends:
                other = link.ends[1] if link.ends[0] == node.name else link.ends[0]
                if node.name in switches and other not in switches:
                    continue
                body.append(f"── {rate(link.bandwidth)}, {seconds(link.latency)} ── {other}")
        if groups and groups[-1][1] == body:
            groups[-1][0].append(node.name)
        else:
            groups.append(([node.name], body))
    lines = []
    for names, body in groups:
        title = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} alike)"
        lines.append(f"{title}: {body[0]}")
        lines += [f"   {line}" for line in body[1:]]
    return lines


def degraded_line(slow: Degraded, network: Network | None) -> str:
    """What is slower than its kind."""
    members: Iterable[object] = slow.members
    if network:
        members = [network.nodes[i].name for i in slow.members]
    where = " and ".join(map(str, members))
    which = f" of {where}" if len(slow.members) == 1 else f" between {where}" if slow.members else ""
    return f"degraded: {slow.tier}{which} at {slow.factor:.0%}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def as_json(cluster: Cluster) -> dict[str, Any]:
    """The cluster as plain data, in base units."""
    return {
        "name": cluster.name,
        "ranks": cluster.ranks,
        "device": device_json(cluster.device),
        "mixed": [{"device": device_json(device), "count": count} for device, count in cluster.mixed],
        "tiers": [asdict(tier) for tier in cluster.tiers],
        "degraded": [asdict(slow) for slow in cluster.degraded],
        "network": asdict(cluster.network) if cluster.network else None,
    }


def device_json(device: Device) -> dict[str, Any]:
    """A device as plain data."""
    return {
        "name": device.name,
        "flops": dict(device.flops),
        "memory": device.memory,
        "bandwidth": device.bandwidth,
        "host_link": device.host_link,
        "efficiency": asdict(device.efficiency),
        "sources": dict(device.sources),
    }


def node_line(tiers: Sequence[Tier]) -> str:
    """The usual links of a device, in short."""
    return ", ".join(
        f"{tier.name} {rate(tier.bandwidth)}" + (f" x {tier.size}" if tier.size > 1 else "") for tier in tiers
    )
