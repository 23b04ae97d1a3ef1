"""A stand-in for compiling and simulating: a dense transformer by the textbook's formulas, deliberately not those by
which the search guesses."""

from __future__ import annotations

from collections import Counter

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.collectives import message_cost
from meshwright.compiler.cluster.presets import preset
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.prediction import Flow, Memory, Moment, Prediction
from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.search.facts import ProgramFacts

AGAIN = {"all": 0.0, "matmuls": 0.04, "nothing": 1 / 3}
KEPT = {"all": 34.0, "matmuls": 16.0, "nothing": 2.0}
LEFT = {"zb-h1": 0.5, "zb-v": 0.3, "zb-h2": 0.2}
"""Of 1F1B's bubble."""
HELD = {"interleaved": 1.3, "interleaved-zb": 1.6, "zb-h1": 1.4, "zb-h2": 2.0}
"""Times what 1F1B's first rank holds."""


def transformer(
    billions: float,
    layers: int,
    width: int,
    heads: int,
    *,
    batch: int,
    time: int = 4096,
    groups: int = 0,
    inner: int = 0,
) -> ProgramFacts:
    """Facts of a decoder in mixed precision: bf16 computation, fp32 weights and AdamW's two moments."""
    n = int(billions * 1e9)
    return ProgramFacts(
        batch=batch, tokens=batch * time, parameters=n, weights=4 * n, gradients=4 * n, state=8 * n,
        compute_weights=2 * n, flops=6.0 * n * batch * time, dtype="bf16", blocks={"layers.*": layers},
        stream=2 * time * width, logits=2 * time * 32000, kernels=60 * layers, heads=heads,
        key_value_heads=groups or heads, cuts={"heads": heads, "inner": inner or 4 * width, "vocabulary": 32000},
    )  # fmt: skip


def cluster(name: str) -> Cluster:
    found = preset(name)
    assert found is not None
    return found


class Textbook:
    """Prices, and counts how often it was asked."""

    def __init__(self, facts: ProgramFacts, on: Cluster) -> None:
        self.facts, self.cluster = facts, on
        self.asked: list[Candidate] = []

    def price(self, candidate: Candidate, cluster: Cluster | None = None) -> Prediction:
        if cluster is None:
            self.asked.append(candidate)
        return priced(candidate, self.facts, cluster or self.cluster)


def priced(one: Candidate, facts: ProgramFacts, on: Cluster) -> Prediction:
    device, mesh, t, pipe = on.device, Mesh(one.axes), one.size("tensor"), one.pipe
    share = 1 / one.every
    samples = -(-facts.batch // one.microbatches // one.batch_ranks)
    compute = facts.flops / one.ranks / (0.45 * device.flops[facts.dtype])
    again = compute * AGAIN[one.save] * share
    small = one.microbatches * facts.kernels / pipe * 1e-6
    count = facts.depth
    waits = LEFT.get(one.schedule, 1.0) * (pipe - 1) / one.microbatches / one.virtual
    flying = min(pipe, one.microbatches) * HELD.get(one.schedule, 1.0)
    sent: Counter[str] = Counter()

    def add(kind: str, axis: str, payload: float, times: float) -> None:
        if one.size(axis) > 1:
            sent[axis] += times / pipe * message_cost(on, mesh, (axis,), kind, int(payload)).seconds  # type: ignore[arg-type]

    layer, gradient = facts.compute_weights / t / count, facts.gradients / t / count
    if one.storage == 3:
        add("all-gather", "data", layer, 2 * count * one.microbatches)
    if one.storage in (1, 2):
        add("all-gather", "data", 2 * layer, count)
    if one.storage:
        add("reduce-scatter", "data", gradient, count * (one.microbatches if one.storage > 1 else 1))
    add("all-reduce", "replica", gradient / one.cut, count)
    add("all-reduce", "tensor", samples * facts.stream, 4 * count * one.microbatches)
    hidden = 0.9 * compute if one.prefetch else 0.0
    exposed = {axis: s if axis == "tensor" else max(0.03 * s, s - hidden) for axis, s in sent.items()}
    transfer = 2 * facts.state / t / pipe / one.cut / device.host_link if one.offload else 0.0
    kept = KEPT[one.save] * share + KEPT["all"] * (1 - share)
    kinds = {
        "parameters": facts.weights // t // pipe // (one.cut if one.storage == 3 else 1),
        "gradients": facts.gradients // t // pipe // (one.cut if one.storage >= 2 else 1),
        "optimizer state": 0 if one.offload else facts.state // t // pipe // one.cut,
        "activations": int(
            samples
            * (facts.stream * count / pipe * flying * kept / 2 + 6 * facts.logits)
            / (t if one.sequence else t**0.7)
        ),
        "gathered parameters": int(2 * layer) if one.storage == 3 else 0,
    }
    total = sum(kinds.values())
    busy = compute + again + small + sum(exposed.values()) + transfer
    bubble = waits * (compute + again)
    seconds = busy + bubble
    return Prediction(
        seconds=seconds,
        compute={"matmul": compute, "recomputed": again},
        exposed=exposed,
        communication=dict(sent),
        other={"launch": small, "transfer": transfer, "bubble": bubble},
        memory=Memory(total, Moment("micro", "loss", "backward", "layers.1"), kinds, kinds, {"micro": total}),
        device_memory=total + device.efficiency.reserve,
        fits=total + device.efficiency.reserve <= device.memory,
        mfu=facts.flops / seconds / one.ranks / device.flops[facts.dtype],
        tokens_per_second=facts.tokens / seconds,
        flow=Flow(one.schedule, (), bubble / seconds, tuple(range(pipe, 0, -1))) if pipe > 1 else None,
    )
