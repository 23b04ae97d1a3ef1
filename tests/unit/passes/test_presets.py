"""What a preset does not say is refused with words that help from the command line and from Python alike."""

from __future__ import annotations

import pytest

from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.presets import preset
from meshwright.frontend.capture import capture
from tests.unit.api.small_model import adamw, batch, language


@pytest.fixture(scope="module")
def program() -> StepProgram:
    model = language()
    return capture(model, batch(0), adamw(model))


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
