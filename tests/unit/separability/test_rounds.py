"""Microbatches that meet: what is run, what is kept meanwhile, and what of it is predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from meshwright.compiler.analysis.rank_instructions import rank_instructions
from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.analysis.waiting import NAME
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.communication import communication
from meshwright.compiler.emit.artefact import read_artefact, write_artefact
from meshwright.compiler.emit.manifest import SourceDescription
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.meeting import axes_of, meeting_places
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.compiler.memory import memory
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.schedules.instructions import Collective
from meshwright.compiler.timeline import simulate
from meshwright.compiler.train_settings import DataSettings, TrainSettings
from meshwright.inspection import inspect_artefact
from meshwright.runtime.materialize import from_module
from meshwright.runtime.rounds import met, rounds_of
from meshwright.runtime.virtual import VirtualCluster
from tests.field.against_one_device import cluster_of, eager, train
from tests.unit.separability.models import coupled

SOURCE = SourceDescription("language", "small.mw", "small", {}, "axes\n")
TRAIN = TrainSettings(2, 1, 5, DataSettings("random", ""), {})


class Rank:
    """Of one rank, whose microbatches alone meet."""

    def __init__(self, microbatches: int) -> None:
        self.mesh = Mesh((("micro", microbatches),))
        self.microbatch = 0

    def coordinate(self, axis: str) -> int:
        return self.microbatch


def meeting(target: Any, *arguments: Any, parts: list[Tensor]) -> list[Tensor]:
    graph = fx.Graph()
    node = graph.call_function(target, (graph.placeholder("x"), *arguments))
    communicator: Any = Rank(len(parts))
    with collectives.use(communicator):
        return met(node, parts, communicator)


def test_what_a_meeting_makes() -> None:
    a, b, c = (torch.randn(2, 3) for _ in range(3))
    parts = [a, b, c]
    for reduction, want in (("sum", a + b + c), ("max", a.maximum(b).maximum(c)), ("min", a.minimum(b).minimum(c))):
        for found in meeting(collectives.all_reduce, ("micro",), reduction, parts=parts):
            torch.testing.assert_close(found, want)
    for found in meeting(collectives.all_gather, 1, ("micro",), 8, parts=parts):
        torch.testing.assert_close(found, torch.cat([a, b, c], 1)[:, :8])  # the ninth column is padding
    for found, want in zip(
        meeting(collectives.reduce_scatter, 1, ("micro",), parts=parts), (a + b + c).split(1, 1), strict=True
    ):
        torch.testing.assert_close(found, want)
    whole = torch.cat(parts, 1)
    exchanged = meeting(collectives.all_to_all, 0, 1, "micro", 9, parts=parts)
    torch.testing.assert_close(exchanged[0], whole[:1])
    torch.testing.assert_close(exchanged[1], whole[1:])
    assert not exchanged[2].any()  # two rows for three microbatches: the last one has padding


def test_a_sum_in_half_precision_goes_on_growing() -> None:
    ones = [torch.ones(1, dtype=torch.bfloat16)] * 1000
    assert float(meeting(collectives.all_reduce, ("micro",), "sum", parts=ones)[0]) == 1000


def compiled(plan: str) -> RankProgram:
    program = coupled().program
    made = compile_plan(program, preset(f"{plan},separability=global", program))
    assert isinstance(made, RankProgram)
    return made


def test_rounds_keep_what_later_ones_read_and_no_more() -> None:
    graph = compiled("ddp=2,micro=2").micro.module
    rounds = rounds_of(graph)
    there = {node.name for node in graph.graph.find_nodes(op="placeholder")}
    for number, each in enumerate(rounds):
        assert set(each.reads) <= there
        there = (there - each.ends) | set(each.gives) | {node.name for node in each.meetings}
        there -= set(each.over)
        later = {n for r in rounds[number + 1 :] for n in r.reads}
        later |= {m.all_input_nodes[0].name for r in rounds[number + 1 :] for m in r.meetings}
        unread = {n.name for n in graph.graph.find_nodes(op="placeholder") if not n.users}
        assert there - unread <= later
    assert [bool(each.meetings) for each in rounds] == [True] * (len(rounds) - 1) + [False]


def test_microbatches_that_do_not_meet_go_one_by_one() -> None:
    assert rounds_of(compiled("ddp=2,micro=1").micro.module) == ()


def test_an_artefact_runs_as_what_was_compiled(tmp_path: Path) -> None:
    one = coupled()
    folder = write_artefact(compiled("fsdp=2,micro=2,prefetch"), tmp_path / "build", SOURCE, TRAIN)
    text = (folder / "rank" / "micro.ir").read_text()
    assert "all_reduce" in text and '("micro", "data"), "sum")' in text
    assert "# microbatches meet here" in (folder / "rank" / "micro.py").read_text()
    assert "separability" in (folder / "plan.toml").read_text()
    read = read_artefact(folder).rank_program
    cluster = VirtualCluster(read, from_module(one.model), seed=one.seed, keep_gradients=True)
    assert train(cluster, one).far_from(eager(one)) < 1e-11
    inspected = inspect_artefact(folder)
    assert inspected.memory.peak > 0
    assert all("micro" not in traffic.axes for traffic in inspected.traffic)


def test_ranks_pay_once_for_all_microbatches_and_the_check_knows() -> None:
    calls = {}
    for micro in (2, 4):
        made = compiled(f"ddp=2,micro={micro}")
        (program,) = rank_instructions(made).programs
        calls[micro] = [i for i in program if isinstance(i, Collective) and i.value.startswith("meeting")]
        joint = [n for n in meeting_places(made.micro.module.graph) if "replica" in axes_of(n)]
        assert len(calls[micro]) == len(joint) > 0
        traffic = communication(summarize(made))
        assert all("micro" not in t.axes for t in traffic)
    assert len(calls[2]) == len(calls[4])


def test_what_waiting_microbatches_keep_is_predicted() -> None:
    """As measured of the rounds themselves: what crosses each border, for all microbatches but one."""
    made = compiled("ddp=1,micro=4")
    summary = summarize(made)
    waiting = [b for b in summary.micro.buffers if b.name == NAME]
    assert waiting and {b.kind for b in waiting} >= {"activations", "batch"}
    alone = replace(
        summary, micro=replace(summary.micro, buffers=tuple(b for b in summary.micro.buffers if b.name != NAME))
    )
    assert memory(summary).by_graph["micro"] > memory(alone).by_graph["micro"]
    assert simulate(summary, read_cluster("local", 1)).seconds > 0
    # nobody waits where nothing couples: there the prediction is what it was
    plain = summarize(compiled("ddp=1,micro=1"))
    assert not [b for b in plain.micro.buffers if b.name == NAME]


@pytest.mark.parametrize("word", ["recompute", "selective"])
def test_a_statistic_with_recomputation(word: str) -> None:
    from tests.unit.separability.models import Deep, case

    torch.manual_seed(0)
    one = case(Deep())
    plan = preset(f"fsdp=2,micro=2,{word},separability=global", one.program)
    assert train(cluster_of(one, plan), one).far_from(eager(one)) < 1e-11
