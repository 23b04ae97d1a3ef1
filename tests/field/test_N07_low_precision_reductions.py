"""N07: gradient reduction in low precision gets worse with the number of ranks.

Reported: training that was stable on 96 devices was not on 384 until gradients were reduced in higher precision; users
ask for 16 bits on the wire and 32 bits in the sum; tests saw all-reduce and reduce-scatter differ from 4 ranks on; in
fp16 sums overflowed.
https://github.com/pytorch/pytorch/issues/106395
https://github.com/pytorch/pytorch/pull/125190
https://github.com/ByteDance-Seed/VeOmni/pull/1167
https://github.com/facebookresearch/fairscale/pull/565

A step whose gradient is the sum of its samples, ``1 + noise`` each, one on every rank.
"""

from __future__ import annotations

import pytest

from meshwright.compiler.graph import collectives
from meshwright.compiler.numerics import findings
from meshwright.compiler.numerics.error_model import error_of_sum, one_rounding
from tests.unit.numerics.known_sums import compiled, measured

RANKS = (4, 8, 32, 128)


def test_the_error_as_written_grows_with_the_ranks_as_predicted() -> None:
    found = [measured(f"ddp={n}", n, "as-written", "coherent", width=256) for n in RANKS]
    predicted = [error_of_sum("bf16", n, "coherent") for n in RANKS]
    assert found == sorted(found) and found[-1] > 8 * found[0]
    for error, expected in zip(found, predicted, strict=True):
        assert expected / 2 < error < 2 * expected


@pytest.mark.parametrize("plan", ["ddp", "zero1", "fsdp"])
def test_with_sums_in_fp32_it_does_not(plan: str) -> None:
    for ranks in RANKS:
        assert measured(f"{plan}={ranks}", ranks, "safe", "coherent", width=256) < 1.2 * one_rounding("bf16")


def test_all_reduce_and_reduce_scatter_agree() -> None:
    """Where they differed as written, every order gives the one sum that is rounded once."""
    errors = [measured(f"{plan}=8", 8, "safe", width=8 * 4096) for plan in ("ddp", "zero2", "fsdp")]
    assert max(errors) < 1.2 * one_rounding("bf16")


@pytest.mark.parametrize("plan", ["zero2=8", "fsdp=8,prefetch"])
def test_16_bits_travel(plan: str) -> None:
    """What is sent keeps its dtype: as many bytes as before."""
    sent = {}
    for policy in ("as-written", "safe"):
        _, program = compiled(plan, 8 * 4096, 8, policy)  # type: ignore[arg-type]  # a policy
        nodes = [n for g in program.graphs for n in g.module.graph.nodes if _adds_gradients(n.target)]
        values = [i.meta["val"] for n in nodes for i in n.all_input_nodes]
        sent[policy] = sum(v.numel() * v.element_size() for v in values)
    assert sent["safe"] == sent["as-written"] == 2 * 8 * 4096


def _adds_gradients(target: object) -> bool:
    return getattr(target, "__name__", "").startswith("reduce_scatter") and callable(
        getattr(collectives, getattr(target, "__name__", ""), None)
    )


def test_one_is_warned_where_it_matters() -> None:
    """Of few ranks the checker tells; of many, compiling does."""
    told = {}
    for ranks in (4, 64):
        _, program = compiled(f"ddp={ranks}", 64, ranks, "as-written")
        (found,) = findings(program)
        told[ranks] = found.code, found.grave
    assert told == {4: ("E0720", False), 64: ("E0720", True)}
    with pytest.warns(UserWarning, match="W0720"):
        compiled("ddp=64", 64, 64, "warn")
