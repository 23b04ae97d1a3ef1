"""The plan and the cluster of a row."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from benchmarks.published.modules import attention_core, blocks
from benchmarks.published.rows import Habits, Layout, Machine, Row, Unreadable
from meshwright.compiler.cluster import catalogue
from meshwright.compiler.cluster.catalogue import Entry
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.presets import fill
from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.mesh import Segment, Sharding
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import ParameterPlan, Plan, Precision, Recompute
from meshwright.compiler.timeline.cuts import Depth


def words(layout: Layout) -> str:
    """The row's layout as words of a preset."""
    sharded = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}[layout.zero]
    if layout.zero == 3 and not layout.regather:
        sharded = "zero2"
    if layout.inner_data and layout.data > layout.inner_data:
        cut = [f"ddp={layout.data // layout.inner_data}", f"{sharded}={layout.inner_data}"]
    else:
        cut = [f"{sharded}={layout.data}"]
    if layout.tensor > 1:
        cut.append(f"tp={layout.tensor}")
    if layout.sequence:
        cut.append("sp")
    if layout.microbatches > 1:
        cut.append(f"micro={layout.microbatches}")
    return ",".join(cut)


def precision(habits: Habits) -> Precision:
    return Precision("bf16", "bf16" if habits.master_weights else "fp32", habits.reduce)


