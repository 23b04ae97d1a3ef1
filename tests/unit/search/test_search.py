"""The search on textbook prices: what it chooses, that it never loses the best, and that it asks little."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.compiler.cluster.cluster import Cluster, Tier
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.prediction import Prediction
from meshwright.compiler.search.bounds import least_bytes, least_seconds
from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.search.candidates import candidates, microbatch_counts
from meshwright.compiler.search.explain import reasons
from meshwright.compiler.search.facts import ProgramFacts
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.search.refine import _offloaded
from meshwright.compiler.search.search import rank, search
from meshwright.compiler.search.state import Search, choose
from tests.unit.search.doubles import Textbook, cluster, priced, transformer


def gpt_1b(batch: int) -> ProgramFacts:
    return transformer(1.2, 16, 2048, 32, batch=batch)


def llama_8b(batch: int) -> ProgramFacts:
    return transformer(8, 32, 4096, 32, groups=8, inner=14336, batch=batch)


def llama_70b(batch: int) -> ProgramFacts:
    return transformer(70, 80, 8192, 64, groups=8, inner=28672, batch=batch)


def llama_405b(batch: int) -> ProgramFacts:
    return transformer(405, 126, 16384, 128, groups=8, inner=53248, batch=batch)


def found(facts: ProgramFacts, name: str | Cluster, *pins: str, reserve: int = 0, budget: int = 24) -> Search:
    on = cluster(name) if isinstance(name, str) else name
    return search(facts, on, on.ranks, Limits(reserve, parse_pins(pins), budget), Textbook(facts, on))


def best(facts: ProgramFacts, name: str | Cluster, *pins: str) -> Candidate:
    one = found(facts, name, *pins).best
    assert one is not None
    return one.candidate


def test_a_small_model_is_replicated() -> None:
    assert best(gpt_1b(16), "a100x4").text == "ddp=4,prefetch"
    assert best(gpt_1b(32), "h100x8").text == "ddp=8,prefetch"


def test_what_does_not_fit_whole_is_fully_sharded_without_tensor_parallelism() -> None:
    one = best(llama_8b(512), "h100x64")
    assert one.storage == 3 and one.size("tensor") == 1 and one.save == "all"


def test_a_batch_smaller_than_the_ranks_forces_tensor_parallelism() -> None:
    one = best(llama_70b(32), "h100x64")
    assert one.size("tensor") == 2 and one.storage == 3 and one.batch_ranks == 32


def test_tensor_parallelism_stays_inside_the_node() -> None:
    for facts, name in ((llama_70b(32), "h100x64"), (llama_405b(1024), "h100x512")):
        one = best(facts, name)
        assert one.axes[-1][0] == "tensor" and one.size("tensor") <= 8


def test_between_slow_nodes_shards_stay_inside_and_copies_are_across() -> None:
    """Two nodes of eight: 400 GB/s inside, 1 GB/s between them."""
    device = cluster("h100x8").device
    slow = Cluster("slow", device, (Tier("inside", 8, 400e9, 2e-6), Tier("between", 2, 1e9, 2e-5)))
    one = best(llama_8b(512), slow)
    assert one.storage == 3 and one.axes[0] == ("replica", 2) and one.size("data") * one.size("tensor") == 8
    result = found(llama_8b(512), slow)
    assert result.best is not None
    all_over = priced(replace(one, axes=(("data", 16),)), llama_8b(512), slow)
    assert all_over.seconds > 1.2 * result.best.seconds


def test_recomputation_is_the_least_that_fits() -> None:
    # one sample per rank, so that only recomputation saves activations
    result = found(llama_70b(64), "h100x64", "no tp")
    assert result.best is not None
    one = result.best.candidate
    assert one.save == "matmuls"
    tried = [p for p in result.priced if replace(p.candidate, every=1) == replace(one, every=1)]
    assert not any(result.fits(p) and p.candidate.every > one.every for p in tried)
    assert any(not result.fits(p) and p.candidate.every == one.every + 1 for p in tried) or one.every == 1


def test_every_kth_block_is_found_by_bisection() -> None:
    facts = llama_70b(64)
    result = found(facts, "h100x64", "fsdp=64", "recompute")
    assert result.best is not None
    one = result.best.candidate
    assert 1 < one.every < 80
    more = priced(replace(one, every=one.every + 1), facts, result.cluster)
    assert result.best.memory <= result.capacity
    tried = [p for p in result.priced if p.candidate.every > one.every]
    assert more.device_memory > result.capacity or any(not result.fits(p) for p in tried)


def test_offload_comes_last() -> None:
    one = best(llama_70b(64), "h100x8")
    assert one.offload
    assert not any(p.candidate.offload for p in found(llama_8b(64), "h100x8").priced)


def test_nothing_fits() -> None:
    result = found(llama_405b(64), "h100x8")
    assert result.best is None and result.too_large == result.considered


def test_the_budget_is_kept() -> None:
    facts, on = llama_8b(512), cluster("h100x64")
    book = Textbook(facts, on)
    search(facts, on, 64, Limits(budget=6), book)
    assert len({one.inner for one in book.asked}) <= 6, "schedules of one pipeline take no further program"
    assert len(set(book.asked)) == len(book.asked), "nothing is priced twice"


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (gpt_1b(16), "a100x4"), (gpt_1b(32), "a100-40x16"), (llama_8b(32), "h100x8"), (llama_8b(64), "h100x16"),
        (llama_8b(16), "a100-40x16"), (llama_70b(32), "h100x64"), (llama_70b(64), "h100x64"),
        (llama_70b(256), "a100x128"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.parameters / 1e9:g}B-{value.batch}",
)  # fmt: skip
def test_against_pricing_everything(facts: ProgramFacts, name: str) -> None:
    on = cluster(name)
    everything = [
        (one, priced(one, facts, on)) for one in candidates(facts, on, on.ranks) if one.batch_ranks <= facts.batch
    ]
    fitting = [(one, p) for one, p in everything if p.device_memory <= on.device.memory]
    fastest = min(p.seconds for _, p in fitting)
    result = found(facts, on)
    assert result.best is not None
    assert result.best.seconds <= 1.06 * fastest, (
        result.best.candidate.text,
        min(fitting, key=lambda x: x[1].seconds)[0],
    )


@pytest.mark.parametrize("name", ["h100x8", "a100-40x16", "h100x64"])
def test_bounds_are_bounds(name: str) -> None:
    facts, on = llama_8b(64), cluster(name)
    for last_resort in (False, True):
        for one in candidates(facts, on, on.ranks, last_resort=last_resort):
            exact = priced(one, facts, on)
            assert least_bytes(one, facts) <= exact.device_memory * 1.001 or one.storage == 1
            assert least_seconds(one, facts, on.device) <= exact.seconds


def test_the_simplest_of_equals_is_chosen() -> None:
    facts, on = gpt_1b(16), cluster("a100x4")
    prices = Textbook(facts, on)
    plain, full = Candidate((("replica", 4),), prefetch=1), Candidate((("data", 4),), 3, prefetch=1)
    found = Search(facts, on, on.ranks, Limits(within=0.03), prices)
    found.priced = rank([full, plain], prices, on.device.memory)
    chosen = choose(found)
    assert chosen is not None and chosen.candidate == plain
    found.limits = Limits(within=0.0)
    assert choose(found) is found.fitting()[0]
    tight = Limits(int(on.device.memory - 1.01 * chosen.memory), within=0.03)
    found.limits = tight
    assert found.fits(chosen) and choose(found) is not chosen, "a plan that leaves nothing is not simple"


def test_plans_that_do_not_fit_rank_last_by_memory() -> None:
    facts, on = llama_8b(64), cluster("h100x8")
    plain = Candidate((("replica", 8),), prefetch=1)
    level_1 = Candidate((("data", 8),), 1, prefetch=1)
    full = Candidate((("data", 8),), 3, microbatches=8, prefetch=1)
    assert [p.candidate for p in rank([plain, level_1, full], Textbook(facts, on), on.device.memory)] == [
        full, level_1, plain,
    ]  # fmt: skip


def test_pins_hold() -> None:
    for pin, test in {
        "tp=4": lambda c: c.size("tensor") == 4,
        "fsdp=8": lambda c: c.size("data") == 8 and c.storage == 3,
        "ddp": lambda c: c.storage == 0,
        "zero2": lambda c: c.storage == 2,
        "micro=8": lambda c: c.microbatches == 8,
        "selective": lambda c: c.save == "matmuls",
        "recompute=full/2": lambda c: c.save == "nothing" and c.every == 2,
        "no prefetch": lambda c: c.prefetch == 0,
        "offload": lambda c: c.offload,
        "tp=2,no sp": lambda c: c.size("tensor") == 2 and not c.sequence,
        "ddp=2,fsdp=32": lambda c: c.size("replica") == 2 and c.size("data") == 32,
        "tp=2,whole=vocabulary": lambda c: c.whole == ("vocabulary",),
    }.items():
        assert test(best(gpt_1b(256), "h100x64", pin)), pin


def test_a_reserve_is_kept_free() -> None:
    facts = llama_8b(512)
    free = found(facts, "h100x64", reserve=40 << 30)
    assert free.best is not None
    assert free.best.memory <= free.cluster.device.memory - (40 << 30)


def test_a_refused_candidate_is_left_out() -> None:
    facts, on = gpt_1b(16), cluster("a100x4")

    class Refusing(Textbook):
        def price(self, candidate: Candidate, cluster: Cluster | None = None) -> Prediction:
            if candidate.storage == 0:
                raise MeshwrightError()
            return super().price(candidate, cluster)

    result = search(facts, on, 4, Limits(), Refusing(facts, on))
    assert result.best is not None and result.best.candidate.storage > 0
    assert result.refused


def test_a_file_of_slow_links_changes_the_choice(tmp_path: object) -> None:
    text = """
