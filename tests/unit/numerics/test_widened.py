"""After ``widen-reductions`` every sum is at the floor of one rounding, whatever the plan and the number of ranks."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.compiler.graph import collectives
from meshwright.compiler.numerics import findings
from meshwright.compiler.numerics.error_model import error_of_sum, one_rounding
from meshwright.compiler.plan import Numerics
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from tests.unit.numerics.known_sums import Average, compiled, measured, relative_error, samples

FLOOR = 1.2 * one_rounding("bf16")
"""One rounding, with the spread of a measurement."""
LARGE = 64 * 1024
"""Elements of which every of 8 ranks gets a part that is worth an all-to-all."""

PLANS = {
    "ddp=4": 4,
    "zero1=4": 4,
    "zero1=4,prefetch": 4,
    "zero2=8": 8,
    "fsdp=8": 8,
    "fsdp=8,prefetch": 8,
    "ddp=2,fsdp=2": 4,
    "ddp=2,fsdp=4": 8,
    "ddp=3": 3,
    "fsdp=6": 6,
    "ddp=4,fsdp=2,micro=4": 32,
    "ddp=4,micro=4,prefetch": 16,
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_safe_plan_rounds_once(plan: str) -> None:
    assert measured(plan, PLANS[plan], "safe") < FLOOR


def test_totals_that_two_ranks_send_in_half_precision_are_rounded_twice() -> None:
    """Once to be sent, as the plan wants it, and once as their sum: for any number of microbatches."""
    assert measured("ddp=2,micro=8", 16, "safe") < 1.5 * FLOOR
    assert measured("ddp=2,micro=32", 64, "safe") < 1.5 * FLOOR


@pytest.mark.parametrize("plan", ["ddp=8", "fsdp=8", "ddp=2,micro=16"])
def test_as_written_the_error_is_the_predicted_one(plan: str) -> None:
    count = {"ddp=8": 8, "fsdp=8": 8, "ddp=2,micro=16": 32}[plan]
    found = measured(plan, count, "as-written")
    chain = error_of_sum("bf16", 16 if "micro" in plan else 8)
    assert found > 1.5 * one_rounding("bf16")
    assert chain / 2 < found < 2 * chain


@pytest.mark.parametrize(("plan", "width"), [("ddp=64", LARGE), ("ddp=64", 64), ("fsdp=64", 4096)])
def test_64_ranks(plan: str, width: int) -> None:
    assert measured(plan, 64, "safe", width=width) < FLOOR


def test_64_ranks_as_written_are_as_predicted() -> None:
    for addends in ("random signs", "coherent"):
        found = measured("ddp=64", 64, "as-written", addends)
        predicted = error_of_sum("bf16", 64, addends)  # type: ignore[arg-type]  # one of the two
        assert predicted / 2 < found < 2 * predicted
        assert measured("ddp=64", 64, "safe", addends) < FLOOR


def test_within_a_node_addends_are_sent_and_small_or_far_ones_go_in_fp32() -> None:
    targets = {}
    for ranks, width in ((8, LARGE), (8, 64), (64, LARGE)):
        _, program = compiled(f"ddp={ranks}", width, ranks, "safe")
        targets[ranks, width] = {n.target for n in program.update_graphs[0].module.graph.nodes}
    assert {collectives.reduce_scatter_wide, collectives.all_gather} <= targets[8, LARGE]
    for small_or_far in ((8, 64), (64, LARGE)):
        assert collectives.all_reduce in targets[small_or_far]
        assert collectives.reduce_scatter_wide not in targets[small_or_far]


def test_sums_in_fp16_do_not_overflow_on_their_way() -> None:
    """Four addends of 40000 have a sum that is no fp16 number; in fp32 it is kept."""
    x = torch.full((4, 64 * 1024), 40000.0)
    policies: dict[Numerics, float] = {"as-written": 0.0, "safe": -160_000.0}
    for numerics, weight in policies.items():
        for plan in ("ddp=4", "fsdp=4"):
            model, program = compiled(plan, x.shape[1], 4, numerics, "fp16")
            cluster = VirtualCluster(program, from_module(model))
            result = cluster.step({"x": x})
            # as written it is infinite, and loss scaling leaves the step out
            assert math.isfinite(result.norm or 0.0) is (numerics == "safe")
            assert cluster.full_parameters()["w"].eq(weight).all()


@pytest.mark.parametrize("plan", ["fsdp=8", "zero2=8,prefetch"])
def test_an_average_is_divided_after_the_sum(plan: str) -> None:
    x = samples(8, 4096, "random signs", torch.bfloat16)
    errors = {}
    for numerics in ("as-written", "safe"):
        model, program = compiled(plan, 4096, 8, numerics, kind=Average)  # type: ignore[arg-type]  # a policy
        codes = {f.code for f in findings(program)}
        assert ("E0722" in codes) is (numerics == "as-written")
        cluster = VirtualCluster(program, from_module(model))
        cluster.step({"x": x})
        errors[numerics] = relative_error(-3 * cluster.full_parameters()["w"], x)
    assert errors["safe"] < 1e-6 < one_rounding("bf16") < errors["as-written"]


def test_findings_and_measurement_agree() -> None:
    """What a finding predicts is measured within a factor of 2."""
    _, program = compiled("ddp=8", 4096, 8, "as-written")
    (found,) = [f for f in findings(program) if f.code == "E0720"]
    error = measured("ddp=8", 8, "as-written")
    assert found.error / 2 < error < 2 * found.error
