"""``meshwright.parallelize`` on a virtual cluster gives what the user's own loop gave on one device."""

from __future__ import annotations

import dataclasses
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import meshwright
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.plan import Plan, Precision, Storage
from meshwright.compiler.plan_file import plan_to_toml
from tests.unit.api.small_model import Language, adamw, batch, eager_steps, language, loss_of, schedule

PLAN = Plan(Mesh((("data", 4),)), batch=("data",), storage=Storage(("data",), ("data",), ("data",)))


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    """Nothing that the user would see, such as torch's about schedulers that step first."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    "plan",
    ["ddp", "fsdp", "zero1", pytest.param("ddp=2,fsdp=2", marks=pytest.mark.slow), "fsdp=2,tp=2,micro=2", "tp=4,sp"],
)
def test_three_steps_with_a_scheduler_equal_eager(plan: str) -> None:
    truth = language()
    expected = eager_steps(truth, 3, clip=0.5)
    model = language()
    optimizer = adamw(model)
    rates = schedule(optimizer)
    step = meshwright.parallelize(model, optimizer=optimizer, batch=batch(0), plan=plan, clip=0.5, virtual=4)
    for number, loss in enumerate(expected):
        found = step(batch(number))
        assert found.shape == () and found.dtype == torch.float64
        assert float(found) == pytest.approx(loss, rel=1e-12)
        assert step.norm is not None and step.norm > 0
        rates.step()
    assert step.steps == 3 and step.plan.name == plan
    close(step.full_state_dict(), truth.state_dict())
    model.load_state_dict(step.full_state_dict())  # under their own names, the tied one under both
    assert model.head.weight is model.embed.weight


def test_the_users_model_is_left_alone() -> None:
    model = language()
    step = meshwright.parallelize(model, optimizer=adamw(model), batch=batch(0), virtual=2)
    step(batch(0))
    close(dict(model.state_dict()), dict(language().state_dict()), 0.0)
    assert not any(p.grad is not None for p in model.parameters())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], dict[str, torch.Tensor]]:
    """A checkpoint after two steps, the losses of the next two, and the weights after them."""
    model = language()
    optimizer = adamw(model)
    step = meshwright.parallelize(model, optimizer=optimizer, batch=batch(0), plan="fsdp=2,tp=2", virtual=4, seed=7)
    for number in range(2):
        step(batch(number))
    place = tmp_path_factory.mktemp("kept")
    assert step.save(place).parent == place
    losses = [float(step(batch(number))) for number in (2, 3)]
    return place, losses, step.full_state_dict()


@pytest.mark.parametrize(("plan", "ranks"), [("ddp=2,tp=2", 4), ("zero1", 2), ("fsdp", 3), ("fsdp", 1)])
def test_a_checkpoint_goes_on_under_another_plan(
    plan: str, ranks: int, saved: tuple[Path, list[float], dict[str, torch.Tensor]]
) -> None:
    place, expected, weights = saved
    other = language(seed=1)  # whose weights do not count once the checkpoint is loaded
    second = meshwright.parallelize(other, optimizer=adamw(other), batch=batch(0), plan=plan, virtual=ranks)
    second.load(place)
    assert second.steps == 2
    found = [float(second(batch(number))) for number in (2, 3)]
    assert found == pytest.approx(expected, rel=1e-12)
    close(second.full_state_dict(), weights)


FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "keyword": lambda b: b,
    "positional": lambda b: (b["tokens"], b["labels"]),
    "list": lambda b: [b["tokens"], b["labels"]],
    "args and kwargs": lambda b: ((b["tokens"],), {"labels": b["labels"]}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", [None, loss_of])
def test_batches_of_every_form(form: str, loss: Callable[..., Any] | None) -> None:
    model = language()
    step = meshwright.parallelize(
        model, optimizer=adamw(model), batch=FORMS[form](batch(0)), plan="fsdp", loss=loss, virtual=4
    )
    found = [float(step(FORMS[form](batch(number)))) for number in range(2)]
    truth = language()
    optimizer = adamw(truth)
    for number, value in enumerate(found):
        optimizer.zero_grad()
        right = truth(**batch(number))["loss"]
        right.backward()
        optimizer.step()
        assert value == pytest.approx(right.item(), rel=1e-12)


def test_a_tensor_is_a_batch() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    right = (model(x) - x.sum(-1, keepdim=True)).square().mean().item()
    step = meshwright.parallelize(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        batch=x,
        loss=lambda output, inputs: (output - inputs.sum(-1, keepdim=True)).square().mean(),
        plan="ddp",
        virtual=4,
    )
    assert float(step(x)) == pytest.approx(right, rel=1e-12)
    assert float(step(x)) < right


def test_the_precision_of_a_plan_counts() -> None:
    """Weights stay in float64 at rest where the plan says so, and are computed with in bf16."""
    model = language()
    plan = dataclasses.replace(PLAN, precision=Precision("bf16", "fp64", "fp32"))
    step = meshwright.parallelize(model, optimizer=adamw(model), batch=batch(0), plan=plan, virtual=4)
    (expected,) = eager_steps(language(), 1)
    assert 1e-5 < abs(float(step(batch(0))) - expected) < 0.1
    assert step.plan.precision == plan.precision
    assert step.full_state_dict()["up.weight"].dtype == torch.float64


def both(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Adam(matrices, lr=1e-2), torch.optim.SGD(others, lr=0.1, momentum=0.9)]


def test_several_optimizers_each_with_its_scheduler() -> None:
    truth, model = language(), language()
    optimizers = both(truth), both(model)
    rates = [schedule(o) for group in optimizers for o in group]
    step = meshwright.parallelize(model, optimizer=optimizers[1], batch=batch(0), plan="fsdp", virtual=4)
    for number in range(3):
        truth.zero_grad()
        loss = truth(**batch(number))["loss"]
        loss.backward()
        for optimizer in optimizers[0]:
            optimizer.step()
        assert float(step(batch(number))) == pytest.approx(loss.item(), rel=1e-12)
        for rate in rates:
            rate.step()
    close(step.full_state_dict(), truth.state_dict())


@pytest.mark.parametrize("kind", ["preset", "plan", "path", "text of a path"])
def test_plans_of_every_kind(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(plan_to_toml(PLAN))
    plan = {"preset": "fsdp=4", "plan": PLAN, "path": file, "text of a path": str(file)}[kind]
    model: Language = language()
    step = meshwright.parallelize(model, optimizer=adamw(model), batch=batch(0), plan=plan, virtual=4)
    assert step.plan.mesh == PLAN.mesh and step.plan.storage == PLAN.storage
    (expected,) = eager_steps(language(), 1)
    assert float(step(batch(0))) == pytest.approx(expected, rel=1e-12)


def test_the_name_of_a_precision_is_the_dtype_of_computation() -> None:
    """Weights rest in fp32, as in a .mw file that says no more."""
    model = language().float()
    step = meshwright.parallelize(model, optimizer=adamw(model), batch=batch(0), precision="bf16", virtual=2)
    assert step.plan.precision == Precision("bf16", "fp32", "fp32")
    (expected,) = eager_steps(language(), 1)
    assert 1e-5 < abs(float(step(batch(0))) - expected) < 0.1
    assert step.full_state_dict()["up.weight"].dtype == torch.float32


def test_numbers_that_are_not_pythons_own() -> None:
    model = language()
    norm = numpy.float64(0.5)
    step = meshwright.parallelize(
        model, optimizer=adamw(model), batch=batch(0), clip=norm, virtual=numpy.int64(2), seed=-(2**63)
    )
    losses = [float(step(batch(number))) for number in range(2)]
    truth = language()
    optimizer = adamw(truth)
    for number, loss in enumerate(losses):
        optimizer.zero_grad()
        right = truth(**batch(number))["loss"]
        right.backward()
        torch.nn.utils.clip_grad_norm_(truth.parameters(), 0.5)
        optimizer.step()
        assert loss == pytest.approx(right.item(), rel=1e-12)


@pytest.mark.parametrize("dims", [{"0": 1}, {0: -2}])
def test_a_batch_dim_may_be_counted_from_the_end(dims: dict[Any, int]) -> None:
    model = nn.Linear(3, 1).double()
    x = torch.randn(5, 8, 3, dtype=torch.float64)
    step = meshwright.parallelize(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        batch=x,
        loss=lambda output, inputs: output.square().mean(),
        batch_dims=dims,
        plan="ddp",
        virtual=4,
    )
    assert step.rank_program.program.batch_dims == {"0": 1}
    assert float(step(x)) == pytest.approx(model(x).square().mean().item(), rel=1e-12)


def test_the_loss_is_a_number_without_a_graph() -> None:
    model = language()
    step = meshwright.parallelize(model, optimizer=adamw(model), batch=batch(0), virtual=2)
    loss = step(batch(0))
    assert not loss.requires_grad and loss.grad_fn is None


def test_the_planner_chooses() -> None:
    model = language()
    made = meshwright.parallelize(
        model, optimizer=adamw(model), batch=batch(0), plan="auto", cluster="h100x2", virtual=2
    )
    assert made.plan.mesh.ranks == 2
    assert made.plan.predicted is not None and made.plan.predicted.cluster == "h100x2"
    assert made.plan.reasons
    expected = eager_steps(language(), 1)[0]
    assert abs(float(made(batch(0))) - expected) < 1e-9


def test_a_model_and_an_optimizer_that_nobody_keeps_are_freed() -> None:
    model = language()
    optimizer = adamw(model)
    step = meshwright.parallelize(model, optimizer=optimizer, batch=batch(0), plan="fsdp", virtual=4)
    optimizer.param_groups[0]["lr"] = 0.0
    step(batch(0))
    before = step.full_state_dict()
    weights = {name: weakref.ref(p) for name, p in model.named_parameters()}
    del model, optimizer
    gc.collect()
    assert not any(w() is not None for w in weights.values())
    step(batch(1))
    after = step.full_state_dict()  # the rate that was seen last is still zero
    close({name: after[name] for name in weights}, {name: before[name] for name in weights})
