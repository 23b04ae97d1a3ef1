"""Microbatches of a pipeline that meet: what the plan declares global is exactly that of one device, under every
schedule in which all of them come forward before one goes back; the others are refused.

The truth is eager PyTorch in float64: losses, gradients, updated weights and buffers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.compiler.analysis.rank_instructions import rank_instructions
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.emit.artefact import read_artefact, write_artefact
from meshwright.compiler.equivalence.check import check_relations
from meshwright.compiler.equivalence.order import check_order
from meshwright.compiler.graph.meeting import meeting_places
from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.stage_messages import waiting_of
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Declaration, Pipeline
from meshwright.compiler.schedules.catalogue import make, modules
from meshwright.compiler.schedules.instructions import Collective, Compute
from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.rounds import in_rounds, lets_meet
from meshwright.compiler.schedules.table import Rounds, parse_rows
from meshwright.prediction_of import predict_step
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from tests.field.against_one_device import Case, cluster_of, eager, train
from tests.unit.separability.models import Balances, Contrasts, Deep, Norms, case
from tests.unit.separability.test_rounds import SOURCE, TRAIN

MODELS = {"balance": Balances, "norm": Norms, "statistic": Deep, "contrast": Contrasts}


def stack(name: str) -> Case:
    torch.manual_seed(3)
    return case(MODELS[name]())


def compiled(one: Case, plan: str) -> PipelineProgram:
    made = compile_plan(one.program, preset(f"{plan},separability=global", one.program))
    assert isinstance(made, PipelineProgram)
    return made


def far(one: Case, plan: str) -> float:
    cluster = VirtualCluster(compiled(one, plan), from_module(one.model), seed=one.seed, keep_gradients=True)
    return train(cluster, one).far_from(eager(one))


FAST = [
    "pp=2,micro=4,schedule=gpipe",
    "pp=2,micro=4,schedule=breadth-first",
    "pp=2,ddp=2,micro=2,schedule=gpipe",
    "pp=2,fsdp=2,micro=4,schedule=breadth-first,prefetch",
    "pp=2,micro=2,schedule=gpipe,recompute",
]
SLOW = [
    "pp=4,micro=4,schedule=gpipe",
    "pp=4,ddp=2,micro=4,schedule=gpipe",
    "pp=2,ddp=2,fsdp=2,micro=2,schedule=gpipe,selective",
]
QUICK = {"balance": FAST[:3]}
"""By model, what is not slow; of the others one."""
CASES = [
    pytest.param(model, plan, marks=[] if plan in QUICK.get(model, FAST[3:4]) else [pytest.mark.slow])
    for model in MODELS
    for plan in FAST + SLOW
]


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_numbers_are_those_of_one_device(model: str, plan: str) -> None:
    assert far(stack(model), plan) < 1e-11


def test_microbatches_that_did_not_meet_would_give_other_numbers() -> None:
    """Else the numbers above would show nothing."""
    for model in ("balance", "norm", "statistic"):
        one = stack(model)
        made = preset("pp=2,micro=4,separability=per-microbatch", one.program)
        assert train(cluster_of(one, made, 2), one).far_from(eager(one)) > 1e-3


@pytest.mark.parametrize("schedule", [name for name in modules() if name not in ("gpipe", "breadth-first", "list")])
def test_other_schedules_are_refused(schedule: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        compiled(stack("balance"), f"pp=2,micro=4,schedule={schedule}")
    (found,) = caught.value.diagnostics
    assert found.code == "E0766" and f"under {schedule}" in found.message
    assert found.action is not None and "schedule=gpipe" in found.action and "breadth-first" in found.action


def test_what_cannot_be_per_microbatch_is_not_told_to_be() -> None:
    one = stack("contrast")
    with pytest.raises(MeshwrightError) as caught:
        compiled(one, "pp=2,micro=4,schedule=1f1b")
    (found,) = caught.value.diagnostics
    assert found.action is not None and "per microbatch" not in found.action
    assert any(note.startswith("they meet in") for note in found.notes)


@pytest.mark.parametrize(
    ("words", "name"), [("pp=2,micro=4", "gpipe"), ("pp=2", "gpipe"), ("pp=2,micro=2,virtual=2", "breadth-first")]
)
def test_a_preset_takes_a_schedule_that_lets_them_meet(words: str, name: str) -> None:
    one = stack("balance")
    made = preset(f"{words},separability=global", one.program)
    assert made.pipeline is not None and made.pipeline.schedule == name and made.microbatches > 1
    assert any(f"schedule={name} was chosen" in reason for reason in made.reasons)
    plain = preset(f"{words},separability=per-microbatch", one.program)
    assert plain.pipeline is not None and plain.pipeline.schedule == "1f1b"


def test_what_waits_for_no_meeting_goes_on_at_once() -> None:
    """Activations of a layer with a balance loss do not wait for it; those behind a batch norm do."""
    balanced = compiled(stack("balance"), "pp=2,micro=4")
    assert {origin for (_, _), origin in balanced.stages[1].takes.items() if origin[0] == 0} >= {(0, "F")}
    first = next(i for i in balanced.programs[1] if isinstance(i, Compute))
    assert first.name == "1F0" and first.needs == ("0F0",)
    normed = compiled(stack("norm"), "pp=2,micro=4")
    assert list(normed.stages[0].passes) == ["F", "F1", "F2", "F3", "F4", "I", "I1", "I2", "I3", "I4", "W"]
    first = next(i for i in normed.programs[1] if isinstance(i, Compute))
    assert all(need.startswith(("0F2.0", "0F4.0")) for need in first.needs)


def test_a_table_with_rounds() -> None:
    """Two stages, in the second of which microbatches meet forward and back."""
    reads = {
        (0, "F"): (), (1, "F"): ((0, "F"),), (1, "F1"): ((1, "F"),), (1, "I"): ((1, "F1"),), (1, "I1"): ((1, "I"),),
        (1, "W"): ((1, "I1"),), (0, "I"): ((1, "I1"),), (0, "W"): ((0, "I"),),
    }  # fmt: skip
    rounds = Rounds(reads, {(1, "F1"): ((1, "F"),), (1, "I1"): ((1, "I"),)})
    found = in_rounds(make("gpipe", Request(2, 2)), rounds)
    assert str(found) == "0F0 0F1 0B0 0B1\n1F0 1F1 1F1.0 1F1.1 1I0 1I1 1I1.0 1I1.1 1W0 1W1"
    assert parse_rows(str(found)) == found.rows


def test_which_schedules_let_them_meet() -> None:
    for name in modules():
        for virtual in (1, 2):
            try:
                made = make(name, Request(2, 4, virtual))
            except MeshwrightError:
                continue
            assert lets_meet(made) == (name in ("gpipe", "breadth-first")), name


def test_rounds_are_not_written_by_hand() -> None:
    one = stack("balance")
    made = preset("pp=2,micro=2,separability=global", one.program)
    assert made.pipeline is not None
    table = "0F0 0F1 0F1.0 0F1.1 0B0 0B1\n1F0 1F1 1B0 1B1"
    pipeline = Pipeline(made.pipeline.first_blocks, "mine", table)
    with pytest.raises(MeshwrightError) as caught:
        compile_plan(one.program, replace(made, pipeline=pipeline))
    assert caught.value.diagnostics[0].code == "E0506"
    good = Pipeline(made.pipeline.first_blocks, "mine", table.replace(" 0F1.0 0F1.1", ""))
    program = compile_plan(one.program, replace(made, pipeline=good))
    cluster = VirtualCluster(program, from_module(one.model), seed=one.seed, keep_gradients=True)
    assert train(cluster, one).far_from(eager(one)) < 1e-11


def test_ranks_pay_once_for_all_microbatches() -> None:
    counts = {}
    for micro in (2, 4):
        made = compiled(stack("norm"), f"pp=2,ddp=2,micro={micro},schedule=gpipe")
        programs = rank_instructions(made).programs
        counts[micro] = [
            len([i for i in program if isinstance(i, Collective) and i.value.startswith("meeting")])
            for program in programs
        ]
        assert all(counts[micro])
    assert counts[2] == counts[4]


def test_the_relations_hold_and_a_meeting_that_comes_too_early_is_found() -> None:
    made = compiled(stack("norm"), "pp=2,ddp=2,micro=2,schedule=gpipe")
    assert check_relations(made).proved
    waiting = waiting_of(made.stages)
    assert waiting is not None and (0, "F1") in waiting.meets
    program = list(made.programs[0])
    names = [i.name if isinstance(i, Compute) else "" for i in program]
    early, late = names.index("0F1"), names.index("0F1.0")
    program[early], program[late] = program[late], program[early]
    broken = replace(made, programs=(tuple(program), made.programs[1]))
    findings = list(check_order(broken))
    assert any("before microbatch 1 has come to the meeting" in f.message for f in findings)


def test_a_pass_that_lacks_its_meeting_is_found() -> None:
    """A sum over one microbatch alone is not that of the batch."""
    made = compiled(stack("statistic"), "pp=2,micro=2,schedule=gpipe")
    graph = made.stages[1].passes["F1"].module.graph
    (meeting,) = meeting_places(graph)
    meeting.replace_all_uses_with(meeting.all_input_nodes[0])
    graph.erase_node(meeting)
    assert not check_relations(made).proved


def test_an_artefact_runs_as_what_was_compiled(tmp_path: Path) -> None:
    one = stack("norm")
    folder = write_artefact(compiled(one, "pp=2,ddp=2,micro=2"), tmp_path / "build", SOURCE, TRAIN)
    assert (folder / "rank" / "stage-0" / "forward_1.py").exists()
    assert "after meeting 1" in (folder / "rank" / "stage-0" / "forward_1.py").read_text()
    read = read_artefact(folder).rank_program
    cluster = VirtualCluster(read, from_module(one.model), seed=one.seed, keep_gradients=True)
    assert train(cluster, one).far_from(eager(one)) < 1e-11


def test_a_prediction_knows_who_waits() -> None:
    """Behind a batch norm a stage waits for all microbatches of the one before; beside a balance loss for none."""
    bubbles = {}
    for name, model in (("balance", Balances), ("norm", Norms)):
        one = case(model(4, 256))
        one = Case(one.model, [{"x": torch.randn(512, 256, dtype=torch.float64)}])
        for meaning in ("global", "per-microbatch"):
            made = preset(f"pp=2,micro=8,schedule=gpipe,separability={meaning}", one.program)
            found = predict_step(one.program, made, read_cluster("local", 2))
            assert found.flow is not None
            bubbles[name, meaning] = found.flow.bubble
    assert bubbles["norm", "global"] > 2 * bubbles["norm", "per-microbatch"]
    assert bubbles["balance", "global"] < 1.2 * bubbles["balance", "per-microbatch"]
    with pytest.raises(MeshwrightError) as caught:
        predict_step(
            one.program, preset("pp=2,micro=8,schedule=1f1b,separability=global", one.program), read_cluster("local", 2)
        )
    assert caught.value.diagnostics[0].code == "E0766"


def test_one_layer_meets_and_the_others_do_not() -> None:
    """A single coupled layer in the middle of a pipeline."""

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            plain = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]
            plain[1] = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
            self.layers = nn.ModuleList(plain)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    torch.manual_seed(0)
    one = case(Middle())
    made = compiled(one, "pp=2,ddp=2,micro=2")
    assert list(made.stages[1].passes) == ["F", "I", "W"]
    assert far(one, "pp=2,ddp=2,micro=2") < 1e-11


def test_some_couplings_meet_and_others_do_not() -> None:
    """Batch norms of the whole batch, with a loss that each microbatch computes for itself."""

    class Spread(Norms):
        def __init__(self, groups: int = 1) -> None:
            super().__init__()
            self.groups = groups
            self.gate = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            mean = self.gate(x).softmax(-1).reshape(self.groups, -1, 5).mean(1)
            return x.square().mean() + 0.3 * mean.square().sum(-1).mean()

    torch.manual_seed(0)
    one = case(Spread())
    truth = Case(Spread(2).double(), one.batches)
    truth.model.load_state_dict(one.model.state_dict())
    declared = (Declaration("function of the batch", "per microbatch"), Declaration("**", "global"))
    made = preset("pp=2,ddp=2,micro=2", one.program, separability=declared)
    assert train(cluster_of(one, made, 4), one).far_from(eager(truth)) < 1e-11
