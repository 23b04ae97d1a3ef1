"""Real programs: folded they take the time of the whole, and the timeline's memory is that of the prediction."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from meshwright.compiler.analysis.blocks import Folded, fold
from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.mesh import Sharding
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Plan, Recompute
from meshwright.compiler.prediction import Execution
from meshwright.compiler.summary import RankSummary
from meshwright.compiler.timeline import simulate
from meshwright.compiler.timeline.order import stretches
from meshwright.frontend.source import load_source
from meshwright.prediction_of import predict, predict_step

LLAMA = Path(__file__).parents[3] / "examples" / "llama.mw"
LAYERS = 4


@dataclass(frozen=True)
class Programs:
    whole: StepProgram
    folded: Folded


@pytest.fixture(scope="module")
def programs() -> Programs:
    sizes = {"layers": LAYERS, "batch": 64, "t": 256, "d": 256}
    whole = load_source(str(LLAMA), sizes).capture()
    return Programs(whole, fold(whole))


def plan(programs: Programs, text: str, prefetch: int, *recompute: Recompute) -> Plan:
    return replace(preset(text, programs.whole), prefetch=prefetch, recompute=recompute)


PLANS = [
    ("fsdp=8", 0, ()),
    ("fsdp=8", 1, ()),
    ("ddp=8", 1, ()),
    ("zero2=8,micro=4", 1, ()),
    ("fsdp=4,tp=2,sp,micro=2", 1, ()),
    ("fsdp=8", 1, (Recompute("layers.*", "nothing"),)),
    ("fsdp=8", 1, (Recompute("layers.*", "matmuls"),)),
]


@pytest.fixture(params=PLANS, ids=lambda p: f"{p[0]}-{p[1]}-{'-'.join(r.save for r in p[2])}")
def summaries(programs: Programs, request: pytest.FixtureRequest) -> tuple[RankSummary, RankSummary]:
    """Folded and whole."""
    chosen = plan(programs, request.param[0], request.param[1], *request.param[2])
    folded = summarize(compile_step(programs.folded.program, chosen), programs.folded.repeats)
    return folded, summarize(compile_step(programs.whole, chosen))


def test_folded_they_take_the_time_of_the_whole(summaries: tuple[RankSummary, RankSummary]) -> None:
    cluster = read_cluster("h100x8")
    for fusion in ("none", "compiled"):
        folded, whole = (simulate(s, cluster, Execution(fusion)) for s in summaries)
        assert folded.seconds == pytest.approx(whole.seconds, rel=5e-3)
        assert folded.compute == pytest.approx(whole.compute, rel=1e-4)
        assert folded.communication == pytest.approx(whole.communication, rel=1e-4)


def test_every_item_runs_as_often_as_its_block_comes(summaries: tuple[RankSummary, RankSummary]) -> None:
    folded = summaries[0]
    for graph in (folded.micro, folded.update):
        runs = (p for s in stretches(graph.items, folded.repeats) for round_ in s.sequence() for p in round_)
        assert Counter(runs) == {p: folded.repeats.get(i.block, 1) for p, i in enumerate(graph.items)}


def test_the_memory_on_the_timeline_is_that_of_the_prediction(summaries: tuple[RankSummary, RankSummary]) -> None:
    for summary in summaries:
        found = simulate(summary, read_cluster("h100x8"), spans=True)
        counted = max(sum(map(int, s.notes.values())) for s in found.spans if s.resource == "memory")
        assert counted == pytest.approx(found.memory.peak, rel=0.02)


def test_a_whole_step_is_predicted_by_its_distinct_blocks(programs: Programs) -> None:
    cluster = read_cluster("h100x8")
    chosen = plan(programs, "fsdp=8", 1, Recompute("layers.*", "nothing"))
    whole, quick = predict(programs.whole, chosen, cluster), predict_step(programs.whole, chosen, cluster)
    assert quick.seconds == pytest.approx(whole.seconds, rel=5e-3)
    assert quick.mfu == pytest.approx(whole.mfu, rel=5e-3)
    assert quick.compute["recomputed"] == pytest.approx(whole.compute["recomputed"])


def test_blocks_that_a_plan_cuts_differently_are_not_one(programs: Programs) -> None:
    cluster = read_cluster("h100x8")
    chosen = plan(programs, "fsdp=4,tp=2", 0)
    entry = next(e for e in chosen.parameters if "layers" in e.pattern and "Wdown" in e.pattern)
    shape = next(p.spec.shape for p in programs.whole.parameters if p.name == entry.pattern.replace("*", "2"))
    odd = replace(entry, pattern=entry.pattern.replace("*", "2"), compute=Sharding.whole(shape))
    chosen = replace(chosen, parameters=(odd, *chosen.parameters))
    quick, whole = predict_step(programs.whole, chosen, cluster), predict(programs.whole, chosen, cluster)
    # what lies between two blocks may be cut another way where they are neighbours in the folded step alone
    assert quick.seconds == pytest.approx(whole.seconds, rel=1e-2)
    assert quick.compute["matmul"] == pytest.approx(whole.compute["matmul"], rel=1e-9)