name = "ethernet"
device = "a100-80"
[[tier]]
name = "node"
size = 4
bandwidth = "300 GB/s"
latency = "3 us"
[[tier]]
name = "ethernet"
size = 4
bandwidth = "1 GB/s"
latency = "30 us"
"""
    one = best(llama_8b(256), read_cluster(text))
    assert one.size("tensor") <= 4 and (one.size("replica") == 4 or one.axes[0][0] != "tensor")


def test_the_published_sizes_of_the_model_state() -> None:
    """7.5 billion parameters in mixed precision on 64 devices (ZeRO, Rajbhandari et al. 2020): 16-bit weights and
    gradients, twelve bytes of optimizer state."""
    n = 7_500_000_000
    facts = replace(transformer(7.5, 36, 4096, 32, batch=64), weights=2 * n, gradients=2 * n, state=12 * n)
    plain = Candidate((("replica", 64),))
    sizes = [least_bytes(plain, facts), *(least_bytes(Candidate((("data", 64),), z), facts) for z in (1, 2, 3))]
    assert [round(size / 1e9, 1) for size in sizes] == [120.0, 31.4, 16.6, 1.9]


def test_where_the_batch_fills_no_number_of_ranks_evenly_all_microbatches_are_tried() -> None:
    assert microbatch_counts(32, 7) == [1, 2, 4] and microbatch_counts(32, 8) == [1, 2, 4]
    facts, on = gpt_1b(32), cluster("a100x4")
    found = search(replace(facts, batch=33), on, 4, Limits(), Textbook(facts, on))
    assert found.best is not None and found.best.candidate.microbatches == 1
    assert any("33 samples do not fill 4 data ranks evenly: 9.1 % of the work is padding" in r for r in reasons(found))


def test_a_pin_without_a_number_asks_for_some() -> None:
    pins = parse_pins(["ddp"])
    assert not pins.allow(Candidate((("tensor", 8),))) and pins.allow(Candidate((("replica", 8),)))


def test_the_optimizer_state_goes_to_the_host_rather_than_everything_be_recomputed() -> None:
    facts, on = llama_8b(64), cluster("h100x8")
    free = Textbook(facts, on)
    found = search(facts, on, on.ranks, Limits(), free)
    assert found.best is not None
    candidate = replace(found.best.candidate, save="nothing", every=1, offload=False)
    found.priced, found._done = [], {}
    one = found.price(candidate)
    assert one is not None
    _offloaded(found, one)
    tried = [p.candidate for p in found.priced if p.candidate.offload]
    assert tried and tried[0].save == "matmuls" and tried[0].axes == candidate.axes
