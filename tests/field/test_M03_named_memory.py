"""M03: the estimate says it fits, the run fails. Every term of the predicted peak has a name, and each level of
sharding divides the terms that it should, and no others."""

from __future__ import annotations

import pytest

from meshwright.compiler.cluster.presets import preset
from meshwright.compiler.passes.facts import program_facts
from meshwright.compiler.prediction import Execution, Prediction
from meshwright.compiler.search.bounds import least_memory
from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.summary import KINDS
from meshwright.pricing import Pricer
from tests.field.deep import MIXED, deep

RANKS = 8


def predicted(storage: int, **changes: object) -> Prediction:
    cluster = preset("h100x8")
    assert cluster is not None
    axes = (("data", RANKS),) if storage else (("replica", RANKS),)
    one = Candidate(axes, storage, microbatches=2, **changes)  # type: ignore[arg-type]  # fields of Candidate
    return Pricer(deep("1B", 16, 1024), MIXED, cluster, Execution()).price(one)


@pytest.mark.parametrize("storage", [0, 1, 2, 3])
def test_the_peak_is_the_sum_of_named_terms(storage: int) -> None:
    found = predicted(storage)
    assert set(found.memory.by_kind) <= set(KINDS)
    assert sum(found.memory.by_kind.values()) == found.memory.peak
    assert found.memory.at.item and found.memory.at.graph == "micro"
    assert found.device_memory > found.memory.peak, "what driver, libraries and allocator take is a term of its own"


def test_each_level_divides_its_terms() -> None:
    facts = program_facts(deep("1B", 16, 1024), MIXED)
    for storage in (0, 1, 2, 3):
        axes = (("data", RANKS),) if storage else (("replica", RANKS),)
        least = least_memory(Candidate(axes, storage, microbatches=2), facts)
        found = predicted(storage).memory.by_kind
        for kind in ("parameters", "optimizer state"):
            assert least[kind] <= found[kind] <= 1.01 * least[kind], (storage, kind)


def test_gathered_copies_are_counted_with_those_that_are_prefetched() -> None:
    now, ahead = predicted(3), predicted(3, prefetch=1)
    gathered = [p.memory.most["gathered parameters"] for p in (now, ahead)]
    facts = program_facts(deep("1B", 16, 1024), MIXED)
    assert gathered[1] > gathered[0] > 0
    assert gathered[1] < facts.compute_weights, "never the whole model"


def test_offload_takes_the_state_off_the_device() -> None:
    kept, gone = predicted(3), predicted(3, offload=True)
    assert gone.memory.by_kind.get("optimizer state", 0) < 0.2 * kept.memory.by_kind["optimizer state"]
    assert gone.other["transfer"] > 0


def test_recomputation_lowers_activations_alone() -> None:
    kept, selective, full = (predicted(3, save=save).memory.most for save in ("all", "matmuls", "nothing"))
    assert kept["activations"] > selective["activations"] > full["activations"]
    assert kept["parameters"] == full["parameters"]
