"""What a preset does not say is refused with words that help from the command line and from Python alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Recompute, Save
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
    for (text, ranks), (_, action) in REFUSED.items():
        if ranks is not None and action.startswith("write ") and "," in action and " or" not in action:
            suggested = action.removeprefix("write ")
            assert preset(suggested, program, ranks).mesh.ranks == ranks, text


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
