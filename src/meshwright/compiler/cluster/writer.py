"""Writes a cluster of tiers as the TOML that :func:`read_cluster` reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from meshwright.compiler.cluster.cluster import Cluster, Tier
from meshwright.compiler.cluster.device import Device, Efficiency


def cluster_to_toml(cluster: Cluster, comments: Iterable[str] = ()) -> str:
    """The cluster as TOML with its device written out; reading it gives an equal cluster.

    ``comments`` go on top, one a line. Mixed devices, degraded links and explicit networks are written by hand only:
    raises ValueError for them.
    """
    if cluster.network or cluster.mixed or cluster.degraded:
        raise ValueError("only a cluster of like devices on tiers is written")
    lines = [f"# {line}".rstrip() for line in comments]
    lines += ["", f"name = {_text(cluster.name)}", f"ranks = {cluster.ranks}", "", *_device(cluster.device)]
    for tier in cluster.tiers:
        lines += ["", *_tier(tier)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _device(device: Device) -> list[str]:
    lines = [
        "[device]  # bytes, bytes per second, FLOP/s",
        f"name = {_text(device.name)}",
        f"memory = {device.memory}",
        f"bandwidth = {_number(device.bandwidth)}",
        f"host_link = {_number(device.host_link)}",
        "",
        "[device.flops]",
        *(f"{dtype} = {_number(rate)}" for dtype, rate in device.flops.items()),
        "",
        "[device.efficiency]",
    ]
    lines += [f"{f.name} = {_number(getattr(device.efficiency, f.name))}" for f in fields(Efficiency)]
    if device.sources:
        lines += ["", "[device.sources]", *(f"{key} = {_text(text)}" for key, text in device.sources.items())]
    return lines


def _tier(tier: Tier) -> list[str]:
    lines = ["[[tier]]", f"name = {_text(tier.name)}", f"size = {tier.size}"]
    for name in ("bandwidth", "latency", "efficiency", "overhead"):
        lines.append(f"{name} = {_number(getattr(tier, name))}")
    usual = Tier("", 1, 1.0, 0.0)
    for name in ("oversubscription", "ramp", "floor", "in_switch"):
        if getattr(tier, name) != getattr(usual, name):
            lines.append(f"{name} = {_number(getattr(tier, name))}")
    lines += ["direct = true"] if tier.direct else []
    if tier.collectives:
        lines += ["", "[tier.collectives]  # efficiency, seconds of a call, its memory per byte of payload"]
        lines += [
            f"{c.kind} = {{ efficiency = {_number(c.efficiency)}, overhead = {_number(c.overhead)}"
            + (f", staging = {_number(c.staging)}" if c.staging else "")
            + (f", passing = {_number(c.passing)}" if c.passing else "")
            + (f", growth = {_number(c.growth)} }}" if c.growth else " }")
            for c in tier.collectives
        ]
    return lines


def _number(value: float) -> str:
    short = f"{value:.15g}"
    return short if float(short) == value else repr(value)


def _text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
