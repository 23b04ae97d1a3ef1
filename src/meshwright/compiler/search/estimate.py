"""Which candidate to price next: a rough guess of time and memory, corrected by what has been priced.

It decides nothing but the order. What is compared and reported is always the simulated program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.collectives import message_cost
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.plan import PIPE, Save
from meshwright.compiler.prediction import Prediction
from meshwright.compiler.search.bounds import least_bytes, peak
from meshwright.compiler.search.candidate import DATA, REPLICA, TENSOR, Candidate
from meshwright.compiler.search.facts import ProgramFacts
from meshwright.compiler.summary import MessageKind

_AGAIN: Mapping[Save, float] = {"all": 0.0, "matmuls": 0.05, "nothing": 0.3}
"""The share of a step's work that recomputation adds, before any has been priced."""
_STREAMS: Mapping[Save, float] = {"all": 17.0, "matmuls": 9.0, "nothing": 1.0}
"""Values of the size of a block's result that the block keeps for backward, before any has been priced."""
_SUMS: Mapping[Save, int] = {"all": 4, "matmuls": 4, "nothing": 6}
"""Sums over the tensor axis of a block in one microbatch, forward, backward and again."""
_HIDDEN = 0.8
"""The share of the computation that prefetched communication can hide behind."""
_WAITED = 0.3
"""Of the bubble of 1F1B, what the best schedule that fits leaves if ranks can have several stages; twice as much if
not."""


Features = tuple[object, ...]


@dataclass(frozen=True)
class Estimate:
    seconds: float
    memory: int
    parts: Mapping[str, float]
    """Seconds of ``compute`` and of communication over ``data`` and ``tensor``, hidden or not."""
    activations: float
    """Bytes that grow with the samples of a microbatch."""
    features: Features
    """By which candidates are alike."""


