"""The reasons: their numbers are those of the candidates that were priced."""

from __future__ import annotations

from meshwright.compiler.search.differences import causes, differences
from meshwright.compiler.search.explain import reasons, runner_up
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.search.search import search
from meshwright.compiler.search.sensitivity import sensitivity
from meshwright.compiler.search.state import Search
from meshwright.compiler.search.telling import count, described, memory, percent, seconds
from meshwright.compiler.search.why_not import why_not
from tests.unit.search.doubles import Textbook, cluster, transformer


def found(batch: int, name: str = "h100x64", *pins: str) -> Search:
    facts, on = transformer(70, 80, 8192, 64, groups=8, inner=28672, batch=batch), cluster(name)
    return search(facts, on, on.ranks, Limits(pins=parse_pins(pins)), Textbook(facts, on))


def test_the_chain_of_a_small_batch() -> None:
    result = found(32)
    chain = reasons(result)
    assert chain[0].startswith("One device: 70 billion parameters need 1043.1 GiB")
    heads = [sentence.partition(":")[0].partition(" fails")[0] for sentence in chain]
    order = ["One device", "Plain data parallelism", "Full sharding over all 64 ranks is ruled out by the batch"]
    assert [h for h in heads if h in order] == order
    assert result.best is not None
    choice = next(sentence for sentence in chain if sentence.startswith("So: "))
    assert str(result.best.candidate) in choice and seconds(result.best.seconds) in choice
    assert memory(result.best.memory) in choice
    second = runner_up(result)
    assert second is not None and str(second.candidate) in next(s for s in chain if s.startswith("Runner-up"))


def test_every_number_of_a_verdict_was_priced() -> None:
    result = found(64)
    told = "\n".join(reasons(result))
    times = {seconds(p.seconds) for p in result.priced}
    verdicts = [line for line in told.splitlines() if ": fits with" in line]
    assert verdicts
    for line in verdicts:
        assert any(f"{time} a step" in line for time in times), line


def test_causes_add_up_to_the_difference() -> None:
    result = found(64)
    first, second = result.priced[0].prediction, result.priced[1].prediction
    by = differences(first, second)
    assert abs(sum(by.by_cause.values()) - by.seconds) < 1e-9
    assert abs(sum(causes(first).values()) - first.seconds) < 1e-3 * first.seconds
    assert by.seconds == second.seconds - first.seconds


def test_what_more_of_each_resource_buys() -> None:
    result = found(32)
    assert result.best is not None
    (links, *_) = sensitivity(result, result.best)
    assert "compute" in links and "nvlink" in links and links.startswith("10 % more")


def test_why_not() -> None:
    result = found(64)
    other = why_not(result, parse_pins(["tp=8"]))
    assert other.plan is not None and other.plan.candidate.size("tensor") == 8
    assert other.sentences[0].startswith("Not tp=8: the best with it is ")
    assert other.sentences[1].startswith("Time by cause: +")
    assert other.sentences[2].startswith(f"Memory: {memory(other.plan.memory)} instead of ")


def test_why_not_what_does_not_fit() -> None:
    other = why_not(found(64), parse_pins(["ddp", "no tp", "no pp"]))
    assert other.plan is None and other.failure is not None
    assert "no plan for 64 ranks fits" in other.sentences[0]


def test_why_not_what_was_chosen() -> None:
    result = found(64)
    assert result.best is not None
    same = why_not(result, parse_pins([result.best.candidate.text]))
    assert "is what was chosen" in same.sentences[0]


def test_numbers_for_people() -> None:
    assert [seconds(x) for x in (3.214, 0.0456, 0.999, 1.2e-4, 321.0)] == [
        "3.21 s",
        "45.6 ms",
        "999 ms",
        "120 us",
        "321 s",
    ]
    assert [percent(x) for x in (0.0312, 0.314, 0.001)] == ["3.1 %", "31 %", "0.1 %"]
    assert [count(x) for x in (8.03e9, 125e6, 4096)] == ["8.03 billion", "125 million", "4,096"]
    assert memory(80 * 1024**3) == "80.0 GiB"


def test_words_for_a_candidate() -> None:
    result = found(32)
    assert result.best is not None
    assert described(result.best.candidate).startswith("full sharding over 32 ranks, tensor parallelism over 2")
