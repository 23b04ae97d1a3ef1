"""P01: which of TP, DP, SP, FSDP, and how many? The planner's answers for models of real shapes, from real programs.

A 1B model that fits is replicated, not sharded four times slower; nothing is cut over tensor ranks without need; what
forces an axis is said with numbers.
"""

from __future__ import annotations

import pytest

from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.search.explain import reasons, runner_up
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.search.state import Search
from meshwright.compiler.search.why_not import why_not
from tests.field.deep import planned


def best(found: Search) -> Candidate:
    assert found.best is not None
    return found.best.candidate


def test_a_1b_model_on_four_gpus_is_replicated() -> None:
    found = planned("1B", 16, "a100x4")
    assert best(found).size("replica") == 4 and best(found).storage == 0
    assert best(found).save == "all" and not best(found).offload
    told = why_not(found, parse_pins(["tp=4"]))
    assert told.plan is not None and told.differences is not None
    assert told.differences.seconds > 0
    assert told.differences.by_cause["exposed over tensor"] > 0


@pytest.mark.slow
def test_a_1b_model_on_one_node_needs_no_tensor_parallelism() -> None:
    found = planned("1B", 64, "h100x8")
    assert best(found).size("tensor") == 1
    tensor = [p for p in found.fitting() if p.candidate.size("tensor") > 1]
    assert tensor, "tensor parallelism was priced, and lost"
    assert found.best is not None and tensor[0].seconds > found.best.seconds


def test_70b_under_a_small_batch_is_not_full_sharding_alone() -> None:
    found = planned("70B", 32, "h100x64")
    one = best(found)
    assert one.storage == 3 and one.size("tensor") >= 2
    assert one.axes[-1][0] == "tensor" and one.size("tensor") <= 8, "tensor parallelism stays on the node's links"
    chain = "\n".join(reasons(found))
    assert "Plain data parallelism fails" in chain
    assert "ruled out by the batch: 32 samples for 64 data ranks" in chain
    assert "Tensor parallelism over 2 (over nvlink): fits" in chain
    second = runner_up(found)
    assert second is None or second.candidate != one


@pytest.mark.slow
def test_70b_with_samples_enough_is_full_sharding_alone() -> None:
    found = planned("70B", 64, "h200x64")  # a sample and its layers' results need 3 GiB more than an H100 has
    assert best(found).size("tensor") == 1 and best(found).storage == 3
    assert any("they hide" in sentence for sentence in reasons(found))
