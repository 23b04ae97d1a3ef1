"""Sources: ``.mw`` files and factories give the same kind of thing, which captures, schedules and has weights."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.compiler.diagnostics import MeshwrightError, Origin
from meshwright.compiler.plan import Precision
from meshwright.compiler.train_settings import DataSettings, InitialValue, settings_from_json, settings_to_json
from meshwright.frontend import factory
from meshwright.frontend.source import Source, load_source

MW = """\
axes
    b: batch
    d = 4, e = 3

model line(x: float[b d]) -> [b e]
    param W[d e] ~ normal(0.5)
    param V[e] ~ zeros
    (x * W -> [b e]) + V

train
    loss mean(line(x) over b e)
    optimizer SGD(lr = 0.5)
    learning rate linear(warmup = 2, final = 0.5)
    batch 6
    steps 4
    seed 3
    data random
"""


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def parts(device: str = "cpu") -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
    with torch.device(device):
        model = Squares()
    return model, torch.zeros(4, 3), torch.optim.SGD(model.parameters(), lr=0.1)


def source_of(returned: Any, monkeypatch: pytest.MonkeyPatch, **keywords: Any) -> Source:
    module = types.ModuleType("made_here")
    module.make = lambda **given: returned  # type: ignore[attr-defined]  # a module made for the test
    monkeypatch.setitem(__import__("sys").modules, "made_here", module)
    return load_source("made_here:make", keywords)


@pytest.mark.parametrize("given", ["bf16", "bf16 compute, fp32 weights", Precision("bf16")])
def test_a_factory_may_return_its_precision(given: object, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, optimizer = parts()
    returned = {"model": model, "batch": batch, "optimizer": optimizer, "precision": given}
    assert source_of(returned, monkeypatch).precision == Precision("bf16", "fp32", "fp32")


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "line.mw"
    path.write_text(MW)
    source = load_source(str(path), {"batch": 8})
    assert source.description.kind == "language"
    assert source.description.text == MW
    assert source.train.initial == {"W": InitialValue("normal", (0.5,)), "V": InitialValue("constant", (0.0,))}
    assert (source.train.steps, source.train.seed, source.train.data.kind) == (4, 3, "random")
    assert source.weights() == {}  # nothing is allocated; they are drawn where they are needed
    program = source.capture()
    assert program.batch_size == 8
    assert {p.name: p.spec.shape for p in program.parameters} == {"W": (4, 3), "V": (3,)}
    rates = source.schedule(program.scalars, 4)["0/lr"]
    assert rates.tolist() == pytest.approx([0.25, 0.5, 0.5, 0.375])


@pytest.mark.parametrize("form", ["tuple", "dict", "object"])
def test_a_factory_may_return(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named = dict(zip(("model", "batch", "optimizer"), parts(), strict=True))
    returned = {"tuple": tuple(named.values()), "dict": named, "object": types.SimpleNamespace(**named)}[form]
    source = source_of(returned, monkeypatch)
    assert source.description.place == "made_here:make"
    assert set(source.weights()) == {"layer.weight", "layer.bias"}
    program = source.capture()
    assert {p.name for p in program.parameters} == {"layer.weight", "layer.bias"}
    assert source.schedule(program.scalars, 3) == {}


def test_a_factory_may_say_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    more = {"steps": 6, "seed": 2, "clip": 1.0, "scheduler": scheduler, "data": {"kind": "bytes", "path": "a"}}
    source = source_of({"model": model, "batch": batch, "optimizer": optimizer, **more}, monkeypatch)
    assert (source.train.steps, source.train.seed, source.clip) == (6, 2, 1.0)
    assert source.train.data == DataSettings("bytes", "a")
    table = source.schedule({"0/lr": 0.1}, 6)["0/lr"].tolist()
    assert table == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_the_loss_may_be_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    loss = lambda output, batch: output.square().mean()  # noqa: E731 (as a user would write it)
    source = source_of((model, torch.zeros(4, 3), torch.optim.SGD(model.parameters(), lr=1.0), loss), monkeypatch)
    assert source.capture().parameters[0].spec.shape == (2, 3)


def test_a_model_on_the_meta_device_has_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(parts("meta"), monkeypatch)
    assert source.weights() == {}
    assert source.capture().batch_size == 4


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ((1, 2), "tuple of 2"),
        (3, "there is no 'model'"),
        ({"model": nn.Linear(1, 1)}, "there is no 'batch'"),
        ({"optimiser": 3}, "unknown 'optimiser'"),
        ((nn.Linear(1, 1), torch.zeros(1), torch.optim.SGD), "of type type"),
        ((*parts(), 3), "cannot be called"),
        ({**dict(zip(("model", "batch", "optimizer"), parts(), strict=True)), "steps": "x"}, "do not fit"),
    ],
)
def test_what_a_factory_must_not_return(returned: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshwrightError, match="E0112") as caught:
        source_of(returned, monkeypatch)
    assert said in caught.value.diagnostics[0].message


@pytest.mark.parametrize("clip", [float("nan"), -1.0, 0, "much"])
def test_a_clip_that_is_none(clip: object, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, optimizer = parts()
    returned = {"model": model, "batch": batch, "optimizer": optimizer, "clip": clip}
    with pytest.raises(MeshwrightError, match=r"E0112.*the largest gradient norm is a finite number above zero"):
        source_of(returned, monkeypatch)


def test_the_line_of_the_users_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_module_one.py").write_text(
        "def inner():\n    raise ValueError('no')\n\ndef make():\n    inner()\n"
    )
    (tmp_path / "users_module_two.py").write_text("import users_module_one\n\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    for place, line in (("users_module_one:make", 2), ("users_module_two:make", 3)):
        with pytest.raises(MeshwrightError, match="E0111") as caught:
            load_source(place)
        origin = caught.value.diagnostics[0].place
        assert isinstance(origin, Origin)
        assert (Path(origin.file).parent, origin.line) == (tmp_path, line)


def test_a_missing_package_of_the_users_module_is_not_taken_for_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_module_three.py").write_text("import no_such_package_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    with pytest.raises(MeshwrightError, match=r"E0111.*no_such_package_at_all"):
        load_source("users_module_three:make")


def test_settings_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "line.mw"
    path.write_text(MW)
    settings = load_source(str(path)).train
    assert settings_from_json(settings_to_json(settings)) == settings


def test_every_field_is_explained() -> None:
    assert set(factory.FIELDS) >= {"model", "batch", "optimizer", "loss", "scheduler", "data"}
