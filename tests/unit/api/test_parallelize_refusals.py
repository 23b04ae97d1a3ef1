"""What ``meshwright.parallelize`` cannot do is refused with a code, a place where there is one, and an action."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright
from meshwright.api import Step
from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, Origin, Span
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.plan import Hashes, Plan
from meshwright.compiler.plan_file import plan_to_toml
from tests.unit.api.small_model import adamw, batch, language


def refused(function: Callable[[], Any]) -> Diagnostic:
    """The one diagnostic; what was refused, and what to do, are both said."""
    with pytest.raises(MeshwrightError) as caught:
        function()
    (found,) = caught.value.diagnostics
    assert found.message and found.action, found
    return found


def step_of(**options: Any) -> Step:
    model = language()
    given: dict[str, Any] = {"batch": batch(0), "plan": "fsdp", "virtual": 4, **options}
    return meshwright.parallelize(model, optimizer=adamw(model), **given)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sum()
        return y if y > 0 else -y  # decides by data


def test_a_model_that_cannot_be_captured() -> None:
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = refused(lambda: meshwright.parallelize(model, optimizer=optimizer, batch=(torch.ones(4, 3),), virtual=2))
    assert found.code == "E0254"
    assert isinstance(found.place, Origin) and found.place.file == __file__
    assert found.place.text == "return y if y > 0 else -y  # decides by data"


def test_no_launcher_and_no_virtual_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    found = refused(lambda: step_of(virtual=None))
    assert found.code == "E0601" and "torchrun" in found.action and "virtual=" in found.action


@pytest.mark.parametrize("ranks", [0, -2])
def test_no_ranks_at_all(ranks: int) -> None:
    found = refused(lambda: step_of(virtual=ranks))
    assert found.code == "E0601" and f"virtual={ranks}" in found.message


def test_a_plan_for_other_ranks() -> None:
    assert refused(lambda: step_of(plan="fsdp=8")).code == "E0307"
    found = refused(lambda: step_of(plan=Plan(Mesh((("data", 2),)), batch=("data",))))
    assert found.code == "E0601" and "2 ranks" in found.message and "virtual=2" in found.action


def test_a_preset_that_is_none() -> None:
    found = refused(lambda: step_of(plan="fdsp"))
    assert found.code == "E0307" and "fsdp" in found.action


def test_a_plan_file_that_is_not_there(tmp_path: Path) -> None:
    found = refused(lambda: step_of(plan=tmp_path / "missing.toml"))
    assert str(tmp_path / "missing.toml") in found.message


def test_a_plan_file_with_a_fault(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(plan_to_toml(Plan(Mesh((("data", 4),)), batch=("data",))).replace("batch =", "bach ="))
    found = refused(lambda: step_of(plan=file))
    assert isinstance(found.place, Span) and found.place.file == str(file)


@pytest.mark.parametrize("as_file", [False, True])
def test_a_plan_of_another_model(as_file: bool, tmp_path: Path) -> None:
    made = step_of(plan="fsdp=2,tp=2").plan
    other = dataclasses.replace(made, hashes=Hashes("0123456789abcdef", torch.__version__))
    file = tmp_path / "plan.toml"
    file.write_text(plan_to_toml(other))
    assert refused(lambda: step_of(plan=file if as_file else other)).code == "E0310"


def test_microbatches_that_do_not_divide() -> None:
    assert refused(lambda: step_of(plan="fsdp,micro=3")).code == "E0302"


def test_a_name_in_batch_dims_that_is_not_in_the_batch() -> None:
    found = refused(lambda: step_of(batch_dims={"token": 0}))
    assert found.code == "E0256" and "tokens" in found.action


def test_a_batch_without_tensors() -> None:
    assert refused(lambda: step_of(batch={})).code == "E0256"


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "fewer samples": (lambda b: {n: x[:4] for n, x in b.items()}, "tokens"),
    "another length": (lambda b: {**b, "labels": b["labels"][:, :3]}, "labels"),
    "one tensor missing": (lambda b: {"tokens": b["tokens"]}, "labels"),
    "one tensor too many": (lambda b: {**b, "mask": b["labels"]}, "mask"),
    "a misspelt name": (lambda b: {"token": b["tokens"], "labels": b["labels"]}, "token"),
    "another form": (lambda b: (b["tokens"], b["labels"]), "tokens"),
    "another dtype": (lambda b: {**b, "tokens": b["tokens"].double()}, "tokens"),
    "no tensor": (lambda b: {}, ""),
    "no batch": (lambda b: None, ""),
}


@pytest.fixture(scope="module")
def compiled() -> Step:
    return step_of()


@pytest.mark.parametrize("fault", BROKEN)
def test_a_batch_unlike_the_example(fault: str, compiled: Step) -> None:
    """Refused before any rank begins, so that the step can be used on."""
    change, name = BROKEN[fault]
    before = compiled.steps
    found = refused(lambda: compiled(change(batch(0))))
    assert found.code in {"E0256", "E0608"} and name in found.message + found.action
    assert compiled.steps == before
    assert torch.isfinite(compiled(batch(before)))


@pytest.mark.parametrize(("entry", "value"), [("weight_decay", 0.3), ("betas", (0.5, 0.9))])
def test_a_setting_of_the_optimizer_that_the_step_would_not_follow(entry: str, value: Any) -> None:
    model = language()
    optimizer = adamw(model)
    step = meshwright.parallelize(model, optimizer=optimizer, batch=batch(0), plan="ddp", virtual=2)
    step(batch(0))
    before, optimizer.param_groups[0][entry] = optimizer.param_groups[0][entry], value
    found = refused(lambda: step(batch(1)))
    assert found.code == "E0650" and entry in found.message
    optimizer.param_groups[0][entry] = before
    step(batch(1))


def test_a_checkpoint_that_is_not_there(compiled: Step, tmp_path: Path) -> None:
    assert refused(lambda: compiled.load(tmp_path / "none")).code.startswith("E06")


def test_a_checkpoint_of_another_model(compiled: Step, tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    other = meshwright.parallelize(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        batch=(torch.ones(4, 3),),
        loss=lambda y, b: y.sum(),
        virtual=2,
    )
    other.save(tmp_path)
    assert refused(lambda: compiled.load(tmp_path)).code.startswith("E06")
