"""Steps that are cut by depth agree with one device: gradients, norm and updated weights, whatever the schedule."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.pipeline import compile_pipeline
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.passes.stages import block_order
from meshwright.compiler.passes.untie import original
from meshwright.compiler.schedules import catalogue
from meshwright.compiler.schedules.request import Request
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual_pipeline import VirtualPipeline
from tests.models import Variant
from tests.parity.harness import SEED, Task, canonical, captured, examples, far, truth

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Cell:
    """A task on ``pipe`` ranks, each of which has ``virtual`` stages, cut over the other axes by a preset."""

    task: Task
    schedule: str
    pipe: int
    inner: str = "ddp=1"
    microbatches: int = 4

    def __str__(self) -> str:
        return f"{self.task} | {self.schedule} on {self.pipe}, {self.inner}, {self.microbatches} microbatches"


FOUR = Variant(layers=4, dropout=0.1)
CELLS = (
    Cell(Task("gpt.mw", Variant(layers=7)), "1f1b", 4),
    Cell(Task("GPT-2", FOUR), "zb-h1", 2, "fsdp=2,tp=2", 2),
    Cell(Task("Llama", FOUR), "interleaved", 2, "ddp=2"),
    Cell(Task("Qwen3", FOUR), "zb-v", 2, "fsdp=2", 2),
    Cell(Task("Llama", Variant(layers=4, tied=True)), "breadth-first", 2, "tp=2", 2),
    Cell(Task("ViT", FOUR, clip=None), "interleaved-zb", 2),
)
"""More of them agree too; each takes some ten seconds."""


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_agrees_with_one_device(cell: Cell) -> None:
    program = captured(cell.task)
    base = replace(preset(cell.inner, program), microbatches=cell.microbatches)
    plan = replace(base, mesh=Mesh((("pipe", cell.pipe), *base.mesh.axes)))
    module = catalogue.modules()[cell.schedule]
    order = block_order(program.micro.module.graph)
    stages = cell.pipe * module.VIRTUAL
    cuts = [order[round(i * len(order) / stages)] for i in range(1, stages)]
    schedule = catalogue.make(cell.schedule, Request(cell.pipe, cell.microbatches, module.VIRTUAL))
    pipeline = compile_pipeline(program, plan, cuts, schedule)
    weights = from_module(copy.deepcopy(examples(cell.task)[0].model).double())
    virtual = VirtualPipeline(pipeline, weights, seed=SEED)
    for example, step in zip(examples(cell.task), truth(cell.task), strict=True):
        got = virtual.step(example.batch)
        assert abs(got.loss - step.loss) <= TOLERANCE * abs(step.loss)
        if got.norm is not None:
            assert abs(got.norm - step.norm) <= TOLERANCE * step.norm
        found = virtual.full_parameters()
        want = canonical(program, step.weights)
        for name in list(found):
            if original(name) != name:
                assert far({"copy": found.pop(name)}, {"copy": want[original(name)]}) < TOLERANCE, name
        assert far(found, want) < TOLERANCE


def test_stages_that_there_cannot_be() -> None:
    program = captured(Task("GPT-2", FOUR))
    base = preset("ddp=1", program)
    plan = replace(base, mesh=Mesh((("pipe", 2), *base.mesh.axes)), microbatches=4)
    two = catalogue.make("1f1b", Request(2, 4))
    for blocks, schedule, said in (
        (["transformer.h.9"], two, "no stage after the first can begin with 'transformer.h.9'"),
        (["transformer.h.0"], two, "can begin with 'transformer.h.0'"),
        (["transformer.h.1", "transformer.h.2"], two, "2 borders make 3 stages, the schedule has 2"),
        (["transformer.h.2", "transformer.h.1"], two, "not in the order of the model"),
        (["transformer.h.2"], catalogue.make("dualpipe", Request(2, 4)), "in two directions"),
    ):
        with pytest.raises(MeshwrightError, match=f"E0502.*{said}"):
            compile_pipeline(program, plan, blocks, schedule)
