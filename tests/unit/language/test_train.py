"""The `train` and `parallel` sections and what `load` makes of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.plan import Precision
from meshwright.frontend.language import LoadedFile, load, load_text

EXAMPLES = Path(__file__).parents[3] / "examples"

MODEL = """axes
    b: batch
    t: time = 6
    d = 4, f = 8
    vocab = 300

model lm(tokens: int[b t]) -> [b t vocab]
    param E[vocab d] ~ normal(1)
    param W[d f], V[f d] ~ normal(1)
    relu(E[tokens] * W) * V * E -> [b t vocab]

train
    loss cross_entropy(lm(tokens) over vocab, next(tokens over t))
    optimizer {optimizer}
    learning rate {schedule}
    batch 4
    steps 10
    data {data}
"""


def loaded(
    optimizer: str = "SGD(lr = 2)", schedule: str = "constant", data: str = "random", more: str = ""
) -> LoadedFile:
    text = MODEL.format(optimizer=optimizer, schedule=schedule, data=data) + more
    return load_text(text, "folder/lm.mw")


def rates(file: LoadedFile, steps: int) -> list[float]:
    """The learning rate at each step of a run."""
    assert file.train is not None
    module = file.loss_module()
    optimizer = file.train.make_optimizer(module)
    scheduler = file.train.make_scheduler(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_schedules() -> None:
    assert rates(loaded(), 3) == [2, 2, 2]
    assert rates(loaded(schedule="constant(warmup = 4)"), 6) == [0.5, 1.0, 1.5, 2, 2, 2]
    linear = rates(loaded(schedule="linear(warmup = 2, final = 0.5)"), 12)
    assert linear[:3] == [1, 2, 2] and linear[6] == pytest.approx(1.5) and linear[10] == linear[11] == pytest.approx(1)
    cosine = rates(loaded(schedule="cosine(steps = 8)"), 10)
    assert cosine == pytest.approx([1 + math.cos(math.pi * min(i, 8) / 8) for i in range(10)])
    assert rates(loaded(schedule="StepLR(step_size = 2, gamma = 0.5)"), 5) == [2, 2, 1, 1, 0.5]


def test_optimizer_by_name_with_arguments() -> None:
    file = loaded("NAdam(lr = 1e-2, betas = (0.8, 0.9), decoupled_weight_decay = true)")
    assert file.train is not None
    optimizer = file.train.make_optimizer(file.module())
    assert isinstance(optimizer, torch.optim.NAdam)
    group = optimizer.param_groups[0]
    assert group["betas"] == (0.8, 0.9) and group["decoupled_weight_decay"] is True and len(group["params"]) == 3


def test_optimizer_that_refuses_the_parameters() -> None:
    text = (
        (EXAMPLES / "gpt.mw")
        .read_text()
        .replace("AdamW(lr = 2e-3, betas = (0.9, 0.95), weight_decay = 0.1)", "Muon(lr = 1)")
    )
    file = load_text(text, "gpt.mw")
    assert file.train is not None
    with pytest.raises(MeshwrightError, match="E0219"):
        file.train.make_optimizer(file.module("meta"))


def test_data_and_defaults() -> None:
    file = loaded(data='tokens("c.bin", uint16)')
    assert file.train is not None
    train = file.train
    assert (train.data.kind, train.data.path, train.data.dtype) == ("tokens", "folder/c.bin", "uint16")
    assert train.data.vocabulary == 300
    assert (train.clip, train.seed, train.checkpoint_every) == (None, 0, None)
    assert train.precision == Precision("fp32", "fp32", "fp32")
    more = "    clip 2\n    seed 5\n    checkpoint every 3\n    precision bf16 compute, fp64 reductions\n"
    other = loaded(more=more).train
    assert other is not None
    assert (other.clip, other.seed, other.checkpoint_every) == (2.0, 5, 3)
    assert other.precision == Precision("bf16", "fp32", "fp64")


def test_example_batch_fits_the_model() -> None:
    file = loaded()
    batch = file.example_batch()
    assert batch["tokens"].shape == (4, 6) and batch["tokens"].dtype == torch.int64
    assert batch["tokens"].max() < 300
    assert file.example_batch("meta")["tokens"].device.type == "meta"
    assert torch.equal(file.example_batch()["tokens"], batch["tokens"])
    assert file.loss_module()(**batch).shape == ()


def test_overrides() -> None:
    path = str(EXAMPLES / "gpt.mw")
    file = load(path, {"layers": 1, "d": 8, "t": 5, "batch": 2, "steps": 7, "clip": 0.5, "seed": 9})
    assert file.train is not None
    assert (file.train.batch, file.train.steps, file.train.clip, file.train.seed) == (2, 7, 0.5, 9)
    assert file.example_batch()["tokens"].shape == (2, 5)
    assert file.dimensions.sizes["f"] == 32 and "layers.1.mlp.W1" not in file.parameter_axes
    with pytest.raises(MeshwrightError, match="did you mean 'layers'"):
        load(path, {"layer": 1})


@pytest.mark.parametrize(("name", "value"), [("d", 0), ("layers", 0), ("layers", 1.5), ("batch", 0), ("clip", -1)])
def test_overrides_are_checked_too(name: str, value: float) -> None:
    with pytest.raises(MeshwrightError, match=name):
        load(str(EXAMPLES / "gpt.mw"), {name: value})


def test_parallel_section() -> None:
    more = """
