"""What is priced of a pipeline is what its stages do: the same passes, read off one program that had them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from meshwright.compiler.analysis.blocks import fold
from meshwright.compiler.analysis.lifetimes import nodes_of, roles
from meshwright.compiler.analysis.storage import storages
from meshwright.compiler.analysis.summarize import summarize_graph
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.presets import preset as cluster
from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.pipeline import compile_pipeline
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.passes.stages import block_order, even_cuts
from meshwright.compiler.passes.treated import treatments
from meshwright.compiler.plan import PIPE, Pipeline, Plan
from meshwright.compiler.prediction import Execution
from meshwright.compiler.schedules.of_plan import schedule_of
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.summary import PASSES, GraphSummary, Kernel, Message
from meshwright.compiler.timeline.stage import Cut, StagePricer
from meshwright.frontend.source import source_without_weights
from meshwright.planning import plan_program
from meshwright.prediction_of import predict_step
from meshwright.summaries import depth_of, staged_summary_of

CASES = [
    ("ddp=1", 4, 4, "1f1b"),
    ("ddp=1", 4, 4, "zb-h1"),
    ("zero1=2,tp=2,sp", 4, 4, "zb-h1"),
    ("fsdp=2,tp=2,prefetch", 4, 2, "zb-h1"),
    ("ddp=2,recompute", 2, 2, "1f1b"),
    ("fsdp=2,selective", 3, 2, "1f1b"),
]


@pytest.fixture(scope="module")
def program() -> StepProgram:
    """gpt.mw, whose embedding is tied to its head, with eight layers."""
    return source_without_weights("examples/gpt.mw", {"layers": 8}).capture()


def on(ranks: int) -> Cluster:
    found = cluster(f"h100x{ranks}")
    assert found is not None
    return found


def planned(program: StepProgram, inner: str, pipe: int, microbatches: int, schedule: str = "1f1b") -> Plan:
    base = replace(preset(inner, program), microbatches=microbatches)
    first = even_cuts(block_order(program.micro.module.graph), pipe)
    return replace(base, mesh=Mesh(((PIPE, pipe), *base.mesh.axes)), pipeline=Pipeline(first, schedule))


@pytest.mark.parametrize(("inner", "pipe", "microbatches", "schedule"), CASES, ids=lambda value: str(value))
def test_stages_do_what_is_priced(
    program: StepProgram, inner: str, pipe: int, microbatches: int, schedule: str
) -> None:
    plan = planned(program, inner, pipe, microbatches, schedule)
    assert plan.pipeline is not None
    real = compile_pipeline(program, plan, verify=False)
    saves = treatments(program.micro, plan.recompute)
    folded = fold(program, saves)
    whole = replace(plan, mesh=Mesh(plan.mesh.axes[1:]), pipeline=None)
    summary = staged_summary_of(folded, whole, saves, schedule_of(plan).apart)
    depth = depth_of(folded, summary)
    pricer = StagePricer(summary, on(64), Execution())
    mesh = summary.mesh.with_micro(microbatches)
    for number, shape in enumerate(depth.shapes(depth.starts(plan.pipeline.first_blocks))):
        cut, use = Cut(summary, shape), pricer(shape)
        for kind in PASSES:
            made = summarize_graph(real.stages[number].passes[kind], mesh)
            assert _work(cut.graph(summary.passes[kind]), cut.repeats) == pytest.approx(_work(made, {}), rel=1e-3), (
                f"stage {number}, {kind}"
            )
        kept = [sum(k.values()) for k in (use.until_input, use.until_weights, use.between)]
        assert kept == pytest.approx(_kept(real, number, mesh), rel=0.01), f"stage {number}"
        held = sum(size for kind, size in use.held.items() if kind in ("parameters", "optimizer state"))
        assert held == pytest.approx(_held(real, number), rel=0.01), f"stage {number}"


def _work(graph: GraphSummary, repeats: Mapping[str, int]) -> tuple[float, float, float]:
    """Floating point operations, bytes that kernels move, bytes of messages."""
    flops = moved = sent = 0.0
    for item in graph.items:
        times = repeats.get(item.block, 1)
        if isinstance(item.work, Kernel) and item.work.kind != "view":
            flops += item.work.flops * times
            moved += (item.work.read + item.work.written) * times
        elif isinstance(item.work, Message):
            sent += item.work.payload * times
    return flops, moved, sent


def _kept(real: PipelineProgram, number: int, mesh: Mesh) -> list[int]:
    """What a stage keeps of a microbatch: from forward to either backward pass, and between these; what it was sent
    too."""
    until: dict[object, str] = {}
    made_in: dict[object, str] = {}
    size: dict[object, int] = {}
    for later in PASSES[1:]:
        graph = real.stages[number].passes[later]
        for _, value in roles(graph)[0].items():
            if value.kind != "value":
                continue
            stage, made = real.stages[number].takes[later, value.name]
            if stage != number and made == "I" and later == "I":
                continue  # it is read as it comes
            source = real.stages[stage].passes[made]
            memory = storages(nodes_of(source), mesh)
            inputs, outputs = roles(source)
            for storage in memory.owned.get(outputs[value], ()):
                if storage.node not in inputs or inputs[storage.node].kind in ("batch", "value"):
                    key = (stage, storage.node.name, storage.index)
                    until[key], made_in[key], size[key] = later, made, storage.bytes
    found = {("F", "I"): 0, ("F", "W"): 0, ("I", "W"): 0}
    for key, later in until.items():
        found[made_in[key], later] += size[key]
    return list(found.values())


def _held(real: PipelineProgram, number: int) -> int:
    """Bytes of weights and optimizer state."""
    stage = real.stages[number]
    total = 0
    seen: set[object] = set()
    for graph in (*stage.passes.values(), *stage.update):
        for node, value in roles(graph)[0].items():
            if value.kind in ("parameter", "state") and value not in seen:
                seen.add(value)
                tensor = node.meta["val"]
                total += tensor.numel() * tensor.element_size()
    return total


def test_a_step_of_a_given_plan(program: StepProgram) -> None:
    """The busiest stage's passes and the bubble make the step; every stage of a plan is told."""
    plan = planned(program, "zero1=2,tp=2", 4, 8)
    found = predict_step(program, plan, on(16))
    assert found.flow is not None and len(found.flow.stages) == 4
    assert [s.blocks for s in found.flow.stages] == [2, 2, 2, 2]
    assert [s.in_flight for s in found.flow.stages] == [4, 3, 2, 1]
    causes = sum(found.compute.values()) + sum(found.exposed.values()) + sum(found.other.values())
    assert causes == pytest.approx(found.seconds, rel=0.02)
    assert found.memory.peak == max(found.flow.memory)


@pytest.mark.parametrize("pins", ["pp=4,schedule=1f1b,no tp", "pp=2,schedule=zb-h1,tp=2", "pp=2,selective,by-stage"])
def test_a_chosen_plan_is_predicted_as_when_it_was_chosen(program: StepProgram, pins: str) -> None:
    """Its file says all that counts: stages, schedule, and what each block recomputes."""
    limits = Limits(pins=parse_pins([pins]), budget=4)
    found = plan_program(program, on(8), limits=limits)
    assert found.plan.pipeline is not None and found.plan.mesh.names[0] == PIPE
    again = predict_step(program, found.plan, on(8))
    assert again.seconds == pytest.approx(found.prediction.seconds, rel=1e-6)
    assert again.device_memory == pytest.approx(found.prediction.device_memory, rel=1e-6)


def test_spans_of_a_pipeline(program: StepProgram) -> None:
    found = predict_step(program, planned(program, "ddp=1", 2, 4), on(2), spans=True)
    names = {(s.resource, s.name) for s in found.spans}
    assert ("pipe 0", "0F0") in names and ("pipe 1", "1B3") in names
    assert max(s.end for s in found.spans) <= found.seconds * (1 + 1e-9)
