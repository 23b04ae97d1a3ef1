"""Steps that are cut by depth agree with one device: a selection of the table that ``python -m
benchmarks.pipeline_parity`` prints."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Pipeline, Recompute, Save
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from tests.models import Variant
from tests.parity.harness import SEED, Task, captured, compare, examples, measure, truth
from tests.parity.pipeline_cells import COVERING, INNER, MODELS, PIPES, SCHEDULES, pipeline_cell

TOLERANCE = 1e-9


DEAR = {("T5", "zb-v", 2, "fsdp 2 x tp 2"), ("Qwen3", "zb-h2", 4, "alone")}
"""Their models, schedules and inner plans have quick cases too, or such of another schedule of the kind."""


@pytest.mark.parametrize(
    "which",
    [
        pytest.param(which, id=", ".join(map(str, which)), marks=pytest.mark.slow if which in DEAR else ())
        for which in COVERING
    ],
)
def test_agrees_with_one_device(which: tuple[str, str, int, str]) -> None:
    found = measure(pipeline_cell(*which))
    assert found.worst < TOLERANCE, found


def test_the_selection_covers_everything_once() -> None:
    for position, there in enumerate((MODELS, SCHEDULES, PIPES, INNER)):
        assert {which[position] for which in COVERING} == set(there)


FOUR = Variant(layers=4, dropout=0.1)


def test_stages_that_recompute_as_each_pleases() -> None:
    """With a drop-out, whose masks are drawn again."""
    task = Task("GPT-2", FOUR)
    plan = preset("pp=2,fsdp=2,micro=4,schedule=zb-h1", captured(task))
    saves: tuple[tuple[str, Save], ...] = (("transformer.h.0", "nothing"), ("transformer.h.1", "matmuls"))
    compiled = compile_plan(captured(task), replace(plan, recompute=tuple(Recompute(*save) for save in saves)))
    assert isinstance(compiled, PipelineProgram)
    first, second = (
        sum(annotation(n).recomputed for g in stage.passes.values() for n in g.module.graph.nodes)
        for stage in compiled.stages
    )
    assert first > 0 == second
    weights = from_module(copy.deepcopy(examples(task)[0].model).double())
    cluster = VirtualCluster(compiled, weights, seed=SEED, keep_gradients=True)
    for example, step in zip(examples(task), truth(task), strict=True):
        got = cluster.step(example.batch)
        assert compare(cluster, got.loss, got.norm, step).worst < TOLERANCE


TWO = Pipeline(("transformer.h.2",))


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        (replace(TWO, first_blocks=("transformer.h.9",)), "no stage after the first can begin with 'transformer.h.9'"),
        (replace(TWO, first_blocks=("transformer.h.0",)), "can begin with 'transformer.h.0', which is the first block"),
        (replace(TWO, first_blocks=("transformer.h.1", "transformer.h.2")), "3 stages cannot be shared out evenly"),
        (replace(TWO, first_blocks=("transformer.h.2", "transformer.h.1"), schedule="interleaved"), "not in the order"),
        (None, "an axis 'pipe', but no pipeline"),
    ],
)
def test_stages_that_there_cannot_be(pipeline: Pipeline | None, said: str) -> None:
    program = captured(Task("GPT-2", FOUR))
    base = preset("ddp=1", program)
    plan = replace(base, mesh=Mesh((("pipe", 2), *base.mesh.axes)), microbatches=4, pipeline=pipeline)
    with pytest.raises(MeshwrightError, match=f"E0502.*{said}"):
        compile_plan(program, plan)


def test_one_microbatch_cannot_go_in_two_directions() -> None:
    program = captured(Task("GPT-2", FOUR))
    with pytest.raises(MeshwrightError, match=r"E0502.*dualpipe sends microbatches in two directions, and"):
        compile_plan(program, preset("pp=2,schedule=dualpipe,micro=1", program))