parallel
    mesh data = 2, tensor = 3
    shard weights, gradients on data
    shard f on tensor
    shard b on data
    sequence on tensor
    microbatches 4
"""
    parallel = loaded(more=more).parallel
    assert parallel is not None
    assert parallel.mesh == (("data", 2), ("tensor", 3))
    assert {axis: p.on for axis, p in parallel.shard.items()} == {"f": ("tensor",), "b": ("data",)}
    assert {kind: p.on for kind, p in parallel.storage.items()} == {"weights": ("data",), "gradients": ("data",)}
    assert parallel.sequence is not None and parallel.sequence.on == ("tensor",)
    assert parallel.sequence.span.text.strip() == "sequence on tensor"
    assert parallel.microbatches == 4
    assert loaded().parallel is None


@pytest.mark.parametrize(
    ("pin", "patterns"),
    [("attention", ["layers.*.attention"]), ("mlp, attention", ["layers.*.mlp", "layers.*.attention"]),
     ("layers", ["layers.*"])],
)  # fmt: skip
def test_what_is_recomputed(pin: str, patterns: list[str]) -> None:
    text = (EXAMPLES / "gpt.mw").read_text() + f"\nparallel\n    mesh data = 2\n    recompute {pin}\n"
    file = load_text(text, "gpt.mw")
    assert list(file.recomputed) == patterns and not file.warnings


def test_what_is_not_called_cannot_be_recomputed() -> None:
    text = (EXAMPLES / "gpt.mw").read_text()
    text = text.replace("\nmodel ", "\ndef other(x[b t d]) -> [b t d]\n    gelu(x)\n\nmodel ", 1)
    file = load_text(text + "\nparallel\n    mesh data = 2\n    recompute other\n", "gpt.mw")
    assert [w.code for w in file.warnings] == ["W0201"] and not file.recomputed


def test_an_unknown_name_cannot_be_recomputed() -> None:
    text = (EXAMPLES / "gpt.mw").read_text() + "\nparallel\n    recompute atention\n"
    with pytest.raises(MeshwrightError, match="did you mean 'attention'"):
        load_text(text, "gpt.mw")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="E0109"):
        load(str(tmp_path / "absent.mw"))
    (tmp_path / "bad.mw").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MeshwrightError, match="E0109"):
        load(str(tmp_path / "bad.mw"))


def test_file_without_train_has_a_module_but_no_loss() -> None:
    text = MODEL[: MODEL.index("train")]
    file = load_text(text, "lm.mw")
    assert file.train is None and file.module()(**file.example_batch()).shape == (2, 6, 300)
    with pytest.raises(MeshwrightError, match="E0220"):
        file.loss_module()