@dataclass
class Estimator:
    """Estimates, and learns from each prediction how far off they are."""

    facts: ProgramFacts
    cluster: Cluster
    _seen: list[tuple[Features, Mapping[str, float]]] = field(default_factory=list)
    """What has been priced, with predicted over estimated by part."""
    _known: dict[Candidate, Estimate] = field(default_factory=dict)

    def learn(self, candidate: Candidate, prediction: Prediction) -> None:
        """Take note of a prediction."""
        raw = self._raw(candidate)
        self._seen.append((raw.features, _observed(raw, prediction)))

    def __call__(self, candidate: Candidate) -> Estimate:
        """The corrected estimate."""
        raw, ratios = self._raw(candidate), self._ratios(candidate)
        parts = {name: seconds * ratios.get(name, 1.0) for name, seconds in raw.parts.items()}
        return Estimate(
            _together(candidate, parts, self.facts.depth),
            int(raw.memory + raw.activations * (ratios.get("memory", 1.0) - 1)),
            parts,
            raw.activations,
            raw.features,
        )

    def _ratios(self, candidate: Candidate) -> dict[str, float]:
        """Predicted over estimated, of the most similar candidates that have been priced."""
        own = self._raw(candidate).features
        near = sorted(((_distance(own, other), ratios) for other, ratios in self._seen), key=lambda pair: pair[0])
        found: dict[str, list[float]] = {}
        at: dict[str, int] = {}
        for distance, ratios in near:
            for name, ratio in ratios.items():
                if at.setdefault(name, distance) == distance:
                    found.setdefault(name, []).append(ratio)
        return {name: sum(ratios) / len(ratios) for name, ratios in found.items()}

    def _raw(self, candidate: Candidate) -> Estimate:
        if candidate not in self._known:
            self._known[candidate] = self._first(candidate)
        return self._known[candidate]

    def _first(self, candidate: Candidate) -> Estimate:
        """Before anything has been learned."""
        facts, tensor, pipe = self.facts, candidate.size(TENSOR), candidate.pipe
        rows = -(-facts.batch // candidate.microbatches // candidate.batch_ranks)
        treated = 1 / candidate.every
        device = self.cluster.device
        waste = rows * candidate.microbatches * candidate.batch_ranks / facts.batch
        again = 1 + _AGAIN[candidate.save] * treated
        rate = peak(device, facts.dtype) * device.efficiency.matmul
        compute = facts.flops * waste * again / candidate.ranks / rate
        launch = facts.kernels / pipe * candidate.microbatches * device.efficiency.launch * again
        parts = {
            "compute": max(compute, launch) + facts.model_state / tensor / pipe / candidate.cut / device.bandwidth,
            "data": self._data(candidate),
            "tensor": self._tensor(candidate, rows),
        }
        kept = _STREAMS[candidate.save] * treated + _STREAMS["all"] * (1 - treated)
        spread = tensor if candidate.sequence else 1 + (tensor - 1) * 0.6
        flying = min(pipe, candidate.microbatches)
        activations = rows * (facts.stream * facts.depth / pipe * flying * kept + 4 * facts.logits) / spread
        gathered = 0.0
        if candidate.storage == 3 and facts.depth:
            gathered = facts.compute_weights / tensor / facts.depth * (2 + candidate.prefetch)
        memory = least_bytes(candidate, facts) + gathered + activations
        wasted = 1 + device.efficiency.fragmentation
        flying_wasted = wasted + (device.efficiency.in_flight if pipe > 1 else 0.0)
        return Estimate(
            _together(candidate, parts, self.facts.depth),
            int((memory - activations) * wasted + activations * flying_wasted) + device.efficiency.reserve,
            parts,
            activations * flying_wasted,
            _features(candidate),
        )

    def _data(self, candidate: Candidate) -> float:
        """Seconds of gathers and gradient reductions on the links."""
        facts, tensor, all_of_them = self.facts, candidate.size(TENSOR), max(1, self.facts.depth)
        weights, gradients = facts.compute_weights // tensor // all_of_them, facts.gradients // tensor // all_of_them
        total, count = 0.0, all_of_them / candidate.pipe
        if candidate.storage == 3:
            total += 2 * candidate.microbatches * count * self._cost(candidate, "all-gather", (DATA,), weights)
        if candidate.storage in (1, 2):
            total += count * self._cost(candidate, "all-gather", (DATA,), facts.weights // tensor // all_of_them)
        times = candidate.microbatches if candidate.storage >= 2 else 1
        if candidate.storage:
            total += times * count * self._cost(candidate, "reduce-scatter", (DATA,), gradients)
        return total + count * self._cost(candidate, "all-reduce", (REPLICA,), gradients // candidate.cut)

    def _tensor(self, candidate: Candidate, rows: int) -> float:
        """Seconds of the sums inside blocks."""
        if candidate.size(TENSOR) == 1:
            return 0.0
        each = self._cost(candidate, "all-reduce", (TENSOR,), rows * self.facts.stream)
        return candidate.microbatches * max(1, self.facts.depth) / candidate.pipe * _SUMS[candidate.save] * each

    def _cost(self, candidate: Candidate, kind: MessageKind, axes: tuple[str, ...], payload: int) -> float:
        if candidate.size(*axes) == 1 or not payload:
            return 0.0
        return message_cost(self.cluster, Mesh(candidate.axes), axes, kind, payload).seconds


def _together(candidate: Candidate, parts: Mapping[str, float], depth: int) -> float:
    hidden = _HIDDEN * parts["compute"] if candidate.prefetch else 0.0
    waited = _WAITED if 2 * candidate.pipe <= depth else 2 * _WAITED
    bubble = waited * (candidate.pipe - 1) / candidate.microbatches
    within = (parts["compute"] + parts["tensor"]) * (1 + bubble)
    return within + max(parts["data"] - hidden, 0.02 * parts["data"])


def _observed(estimate: Estimate, prediction: Prediction) -> dict[str, float]:
    """Predicted over estimated, by part, where there is something to compare."""
    sent = {DATA: 0.0, TENSOR: 0.0}
    for axes, seconds in prediction.communication.items():
        if axes == PIPE:
            continue
        sent[TENSOR if TENSOR in axes else DATA] += seconds
    compute = sum(prediction.compute.values()) + sum(prediction.other.values()) - prediction.other.get("bubble", 0.0)
    pairs = {"compute": compute, "data": sent[DATA], "tensor": sent[TENSOR]}
    found = {n: value / estimate.parts[n] for n, value in pairs.items() if value > 0 and estimate.parts[n] > 0}
    if estimate.activations:
        base = estimate.memory - estimate.activations
        found["memory"] = max(0.01, (prediction.device_memory - base) / estimate.activations)
    return found


def _features(one: Candidate) -> Features:
    return one.save, one.axes, one.pipe > 1, one.size(TENSOR) > 1, one.storage, one.microbatches, one.every


def _distance(one: Features, other: Features) -> int:
    """How unlike two candidates are in what decides about the share of each part."""
    return sum(weight for weight, a, b in zip(_WEIGHTS, one, other, strict=True) if a != b)


_WEIGHTS = (8, 4, 4, 4, 2, 1, 1)
