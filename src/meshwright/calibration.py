"""Measures a machine with the runtime's own launcher and process groups, and fits a cluster to what it finds.

Every rank measures at the same time, so that cores, memory and links are shared as they are in training. What a rank
takes is the mean over ranks; of links, each tier is measured by groups that cross it alone: the ranks of a node, and
the ranks of equal number on all nodes.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.compiler.cluster.cluster import Cluster, Tier
from meshwright.compiler.cluster.device import Device, Efficiency
from meshwright.compiler.cluster.fitting import Sent, Timed, error_of, fit_device, fit_tier
from meshwright.compiler.cluster.units import amount, flops, rate, seconds
from meshwright.compiler.cluster.writer import cluster_to_toml
from meshwright.compiler.diagnostics import MeshwrightError, error
from meshwright.runtime.environment import Place, complete, place_of
from meshwright.runtime.failure import described, report
from meshwright.runtime.measure_passes import Crossing, Readings, crossing, measure_passes
from meshwright.runtime.worker import device_of

TIERS = ("node", "network")
"""What the measured tiers are called: within a node, and between nodes."""

LEAST_HIDDEN = 0.1
"""The share of messages beside kernels that is taken to be hidden at least, whatever was measured."""


def calibrate_worker(output: Path | None) -> int:
    """Measure on this rank together with all others; rank 0 writes the cluster file, or prints it. The exit code."""
    try:
        place = place_of()
        complete(place)
        device = device_of(place)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=place.rank,
            world_size=place.ranks,
            timeout=timedelta(minutes=5),
        )
        cluster, comments = measure(place, device)
        if place.rank == 0:
            write(cluster_to_toml(cluster, comments), output)
        dist.barrier()
        dist.destroy_process_group()
    except (MeshwrightError, RuntimeError) as failure:
        report(described(place_of().rank, "", failure), place_of().rank)
        return 1
    return 0


def check_output(output: Path | None) -> None:
    """Raises MeshwrightError E0425 if a file could not be written there, before anything is measured."""
    if output is not None and not output.parent.is_dir():
        raise _unwritable(output, f"there is no folder {output.parent}")


def write(text: str, output: Path | None) -> None:
    """Write the cluster file, or print it. Raises MeshwrightError E0425 if it cannot be written."""
    if output is None:
        print(text, end="")
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise _unwritable(output, str(fault.strerror)) from None
    print(f"written to {output}")


def _unwritable(output: Path, reason: str) -> MeshwrightError:
    action = "give --output a file in a folder that exists and may be written to"
    return error("E0425", f"cannot write {output}: {reason}", action=action)


def measure(
    place: Place, device: torch.device, between: Callable[[], object] = lambda: None
) -> tuple[Cluster, list[str]]:
    """The cluster that all ranks find together, and a summary of the measurements, one line each. ``between`` is called
    after every pass over everything that is measured."""
    torch.manual_seed(0)
    local = ranks_of_a_node(place)
    tiers, crossings = _crossings(place, local)
    found = measure_passes(crossings, device, local, between)
    sent = [[s for tier, s in found.sent if tier == number] for number in range(len(tiers))]
    fitted = tuple(fit_tier(Tier(*tier, 1.0, 0.0), own) for tier, own in zip(tiers, sent, strict=True))
    cluster = Cluster(
        "measured",
        fit_device(_device(device, found), found.timed),
        fitted or (Tier(TIERS[0], 1, 1e12, 0.0),),
    )
    return cluster, _summary(cluster, device, found.timed, sent)


def ranks_of_a_node(place: Place) -> int:
    """How many ranks each node has, as the launcher says; all if it does not, or if they do not divide."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", place.ranks))
    return local if 0 < local <= place.ranks and place.ranks % local == 0 else place.ranks


