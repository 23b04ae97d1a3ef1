"""Clusters by name: ``h100x64``, any ``<device>x<count>`` of the catalogue, and ``local``."""

from __future__ import annotations

import os
import re
from dataclasses import replace

from meshwright.compiler.cluster import catalogue
from meshwright.compiler.cluster.catalogue import Entry
from meshwright.compiler.cluster.cluster import Cluster, Tier
from meshwright.compiler.diagnostics import error

EXAMPLES = ("h100x8", "h100x64", "a100x256", "a100-40x16", "h200x8", "b200x32", "gb200x72", "mi300xx8", "tpu-v5px256")
"""Presets that lists show; every device takes any count that fills its nodes."""
LOCAL = "local"
_PRESET = re.compile(r"(.+)x([0-9]+)")


def preset(name: str, ranks: int | None = None) -> Cluster | None:
    """The cluster of that name; None if it does not have the form of a preset.

    ``local`` takes its number of ranks from ``ranks`` (default: the cores of this machine).
    Raises MeshwrightError E0415 for an unknown device and E0423 for a count that fills no whole nodes.
    """
    wanted = name.strip().lower()
    if wanted == LOCAL:
        return local(ranks)
    found = _PRESET.fullmatch(wanted)
    if not found:
        return None
    if found[1] == LOCAL:
        return local(int(found[2]))
    device = catalogue.find(found[1])
    if device is None:
        raise error("E0415", f"unknown device '{found[1]}' in the cluster '{name}'", action=catalogue.hint(found[1]))
    return Cluster(wanted, device.device, fill(device, int(found[2]), wanted))


def fill(entry: Entry, count: int, name: str) -> tuple[Tier, ...]:
    """The usual tiers of a device, cut to ``count`` devices; those that would have a single member are left out.

    The innermost tier is filled (nodes of 8). Further ones take the largest divisor of what is left that they can
    connect, if that is at least half of it; else the tier connects all.
    """
    if count < 1:
        raise error("E0417", f"the cluster '{name}' has {count} devices", action="give a number of at least 1")
    inner = entry.tiers[0]
    if count > inner.size and count % inner.size:
        below, above = count // inner.size * inner.size, -(-count // inner.size) * inner.size
        raise error(
            "E0423",
            f"{count} devices do not fill nodes of {inner.size} ({entry.device.name}, {inner.name})",
            action=f"ask for {below} or {above}, or describe the cluster in a file",
        )
    tiers = []
    left = count
    for index, tier in enumerate(entry.tiers):
        last = index == len(entry.tiers) - 1
        size = left if last else _members(left, tier.size, first=index == 0)
        if size > 1:
            tiers.append(cut(tier, size))
        left //= size
    return tuple(tiers) or (cut(inner, 1),)


def cut(tier: Tier, size: int) -> Tier:
    """A tier of the catalogue with fewer members; where each pair has its own cable, a member has fewer of them."""
    if tier.direct and tier.size > 1:
        return replace(tier, size=size, bandwidth=tier.bandwidth * max(1, size - 1) / (tier.size - 1))
    return replace(tier, size=size)


def _members(left: int, most: int, first: bool) -> int:
    if first or left <= most:
        return min(left, most)
    best = max(size for size in range(1, most + 1) if left % size == 0)
    return best if best * 2 >= most else left


def local(ranks: int | None = None) -> Cluster:
    """This machine: its cores and memory, shared by the ranks. The rates are those of the catalogue's ``cpu``, which
    ``meshwright calibrate`` replaces by measured ones."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = cores if ranks is None else ranks
    if count < 1:
        raise error("E0417", f"the cluster 'local' has {count} devices", action="give a number of at least 1")
    found = catalogue.entry("cpu")
    share = cores / count
    device = replace(
        found.device,
        name="cpu",
        flops={dtype: rate * share for dtype, rate in found.device.flops.items()},
        bandwidth=found.device.bandwidth * share,
        host_link=found.device.host_link * share,
        memory=host_memory() // count,
    )
    return Cluster(LOCAL, device, (replace(found.tiers[0], size=count),))


def host_memory() -> int:
    """Bytes of this machine's memory; 8 GiB if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 8 << 30
