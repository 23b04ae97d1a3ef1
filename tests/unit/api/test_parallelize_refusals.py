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
from meshwright.compiler.plan import Hashes, Plan, Precision
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


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "clip 0": ({"clip": 0}, "'clip' of parallelize cannot be 0", "above zero"),
    "clip -1": ({"clip": -1.0}, "-1.0", "above zero"),
    "clip text": ({"clip": "1.0"}, "'1.0'", "above zero"),
    "clip nan": ({"clip": float("nan")}, "nan", "finite"),
    "clip inf": ({"clip": float("inf")}, "inf", "None for no clipping"),
    "clip huge": ({"clip": 10**400}, "more than 64 bits", "finite"),
    "clip True": ({"clip": True}, "True", "above zero"),
    "clip tensor": ({"clip": torch.ones(())}, "type Tensor", "above zero"),
    "virtual text": ({"virtual": "2"}, "'virtual' of parallelize cannot be '2'", "virtual=N"),
    "virtual half": ({"virtual": 2.5}, "2.5", "virtual=N"),
    "virtual True": ({"virtual": True}, "True", "virtual=N"),
    "seed text": ({"seed": "x"}, "'seed' of parallelize cannot be 'x'", "64 bits"),
    "seed huge": ({"seed": 10**30}, "more than 64 bits", "64 bits"),
    "seed of 64 bits": ({"seed": 2**63}, str(2**63), "64 bits"),
    "seed of many digits": ({"seed": 10**5000}, "more than 64 bits", "64 bits"),
    "seed None": ({"seed": None}, "None", "64 bits"),
    "optimizer class": ({"optimizer": torch.optim.AdamW}, "the class AdamW", "AdamW(model.parameters())"),
    "optimizer classes": ({"optimizer": [torch.optim.SGD]}, "the class SGD", "model.parameters()"),
    "optimizer None": ({"optimizer": None}, "None", "model.parameters()"),
    "no optimizer": ({"optimizer": []}, "an empty list", "model.parameters()"),
    "optimizer text": ({"optimizer": "adamw"}, "'adamw'", "model.parameters()"),
    "plan dict": ({"plan": {"fsdp": 2, "tp": 2}}, "of type dict", 'plan="fsdp=2,tp=2"'),
    "plan None": ({"plan": None}, "None", "preset"),
    "plan number": ({"plan": 3}, "'plan' of parallelize cannot be 3", "preset"),
    "precision number": ({"precision": 16}, "16", "bf16"),
    "precision dtype": ({"precision": torch.bfloat16}, "of type dtype", "bf16"),
    "model class": ({"model": nn.Linear}, "the class Linear", "nn.Module"),
    "model function": ({"model": lambda x: x}, "of type function", "nn.Module"),
    "loss number": ({"loss": 1.5}, "'loss' of parallelize cannot be 1.5", "(output, batch)"),
    "loss tensor": ({"loss": torch.ones(())}, "of type Tensor", "(output, batch)"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_an_argument_of_another_kind(fault: str) -> None:
    options, message, action = WRONG[fault]
    model = language()
    given = {"model": model, "optimizer": adamw(model), "batch": batch(0), "virtual": 2, **options}
    found = refused(lambda: meshwright.parallelize(**given))
    assert found.code == "E0651" and message in found.message and action in found.action
    assert len(found.message) < 200


@pytest.mark.parametrize("precision", ["bf61", "", Precision(weights="half"), Precision(reduce=torch.float32)])  # type: ignore[arg-type]  # the fault
def test_a_precision_that_is_none(precision: str | Precision) -> None:
    found = refused(lambda: step_of(precision=precision))
    assert found.code == "E0321" and ("did you mean" in found.action or "known:" in found.action)


DIMS: dict[str, tuple[Any, str, str]] = {
    "beyond the shape": ({"tokens": 7}, "'tokens' the dim 7, but its shape is [8, 6]", "0, 1"),
    "far from the end": ({"tokens": -3}, "-3", "0, 1"),
    "a name": ({"tokens": "b"}, "of type str", "number"),
    "a truth": ({"tokens": True}, "of type bool", "number"),
    "of other sizes": ({"tokens": 1, "labels": 0}, "samples", "batch_dims"),
    "a number for all": (0, "of type int", "{name: dim}"),
    "a list": (["tokens"], "of type list", "{name: dim}"),
    "a number for a name": ({0: 0}, "'0'", "tokens"),
}


@pytest.mark.parametrize("fault", DIMS)
def test_batch_dims_that_do_not_fit(fault: str) -> None:
    given, message, action = DIMS[fault]
    found = refused(lambda: step_of(batch_dims=given))
    assert found.code == "E0256" and message in found.message and action in found.action


def test_a_positional_batch_is_told_by_its_positions() -> None:
    def positional(number: int) -> tuple[Tensor, Tensor]:
        return batch(number)["tokens"], batch(number)["labels"]

    step = step_of(batch=positional(0))
    tokens, labels = positional(1)
    for wrong, message in (
        ((tokens[:4], labels), "positional input 0 of the batch has the shape [4, 6]"),
        ((tokens, labels.double()), "positional input 1 of the batch has the dtype"),
        ((tokens,), "the batch has no positional input 1"),
        ((tokens, labels, labels), "positional input 2"),
        ({"tokens": tokens, "labels": labels}, "the batch has no positional input 0"),
    ):
        found = refused(lambda given=wrong: step(given))  # type: ignore[misc]  # mypy cannot infer such a lambda
        assert found.code == "E0608" and message in found.message and "known:" not in found.action
    found = refused(lambda: step_of(batch=positional(0), batch_dims={0: 5}))
    assert "positional input 0 the dim 5" in found.message
