"""Where the time and the memory of two predictions differ, by cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.compiler.prediction import Prediction


@dataclass(frozen=True)
class Differences:
    """What the second has more than the first. Of seconds the causes add up to the difference of the steps."""

    seconds: float
    by_cause: Mapping[str, float]
    """``compute``, ``recomputed``, ``launch``, ``transfer``, ``exposed over data``, ..."""
    memory: int
    by_kind: Mapping[str, int]
    """Of the memory at the peak."""


def causes(prediction: Prediction) -> dict[str, float]:
    """The seconds of a step by cause; what no cause explains is ``rest``."""
    found = {"compute": sum(s for kind, s in prediction.compute.items() if kind != "recomputed")}
    found["recomputed"] = prediction.compute.get("recomputed", 0.0)
    found.update(prediction.other)
    found.update({f"exposed over {axes}": s for axes, s in prediction.exposed.items()})
    found["rest"] = prediction.seconds - sum(found.values())
    if abs(found["rest"]) < 1e-3 * prediction.seconds:
        del found["rest"]
    return {cause: seconds for cause, seconds in found.items() if seconds}


def differences(first: Prediction, second: Prediction) -> Differences:
    """The differences, the largest first."""
    before, after = causes(first), causes(second)
    by_cause = {c: after.get(c, 0.0) - before.get(c, 0.0) for c in dict.fromkeys([*before, *after])}
    kinds = dict.fromkeys([*first.memory.by_kind, *second.memory.by_kind])
    by_kind = {k: second.memory.by_kind.get(k, 0) - first.memory.by_kind.get(k, 0) for k in kinds}
    return Differences(
        second.seconds - first.seconds,
        dict(sorted(by_cause.items(), key=lambda item: -abs(item[1]))),
        second.device_memory - first.device_memory,
        dict(sorted(((k, v) for k, v in by_kind.items() if v), key=lambda item: -abs(item[1]))),
    )
