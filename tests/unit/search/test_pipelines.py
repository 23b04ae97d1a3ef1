"""The pipe axis of the search: which pipelines there are, when one is chosen, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.compiler.cluster.cluster import Cluster, Tier
from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.search.candidates import candidates, schedules
from meshwright.compiler.search.explain import reasons
from meshwright.compiler.search.facts import ProgramFacts
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.search.pins import Pins
from meshwright.compiler.search.search import search
from meshwright.compiler.search.state import Search
from meshwright.compiler.search.why_not import why_not
from tests.unit.search.doubles import Textbook, cluster, transformer


def llama_70b(batch: int) -> ProgramFacts:
    return transformer(70, 80, 8192, 64, groups=8, inner=28672, batch=batch)


def found(facts: ProgramFacts, on: Cluster, *pins: str, budget: int = 24) -> Search:
    return search(facts, on, on.ranks, Limits(0, parse_pins(pins), budget), Textbook(facts, on))


def slow_between(nodes: int) -> Cluster:
    """Nodes of eight H100 with a network of 2 GB/s for each device."""
    device = cluster("h100x8").device
    return Cluster("slow", device, (Tier("inside", 8, 400e9, 2e-6), Tier("between", nodes, 2e9, 2e-5)))


def pipelines(facts: ProgramFacts, name: str, *pins: str) -> list[Candidate]:
    on = cluster(name)
    return [c for c in candidates(facts, on, on.ranks, parse_pins(pins)) if c.pipe > 1]


def test_a_pipeline_is_outermost_and_is_filled() -> None:
    legal = pipelines(llama_70b(256), "h100x64")
    assert legal
    for one in legal:
        assert one.axes[0][0] == "pipe" and one.pipe <= 80 and one.ranks == 64
        assert one.microbatches >= one.pipe and one.schedule == "1f1b"
        assert one.storage <= 1


def test_there_is_none_without_blocks() -> None:
    flat = replace(llama_70b(256), blocks={})
    assert not pipelines(flat, "h100x64")
    assert not [one for one in pipelines(replace(llama_70b(256), blocks={"layers.*": 4}), "h100x64") if one.pipe > 4]


def test_what_is_pinned_is_kept() -> None:
    facts = llama_70b(256)
    assert {one.pipe for one in pipelines(facts, "h100x64", "pp=4")} == {4}
    assert {one.schedule for one in pipelines(facts, "h100x64", "schedule=zb-v")} == {"zb-v"}
    assert {one.virtual for one in pipelines(facts, "h100x64", "virtual=5")} == {5}
    assert not pipelines(facts, "h100x64", "no pp")
    assert {one.storage for one in pipelines(facts, "h100x64", "pp=4", "fsdp")} == {3}


def test_other_schedules_of_a_pipeline() -> None:
    one = pipelines(llama_70b(256), "h100x64", "pp=8")[0]
    others = list(schedules(one, llama_70b(256), Pins()))
    names = {other.schedule for other in others}
    assert {"zb-h1", "zb-v", "interleaved"} <= names and not names & {"dualpipe", "list"}
    assert all(other.virtual * 8 <= 80 for other in others)
    assert all(other.inner == one.inner for other in others), "all of them are read off one program"
    pinned = list(schedules(one, llama_70b(256), parse_pins(["schedule=interleaved"])))
    assert {other.schedule for other in pinned} == {"interleaved"} and {o.virtual for o in pinned} >= {2, 4}


def test_the_words_of_a_pipeline_are_read_back() -> None:
    one = found(llama_70b(256), cluster("h100x64"), "pp=8,schedule=zb-v,tp=2").best
    assert one is not None
    text = one.candidate.text
    assert text.startswith("pp=8,") and "schedule=zb-v,virtual=2" in text
    words = ",".join(w for w in text.split(",") if not w.startswith("zero"))
    pins = parse_pins([words])
    assert (pins.pipe, pins.schedule, pins.virtual, pins.tensor) == (8, "zb-v", 2, 2)


def test_no_pipeline_where_links_are_fast() -> None:
    for facts in (transformer(1.2, 16, 2048, 32, batch=32), transformer(8, 32, 4096, 32, groups=8, batch=512)):
        result = found(facts, cluster("h100x64"))
        assert result.best is not None and result.best.candidate.pipe == 1


def test_a_pipeline_where_links_between_nodes_are_slow() -> None:
    """What full sharding sends across nodes for every step takes longer than the pipeline waits."""
    facts, on = llama_70b(128), slow_between(8)
    result = found(facts, on)
    assert result.best is not None
    one = result.best.candidate
    assert one.pipe > 1 and one.axes[0][0] == "pipe"
    without = found(facts, on, "no pp").best
    assert without is not None and result.best.seconds < without.seconds
    text = "\n".join(reasons(result))
    assert "Pipelining over " in text and "bubble" in text and "times as fast as the best without" in text
    assert "(over inside and between)" in text


def test_schedules_of_one_program_cost_no_budget() -> None:
    result = found(llama_70b(256), cluster("h100x64"), "pp=8", budget=6)
    assert len({p.candidate.inner for p in result.priced}) <= 6
    assert len(result.priced) > len({p.candidate.inner for p in result.priced})


def test_some_pipeline() -> None:
    best = found(llama_70b(256), cluster("h100x64"), "pp").best
    assert best is not None and best.candidate.pipe > 1


def test_why_not_a_pipeline() -> None:
    result = found(llama_70b(256), cluster("h100x64"))
    told = why_not(result, parse_pins(["pp=8"]))
    assert told.plan is not None and told.plan.candidate.pipe == 8
    assert told.differences is not None and told.differences.by_cause["bubble"] > 0
    assert "a pipeline over 8 ranks" in told.sentences[0]


@pytest.mark.parametrize(
    ("pins", "code", "what", "action"),
    [
        ("pp=3", "E0433", "64 ranks cannot be divided by pp=3", "use pp=2"),
        ("pp=64,virtual=2", "E0502", "needs 128 stages, and there are only 80 blocks", "use pp=32"),
        ("schedule=zb-v,virtual=3", "E0502", "has 2 stages on each rank, not 3", "leave 'virtual' out"),
        ("schedule=zbv", "E0431", "names no pipeline schedule", "zb-v"),
        ("pp=2,no pp", "E0432", "contradict", "keep one"),
        ("schedule=gpipe,no pp", "E0432", "contradict", "keep one"),
    ],
)
def test_pins_that_no_pipeline_keeps(pins: str, code: str, what: str, action: str) -> None:
    with pytest.raises(MeshwrightError) as fault:
        found(llama_70b(256), cluster("h100x64"), pins)
    told = fault.value.diagnostics[0]
    assert told.code == code and what in told.message and action in told.action


def test_a_program_without_blocks_has_no_stages() -> None:
    flat = replace(llama_70b(256), blocks={})
    with pytest.raises(MeshwrightError, match="no repeated blocks to make stages of"):
        found(flat, cluster("h100x64"), "pp=2")