def _device(device: torch.device, found: Readings) -> Device:
    """The device with its best measured rates as peaks, before efficiencies are fitted."""
    machine = found.machine
    matmuls = [t for t in found.timed if t.kernel.kind == "matmul"]
    moving = [t for t in found.timed if t.kernel.kind not in ("matmul", "attention")]
    dtypes = dict.fromkeys(t.kernel.dtype for t in matmuls)
    peaks = {d: max(t.kernel.flops / t.seconds for t in matmuls if t.kernel.dtype == d) for d in dtypes}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
    return Device(
        name=name,
        flops={dtype: _digits(peak) for dtype, peak in peaks.items()},
        memory=machine.memory,
        bandwidth=_digits(max((t.kernel.read + t.kernel.written) / t.seconds for t in moving)),
        host_link=_digits(1 / machine.copy),
        efficiency=Efficiency(
            launch=_digits(machine.launch),
            reserve=machine.reserve,
            contention=round(1 / min(1.0, max(LEAST_HIDDEN, found.hidden)) - 1, 2),
        ),
        sources={"all": "measured by meshwright calibrate; peaks are the best rates that were reached"},
    )


def _crossings(place: Place, local: int) -> tuple[list[tuple[str, int]], list[Crossing]]:
    """The tiers with their sizes, and the groups in which each is measured."""
    nodes = place.ranks // local
    inside = [list(range(n * local, (n + 1) * local)) for n in range(nodes)]
    across = [list(range(i, place.ranks, local)) for i in range(local)]
    tiers: list[tuple[str, int]] = []
    found: list[Crossing] = []
    for name, size, groups in ((TIERS[0], local, inside), (TIERS[1], nodes, across)):
        if size == 1:
            continue
        found.append(crossing(len(tiers), place.rank, groups))
        if size > 2 and size % 2 == 0:  # pairs tell what a hop takes
            pairs = [g[i : i + 2] for g in groups for i in range(0, size, 2)]
            found.append(crossing(len(tiers), place.rank, pairs))
        tiers.append((name, size))
    return tiers, found


def _fit(device: Device, timed: Sequence[Timed]) -> str:
    kinds = {"matmul": "products", "attention": "attention"}
    groups: dict[str, list[Timed]] = {}
    for t in timed:
        groups.setdefault(kinds.get(t.kernel.kind, "the rest"), []).append(t)
    return "within " + ", ".join(f"x{error_of(device, group):.2f} ({name})" for name, group in groups.items())


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _summary(cluster: Cluster, device: torch.device, timed: Sequence[Timed], sent: list[list[Sent]]) -> list[str]:
    """What was measured, for people who read the file."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = f", {torch.get_num_threads()} threads a rank on {cores} cores" if device.type == "cpu" else ""
    lines = [
        f"Measured by meshwright calibrate: {cluster.ranks} ranks, {cluster.device.name}, torch {torch.__version__}"
        f"{threads}. All ranks worked at the same time.",
        "Seconds are means over ranks. The file can be edited; whoever reads it takes it as it stands.",
        "",
        f"kernels; the fitted constants tell their seconds {_fit(cluster.device, timed)}:",
    ]
    for t in timed:
        k = t.kernel
        sizes = "x".join(map(str, k.sizes)) or f"{amount(k.read + k.written)} moved"
        reached = flops(k.flops / t.seconds) if k.sizes else rate((k.read + k.written) / t.seconds)
        lines.append(f"  {k.op:20}{k.dtype:6}{sizes:24}{seconds(t.seconds):>12}   {reached}")
    for tier, measured in zip(cluster.tiers, sent, strict=False):
        lines += ["", f"collectives over '{tier.name}' (payload, seconds, bytes past a rank per second):"]
        for s in sorted(measured, key=lambda s: (s.kind, s.members, s.payload)):
            lines.append(
                f"  {s.kind:16}{s.members:4} ranks{amount(s.payload):>10}{seconds(s.seconds):>12}   "
                f"{rate(s.moved / s.seconds)}"
            )
    return lines