def plan(program: StepProgram, row: Row) -> Plan:
    """The row's plan, of one stage that has all layers: messages beside the computation, as every framework in the rows
    runs them."""
    made = preset(words(row.layout), program, row.machine.count // row.layout.pipe, precision(row.habits))
    return replace(made, parameters=(*head(row), *made.parameters), recompute=recompute(row), prefetch=1)


def head(row: Row) -> tuple[ParameterPlan, ...]:
    """A head whose product is cut along the vocabulary although its loss wants the logits whole."""
    if row.habits.loss != "plain" or row.layout.tensor == 1:
        return ()
    cut = Sharding(((Segment(row.shape.vocabulary, ("tensor",)),), (Segment(row.shape.hidden),)))
    return (ParameterPlan("**.lm_head.weight", cut),)


@dataclass(frozen=True)
class Kind:
    """A layer of the captured module: whether it is recomputed, and how many layers of the model it stands for."""

    recomputed: bool
    count: int


def arrangement(row: Row) -> tuple[Kind, ...]:
    """The layers of the captured module. Of equal layers there are two, and the second stands for all further ones.

    Where only a share is recomputed, layers that are and layers that are not take turns; those left over follow.
    """
    layers = row.shape.layers
    again = layers if row.habits.recompute != "none" else 0
    if again and row.habits.recomputed_share < 1:
        again = min(layers - 1, max(1, round(row.habits.recomputed_share * layers)))
    turns = min(again, layers - again)
    pair = (True, False)
    found = [Kind(kind, 1) for kind in pair if turns] + [Kind(kind, turns - 1) for kind in pair if turns > 1]
    left = layers - 2 * turns
    more = again > turns
    return (*found, *(Kind(more, n) for n in ((1, left - 1) if left > 1 else (left,)) if n))


def recompute(row: Row) -> tuple[Recompute, ...]:
    """What the blocks of the captured module keep."""
    found: list[Recompute] = []
    kinds = arrangement(row)
    for name, kind in zip(blocks(row.shape, row.habits, len(kinds)), kinds, strict=True):
        if kind.recomputed:
            core = row.habits.recompute == "attention"
            found.append(Recompute(f"{name}.{attention_core(row.shape)}" if core else name, "nothing"))
        if row.habits.cheap_again and not (kind.recomputed and row.habits.recompute == "full"):
            found.append(Recompute(name, "matmuls"))
    return tuple(found)


def repeats(row: Row) -> dict[str, int]:
    """How many layers each block of the captured module stands for, if more than itself."""
    kinds = arrangement(row)
    names = blocks(row.shape, row.habits, len(kinds))
    return {name: kind.count for name, kind in zip(names, kinds, strict=True) if kind.count > 1}


def depth(row: Row) -> Depth:
    """All layers of the model, each with the block of the captured module that stands for it."""
    kinds = arrangement(row)
    names = blocks(row.shape, row.habits, len(kinds))
    left = {name: kind.count for name, kind in zip(names, kinds, strict=True)}
    like: list[str] = []
    while any(left.values()):
        # kinds that stand for as many take turns
        name = next(name for name in names if left[name])
        alike = [n for n in names if left[n] == left[name]]
        like += alike
        for other in alike:
            left[other] -= 1
    return Depth(tuple(f"layer {i}" for i in range(len(like))), tuple(like))


def groups(row: Row) -> list[tuple[str, str]]:
    """Of layers that repeat, the first block of the captured module and the one that stands for all further ones."""
    found: dict[bool, list[str]] = {}
    left: list[tuple[str, str]] = []
    kinds = arrangement(row)
    for name, kind in zip(blocks(row.shape, row.habits, len(kinds)), kinds, strict=True):
        own = found.setdefault(kind.recomputed, [])
        own.append(name)
        if len(own) == 2:
            left.append((own[0], own[1]))
            found[kind.recomputed] = []
    return left + [(own[0], own[0]) for own in found.values() if own]


def cluster(machine: Machine) -> Cluster:
    """The catalogue's devices and links, with the network that the row tells of. Raises Unreadable."""
    found = device(machine.gpu)
    nodes = found.tiers[0]
    if machine.per_node != nodes.size and machine.count > machine.per_node:
        found = replace(found, tiers=(replace(nodes, size=machine.per_node), *found.tiers[1:]))
    name = f"{found.device.name}x{machine.count}"
    try:
        tiers = fill(found, machine.count, name)
    except MeshwrightError as fault:
        raise Unreadable(str(fault.diagnostic.message if hasattr(fault, "diagnostic") else fault)) from None
    rate = network(machine.interconnect, machine.per_node)
    if rate is not None:
        tiers = (tiers[0], *(replace(tier, bandwidth=rate) for tier in tiers[1:]))
    return Cluster(name, found.device, tiers)


def device(gpu: str) -> Entry:
    """The catalogue's entry for a device as sources name it; its memory is that of the name, if it tells another.

    Raises Unreadable if there is none.
    """
    text = gpu.lower()
    size = re.search(r"(\d+) ?gi?b\b", text)
    words_ = [w for w in re.split(r"[\s\-_/(),]+", re.sub(r"\btpu[\s-]*", "tpu-", text)) if w]
    if "tpu" in words_:
        words_.append("tpu-" + words_[words_.index("tpu") + 1])
    own = {base: [n for n in catalogue.names() if n == base or n.startswith(base + "-")] for base in words_}
    usual = {base: entry for base in words_ if (entry := catalogue.find(base)) is not None}
    base = next((w for w in reversed(words_) if own[w] or w in usual), None)
    if base is None:
        raise Unreadable(f"the catalogue has no device '{gpu}'")
    candidates = [catalogue.entry(n) for n in own[base]] or [usual[base]]
    if size is None:
        return usual.get(base, candidates[0])
    wanted = int(size[1]) << 30
    best = min(candidates, key=lambda e: abs(e.device.memory - wanted))
    if abs(best.device.memory / wanted - 1) > 0.05:
        return replace(best, device=replace(best.device, memory=int(wanted * 0.98)))
    return best


def network(text: str, per_node: int) -> float | None:
    """Bytes per second of one device into the network, if the words tell it."""
    words_ = text.lower()
    rate = r"(\d+(?:\.\d+)?) ?gb(?:ps|it/s|/s)"
    each = re.search(r"(\d+) ?x[^,;]*?" + rate, words_) or re.search(r"(\d+) ?x[^,;]*\(" + rate + " each", words_)
    if each:
        return int(each[1]) * float(each[2]) * 1e9 / 8 / per_node
    of_node = re.search(rate + r" ?(?:/|per) ?node", words_)
    if of_node:
        return float(of_node[1]) * 1e9 / 8 / per_node
    of_device = re.search(rate + r" ?(?:/|per) ?(?:gpu|device|chip)", words_)
    return float(of_device[1]) * 1e9 / 8 if of_device else None
