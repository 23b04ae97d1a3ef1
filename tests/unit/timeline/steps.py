"""Steps of a rank written by hand, and a device whose times are easy to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.compiler.cluster.cluster import Cluster, Tier
from meshwright.compiler.cluster.collectives import message_cost
from meshwright.compiler.cluster.device import Device, Efficiency
from meshwright.compiler.cluster.kernels import kernel_seconds
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.summary import GraphSummary, Item, Kernel, Message, RankSummary, Transfer, Wait

MESH = Mesh((("data", 8), ("tensor", 4)))
EMPTY = GraphSummary((), ())
DEVICE = Device("test", {"f32": 1e12}, 10**12, 1e12, 1e10, Efficiency(launch=0.0, memory=1.0))
CLUSTER = Cluster("test", DEVICE, (Tier("fast", 4, 1e11, 0.0, 1.0), Tier("slow", 8, 1e10, 0.0, 1.0)))


def on(cluster: Cluster = CLUSTER, **efficiency: float) -> Cluster:
    """The cluster with other constants of its device."""
    device = cluster.device
    return replace(cluster, device=replace(device, efficiency=replace(device.efficiency, **efficiency)))  # type: ignore[arg-type]


def kernel(seconds: float, op: str = "aten.mul.Tensor") -> Kernel:
    """A kernel that takes about so many seconds; :func:`took` says how many."""
    size = int(seconds * 1e12 / 2)
    return Kernel(op, "elementwise", 0.0, size, size)


def took(*works: Kernel | Message, cluster: Cluster = CLUSTER, mesh: Mesh = MESH) -> float:
    """The seconds of these alone, one after the other."""
    return sum(
        kernel_seconds(cluster.device, w)
        if isinstance(w, Kernel)
        else message_cost(cluster, mesh, w.axes, w.kind, w.payload).seconds
        for w in works
    )


def gather(seconds: float, axes: tuple[str, ...] = ("data",), *, asynchronous: bool = False) -> Message:
    """A gather that takes about so many seconds."""
    rate = 1e10 if axes == ("data",) else 1e11
    size = MESH.size(*axes)
    return Message("all-gather", axes, int(seconds * rate * size / (size - 1)), asynchronous=asynchronous)


Work = Kernel | Message | Wait | Transfer


def item(work: Work, reads: Sequence[int] = (), block: str = "", phase: str = "forward") -> Item:
    """An item with a name of its own."""
    return Item("x", phase, block, work, tuple(reads), tuple(1 for _ in reads))  # type: ignore[arg-type]


def graph(*works: Work | Item) -> GraphSummary:
    """A graph whose items read nothing."""
    return GraphSummary(tuple(w if isinstance(w, Item) else item(w) for w in works), ())


def step(
    micro: GraphSummary,
    update: GraphSummary = EMPTY,
    *,
    microbatches: int = 1,
    repeats: Mapping[str, int] | None = None,
    accumulators: int = 0,
) -> RankSummary:
    """A step of these graphs."""
    return RankSummary(
        MESH, microbatches, EMPTY, micro, update, {}, accumulators, dict(repeats or {}), model_flops=1e9, tokens=1000
    )
