"""What a preset does not say is refused with words that help from the command line and from Python alike."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Recompute, Save
from meshwright.compiler.schedules.of_plan import alone, schedule_of
from meshwright.frontend.capture import capture
from tests.unit.api.small_model import adamw, batch, language
from tests.unit.passes.stack import step


@pytest.fixture(scope="module")
def program() -> StepProgram:
    model = language()
    return capture(model, batch(0), adamw(model))


@pytest.fixture(scope="module")
def blocks() -> StepProgram:
    return step()


def refused(text: str, program: StepProgram, ranks: int | None) -> Diagnostic:
    with pytest.raises(MeshwrightError) as caught:
        preset(text, program, ranks)
    (found,) = caught.value.diagnostics
    assert found.code == "E0307" and found.message and found.action
    return found


REFUSED: dict[tuple[str, int | None], tuple[str, str]] = {
    ("fsdp=2,tp=2", 8): ("is for 4 ranks, not 8", "start 4 ranks"),
    ("fsdp=2 tp=2", 4): ("not separated by commas", "write fsdp=2,tp=2"),
    ("fsdp = 2 tp = 2, sp", 4): ("not separated by commas", "write fsdp=2,tp=2,sp"),
    ("fsdp=2;tp=2", 4): ("not separated by commas", "write fsdp=2,tp=2"),
    ("micro=3", 4): ("names no axis", "write fsdp,micro=3"),
    ("schedule=zb-v", 4): ("'schedule=zb-v' names no axis", "write fsdp,pp=2,schedule=zb-v"),
    ("schedule=1f1b", None): ("names no axis", "write fsdp=2,pp=2,schedule=1f1b"),
    ("virtual=2", 6): ("names no axis", "write fsdp,pp=2,virtual=2"),
    ("numerics=safe", 4): ("'numerics=safe' names no axis", "write fsdp,numerics=safe"),
    ("separability", 4): ("needs what couplings", "separability=global"),
    ("fsdp=4,schedule=1f1b", 4): ("'schedule' needs 'pp'", "leave 'schedule' out"),
    ("fsdp=4,pp=1,virtual=2", 4): ("'virtual' needs 'pp'", "leave 'virtual' out"),
    ("sp", 4): ("names no axis", "write tp,sp"),
    ("sp,micro=2", 4): ("names no axis", "write tp,sp,micro=2"),
    ("", 4): ("names no axis", "write fsdp, or"),
    (" ; ", 4): ("not separated", "write fsdp, or"),
    ("fsdp", None): ("the number of ranks is not known", "give a size (fsdp=4) or the number of ranks"),
    ("fsdp,tp=2", 3): ("3 ranks cannot be divided by 2", "product is 3"),
    ("fsdp,tp", 4): ("leave their sizes out", "give one a size"),
    ("fsdp=", 4): ("positive whole number", "fsdp=2"),
    ("fsdp=0", 4): ("positive whole number", "fsdp=2"),
    ("fsdp=²", 4): ("positive whole number", "fsdp=2"),
    ("fsdp=" + "9" * 5000, 4): ("positive whole number", "fsdp=2"),
    ("sp=2,tp=4", 4): ("takes no number", "write sp"),
    ("tp=4,micro", 4): ("number of microbatches", "micro=4"),
    ("fsdp=4,sp", 4): ("'sp' needs 'tp'", "tp=2"),
    ("fdsp=2", 4): ("'fdsp'", "did you mean 'fsdp'?"),
    ("fsdp=4,recompute,selective", 4): ("exclude each other", "leave one"),
    ("fsdp=4,recompute=0", 4): ("positive whole number", "recompute=2"),
    ("fsdp=4,recompute=half", 4): ("positive whole number", "recompute=2"),
    ("fsdp=4,offload=state", 4): ("takes no number", "write offload"),
    ("fsdp=4,recomptue", 4): ("'recomptue'", "did you mean 'recompute'?"),
    ("pp=2,ddp=2,recompute,by-stage", 4): ("'by-stage' is a word of the planner's", "let the planner choose"),
}


@pytest.mark.parametrize(("text", "ranks"), REFUSED, ids=lambda part: str(part)[:20])
def test_a_preset_that_is_none(text: str, ranks: int | None, program: StepProgram) -> None:
    message, action = REFUSED[text, ranks]
    found = refused(text, program, ranks)
    assert message in found.message and action in found.action
    assert "--" not in found.message + found.action  # options are of one of the ways in alone


@pytest.mark.parametrize("text", ["fsdp=2, tp=2", " fsdp = 2 , tp ", "fsdp=2*tp=2", "fsdp,tp=2,", "fsdp=02,tp=2"])
def test_how_a_preset_may_be_written(text: str, program: StepProgram) -> None:
    assert str(preset(text, program, 4).mesh) == "data=2, tensor=2"


def test_suggestions_are_presets(program: StepProgram) -> None:
    deep = step(4)
    for (text, ranks), (_, action) in REFUSED.items():
        if action.startswith("write ") and "," in action and " or" not in action:
            suggested = action.removeprefix("write ")
            made = preset(suggested, deep if "pp=" in suggested else program, ranks)
            assert made.mesh.ranks == (ranks or 4), text


@pytest.mark.parametrize(
    ("words", "save", "every"),
    [
        ("recompute", "nothing", 1),
        ("recompute=2", "nothing", 2),
        ("recompute=full", "nothing", 1),
        ("recompute=full/3", "nothing", 3),
        ("selective", "matmuls", 1),
        ("recompute=selective", "matmuls", 1),
        ("selective=2", "matmuls", 2),
    ],
)
def test_what_blocks_keep(words: str, save: Save, every: int, blocks: StepProgram) -> None:
    assert preset(f"fsdp=4,{words}", blocks, 4).recompute == (Recompute("blocks.*", save, every),)


def test_prefetch_and_offload(program: StepProgram) -> None:
    plan = preset("fsdp=4,prefetch,offload", program, 4)
    assert (plan.prefetch, plan.offload) == (1, ("state",))
    assert preset("fsdp=4,prefetch=3", program, 4).prefetch == 3
    assert preset("fsdp=4", program, 4) == replace(plan, prefetch=0, offload=(), name="fsdp=4")


def test_a_model_without_blocks_cannot_be_recomputed(program: StepProgram, blocks: StepProgram) -> None:
    assert "no repeated blocks" in refused("fsdp=2,recompute", program, 2).message
    assert "write fsdp,recompute=2" in refused("recompute=2", blocks, 2).action


@pytest.mark.parametrize(
    ("layers", "text", "action"),
    [
        (4, "pp=5", "use at most pp=4"),
        (7, "pp=8", "use at most pp=7, or pp=4, which divides 8"),
        (4, "pp=3,schedule=interleaved", "use at most pp=2"),
        (5, "pp=7,schedule=dualpipe", "use at most pp=4"),
        (4, "pp=2,virtual=4,schedule=interleaved", "use at most virtual=2"),
        (3, "pp=2,schedule=zb-v", "use at most pp=2, with schedule=1f1b"),
        (4, "pp=8,virtual=2", "leave virtual out, and use at most pp=4"),
        (1, "pp=2", "leave pp out"),
    ],
)
def test_too_many_stages_are_told_with_a_number_that_is_legal(layers: int, text: str, action: str) -> None:
    program = step(layers)
    with pytest.raises(MeshwrightError) as caught:
        preset(text, program)
    (found,) = caught.value.diagnostics
    assert (found.code, found.action) == ("E0502", action)
    words = dict(word.partition("=")[::2] for word in text.split(","))
    for said in re.findall(r"(\w+)=([\w-]+)", action):
        legal = {**words, **dict(re.findall(r"(schedule)=([\w-]+)", action)), said[0]: said[1]}
        if "leave virtual out" in action:
            del legal["virtual"]
        if said[0] != "schedule":
            made = preset(",".join(f"{word}={value}" for word, value in legal.items()), program)
            assert schedule_of(made).ranks == int(legal["pp"])


@pytest.mark.parametrize(
    ("text", "count", "why"),
    [
        ("pp=2", 8, "4 or more for each of the 2 ranks"),
        ("pp=3", 8, "8 samples allows no more"),
        ("pp=2,ddp=2", 4, "8 samples allows no more"),
        ("pp=2,ddp=8", 1, "8 samples allows no more"),
    ],
)
def test_a_pipeline_is_filled_where_nothing_is_said_of_microbatches(
    text: str, count: int, why: str, blocks: StepProgram
) -> None:
    plan = preset(text, blocks)
    assert plan.microbatches == count and plan.name == f"{text},micro={count}"
    (reason,) = plan.reasons
    assert reason.startswith(f"micro={count} was chosen") and why in reason
    said = preset(plan.name, blocks)
    assert said == replace(plan, reasons=())
    assert preset("fsdp=2", blocks).microbatches == 1 and not preset("fsdp=2", blocks).reasons
    assert bool(alone(plan, 8)) is False and bool(alone(preset("pp=2,micro=1", blocks), 8))


class Coupled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return (self.norm(x) ** 3).mean()


def test_a_batch_whose_samples_couple_is_not_cut_unasked() -> None:
    model = Coupled()
    program = capture(model, (torch.randn(8, 4),), torch.optim.SGD(model.parameters(), lr=0.1))
    plan = preset("pp=2", program)
    assert plan.microbatches == 1 and "samples couple in" in plan.reasons[0]
    (warning,) = alone(plan, 8)
    assert warning.code == "W0501" and "waits 1/2 of a step" in warning.message
    assert preset("pp=2,separability=per-microbatch", program).microbatches == 8
    whole = preset("pp=2,separability=global", program)
    assert whole.microbatches == 8 and whole.pipeline is not None and whole.pipeline.schedule == "gpipe"
    assert any("microbatches meet in" in reason for reason in whole.reasons)
