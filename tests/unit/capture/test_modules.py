"""Small modules whose captured step must equal eager PyTorch to 1e-12 in loss, gradients, weights and buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.capture.against_eager import compare, sgd

DOUBLE = torch.float64


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def module(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return build().double()


class Apply(nn.Module):
    """A module from a function of (module, x), with some parameters."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


CONTRACTIONS: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], dict[str, tuple[int, ...]]]] = {
    "linear": (lambda m, x: F.linear(x, m.w, m.b), {"w": (5, 3), "b": (5,)}),
    "matmul": (lambda m, x: x @ m.w, {"w": (3, 5)}),
    "matmul of batches": (lambda m, x: x @ m.w, {"w": (4, 3, 2)}),
    "matmul that broadcasts": (lambda m, x: x.unsqueeze(1) @ m.w, {"w": (2, 3, 5)}),
    "matmul that broadcasts a dim of size 1": (lambda m, x: x @ m.w, {"w": (1, 3, 2)}),
    "matmul with a vector": (lambda m, x: x @ m.w, {"w": (3,)}),
    "matmul of a vector": (lambda m, x: m.w @ x, {"w": (6,)}),
    "mm": (lambda m, x: torch.mm(x[:, 0], m.w), {"w": (3, 5)}),
    "bmm": (lambda m, x: torch.bmm(x, m.w), {"w": (4, 3, 2)}),
    "addmm": (lambda m, x: torch.addmm(m.b, x[:, 0], m.w, beta=0.5, alpha=2), {"w": (3, 5), "b": (5,)}),
    "baddbmm": (lambda m, x: torch.baddbmm(m.b, x, m.w, alpha=0.3), {"w": (4, 3, 2), "b": (2,)}),
    "mv": (lambda m, x: torch.mv(x[0], m.w), {"w": (3,)}),
    "dot": (lambda m, x: torch.dot(x[0, 0], m.w), {"w": (3,)}),
    "einsum": (lambda m, x: torch.einsum("btd,dhc->bhtc", x, m.w), {"w": (3, 2, 5)}),
    "einsum with an ellipsis": (lambda m, x: torch.einsum("...d,do->...o", x, m.w), {"w": (3, 5)}),
    "einsum without a result": (lambda m, x: torch.einsum("btd,do", x, m.w), {"w": (3, 5)}),
    "einsum of three": (lambda m, x: torch.einsum("btd,do,to->b", x, m.w, m.v), {"w": (3, 5), "v": (6, 5)}),
    "einsum that sums one operand alone": (lambda m, x: torch.einsum("btd,eo->bo", x, m.w), {"w": (3, 5)}),
    "einsum with a diagonal": (lambda m, x: torch.einsum("btd,dd->bt", x, m.w), {"w": (3, 3)}),
    "tensordot": (lambda m, x: torch.tensordot(x, m.w, dims=2), {"w": (6, 3, 2)}),
    "patches": (lambda m, x: F.conv2d(x.view(4, 1, 6, 3), m.w, m.b, stride=(2, 3)), {"w": (5, 1, 2, 3), "b": (5,)}),
    "patches in one dim": (lambda m, x: F.conv1d(x.transpose(1, 2), m.w, stride=2), {"w": (5, 3, 2)}),
    "convolution": (lambda m, x: F.conv1d(x.transpose(1, 2), m.w, m.b, padding=1), {"w": (5, 3, 3), "b": (5,)}),
}


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contraction(name: str) -> None:
    function, shapes = CONTRACTIONS[name]
    model = module(lambda: Apply(lambda m, x: function(m, x * m.scale).sin().sum(), scale=(3,), **shapes))
    found = compare(model, (randn(4, 6, 3),), steps=1)
    targets = {str(n.target) for n in found.program.micro.module.graph.nodes if n.op == "call_function"}
    assert not targets & {
        f"aten.{op}.default" for op in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "linear", "matmul")
    }
    if name != "convolution":
        assert "meshwright.einsum.default" in targets
        assert "aten.convolution.default" not in targets


FUNCTIONS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "mean": lambda m, x: (x * m.w).sin().mean(),
    "mean over dims": lambda m, x: (x * m.w).sin().mean((0, 2), keepdim=True).cos().sum(),
    "variance": lambda m, x: (x * m.w).var(-1).sum() + (x * m.w).std((0, 1), unbiased=False).sum(),
    "variance and mean": lambda m, x: sum(t.sin().sum() for t in torch.var_mean(x * m.w, 1)),
    "layer norm": lambda m, x: F.layer_norm(x, (3,), m.w, m.v).sin().sum(),
    "rms norm": lambda m, x: F.rms_norm(x * m.v, (3,), m.w, 1e-5).sin().sum(),
    "rms norm without eps": lambda m, x: F.rms_norm(x * m.v, (6, 3)).sin().sum(),
    "average over all": lambda m, x: F.adaptive_avg_pool1d((x * m.w).transpose(1, 2), 1).sin().sum(),
    "average pool": lambda m, x: F.adaptive_avg_pool1d((x * m.w).transpose(1, 2), 2).sin().sum(),
    "Fourier transform": lambda m, x: torch.fft.rfft(x * m.w, dim=1).abs().sin().sum(),
    "group norm": lambda m, x: F.group_norm((x * m.w).reshape(4, 6, 3), 2, m.six, m.six).sin().sum(),
    "instance norm": lambda m, x: F.instance_norm(x * m.w).sin().sum(),
    "batch norm without statistics": lambda m, x: F.batch_norm(x * m.w, None, None, m.six, training=True).sin().sum(),
    "gelu": lambda m, x: F.gelu(x * m.w).sum() + F.gelu(x * m.w, approximate="tanh").sum(),
    "in place": lambda m, x: (x * m.w).add_(1).mul_(2.0).relu_().sum(),
    "write into a view": lambda m, x: written(x * m.w),
    "no_grad": lambda m, x: (x * m.w * stopped(m, x)).sum(),
    "detach": lambda m, x: (x * m.w * (x * m.w).detach()).sum(),
    "checkpoint": lambda m, x: checkpointed(m, x),
    "cumsum": lambda m, x: (x * m.w).cumsum(1).sin().sum(),
    "softmax": lambda m, x: (torch.softmax(x * m.w, -1) ** 2).sum() + F.log_softmax(x * m.w, 1).sum(),
    "constant tensor": lambda m, x: (x * m.w * torch.tensor([1.0, 2.0, 3.0], dtype=DOUBLE)).sum(),
    "half": lambda m, x: (x.float() * m.w).double().sum(),
}


def written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = y[:, 1] * 2
    y[:, 2:4].add_(1.5)
    return y.sin().sum()


def stopped(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return (x * m.w).sin()


def checkpointed(m: nn.Module, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda y: (y * m.w).sin().sum(), x, use_reentrant=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    model = module(lambda: Apply(FUNCTIONS[name], w=(3,), v=(3,), six=(6,)))
    compare(model, (randn(4, 6, 3),), steps=1)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda x, c, p: F.cross_entropy(x, c),
    "cross entropy, sum": lambda x, c, p: F.cross_entropy(x, c, reduction="sum"),
    "cross entropy, none": lambda x, c, p: (F.cross_entropy(x, c, reduction="none") * p[:, 0]).sum(),
    "cross entropy, ignored": lambda x, c, p: F.cross_entropy(x, c, ignore_index=2),
    "cross entropy, smooth": lambda x, c, p: F.cross_entropy(x, c, label_smoothing=0.2, ignore_index=2),
    "cross entropy, class weights": lambda x, c, p: F.cross_entropy(x, c, weight=torch.arange(1.0, 6, dtype=DOUBLE)),
    "cross entropy, all": lambda x, c, p: F.cross_entropy(
        x, c, weight=torch.arange(1.0, 6, dtype=DOUBLE), label_smoothing=0.1, ignore_index=1
    ),
    "cross entropy, probabilities": lambda x, c, p: F.cross_entropy(x, p, label_smoothing=0.1),
    "cross entropy, classes in dim 1": lambda x, c, p: F.cross_entropy(x.view(2, 4, 5).mT, c.view(2, 4)),
    "nll of log_softmax": lambda x, c, p: F.nll_loss(F.log_softmax(x, -1), c, ignore_index=2),
    "nll": lambda x, c, p: F.nll_loss(-(x * x), c),
    "mse": lambda x, c, p: F.mse_loss(x, p),
    "l1": lambda x, c, p: F.l1_loss(x, p, reduction="sum"),
    "huber": lambda x, c, p: F.huber_loss(x, p, delta=0.4),
    "smooth l1": lambda x, c, p: F.smooth_l1_loss(x, p),
    "bce": lambda x, c, p: F.binary_cross_entropy(torch.sigmoid(x), p),
    "bce with logits": lambda x, c, p: F.binary_cross_entropy_with_logits(x, p, pos_weight=2 + p[0]),
    "kl": lambda x, c, p: F.kl_div(F.log_softmax(x, -1), p, reduction="batchmean"),
}


class Scorer(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.loss = loss

    def forward(self, x: Tensor, classes: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.linear(x), classes, target)


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str) -> None:
    classes = torch.tensor([0, 2, 4, 1, 2, 3, 3, 0])
    target = torch.softmax(randn(8, 5, seed=2), -1)
    found = compare(module(lambda: Scorer(LOSSES[name])), (randn(8, 3), classes, target))
    targets = [str(n.target) for n in found.program.micro.module.graph.nodes]
    assert not any("mean" in t or "nll_loss" in t or "mse_loss" in t for t in targets), "an average is hidden in an op"


def test_count_of_valid_targets_goes_to_the_prologue() -> None:
    model = module(lambda: Scorer(lambda x, c, p: F.cross_entropy(x, c, ignore_index=2)))
    classes = torch.tensor([0, 2, 4, 1, 2, 3, 3, 0])
    found = compare(model, (randn(8, 3), classes, randn(8, 5)))
    (value,) = found.results[0].prologue.values()
    assert value.item() == 6
    assert [v.name for v in found.program.prologue.signature.inputs] == ["1"]
    assert [v.kind for v in found.program.micro.signature.inputs].count("prologue") == 1


def test_no_valid_target_is_a_loss_of_zero() -> None:
    """Eager PyTorch gives NaN here; the count is kept at least 1, so that one empty batch does not end a run."""
    from meshwright.compiler.graph.single import run_single
    from meshwright.frontend.capture import capture

    model = module(lambda: Scorer(lambda x, c, p: F.cross_entropy(x, c)))
    batch = (randn(8, 3), torch.full((8,), -100), randn(8, 5))
    program = capture(model, batch, optimizer=sgd(model))
    values = {str(i): t for i, t in enumerate(batch)}
    result = run_single(program, {n: p.detach() for n, p in model.named_parameters()}, {}, None, values)
    assert result.loss == 0
    assert all(not g.any() for g in result.gradients.values())


class Tied(nn.Module):
    """Embedding and head are one parameter, used a third time under its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=1)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens) * self.frozen + self.embed.weight.sum(0)
        return F.cross_entropy(self.head(x.sin()).flatten(0, 1), labels.flatten())


def test_tied_frozen_and_unused_parameters() -> None:
    tokens = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(0))
    found = compare(
        module(Tied), {"tokens": tokens, "labels": tokens}, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1)
    )
    parameters = {p.name: p for p in found.program.parameters}
    assert list(parameters) == ["frozen", "unused", "embed.weight"]
    assert parameters["embed.weight"].aliases == ("head.weight",)
    assert found.program.parameter("head.weight").name == "embed.weight"
    assert not parameters["frozen"].trainable
    assert set(found.results[0].gradients) == {"embed.weight"}
    assert set(found.program.state) == {f"embed.weight/{entry}" for entry in ("step", "exp_avg", "exp_avg_sq")}


def test_batch_norm_and_its_buffers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3, padding=1)
            self.norm = nn.BatchNorm2d(3, momentum=0.3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)).relu().mean()

    found = compare(module(Net), (randn(4, 2, 5, 5),), steps=3)
    outputs = [v.name for v in found.program.micro.signature.outputs if v.kind == "buffer"]
    assert sorted(outputs) == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    assert not any("batch_norm" in str(n.target) for n in found.program.micro.module.graph.nodes)
    frozen = module(Net).eval()
    assert not any(v.kind == "buffer" for v in compare(frozen, (randn(4, 2, 5, 5),)).program.micro.signature.outputs)


def test_buffer_written_in_forward() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(x.detach().sum(0))
            return (x * self.w * self.seen).sum()

    compare(module(Counter), (randn(4, 3),), steps=3)


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


def test_dataclass_output_and_nested_batch() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, inputs: dict[str, Tensor], scale: float) -> Output:
            y = self.linear(inputs["x"]) * scale
            return Output(((y - inputs["y"]) ** 2).mean(), y)

    x, y = randn(4, 3), randn(4, 1, seed=1)
    batch = ((), {"inputs": {"x": x, "y": y}, "scale": 2.0})
    model = module(Net)
    named = {"inputs.x": x, "inputs.y": y}
    found = compare(model, batch, eager=lambda m: m({"x": x, "y": y}, 2.0).loss, named=named)
    assert set(found.program.batch) == set(named)
    assert found.program.batch_size == 4


def test_loss_function_gets_the_rest_of_the_batch() -> None:
    x, y = randn(4, 3), randn(4, 2, seed=1)
    model = module(lambda: nn.Linear(3, 2))
    compare(model, (x, y), loss=lambda out, batch: F.mse_loss(out, batch[1]), eager=lambda m: F.mse_loss(m(x), y))
    compare(
        model,
        {"input": x, "target": y},
        loss=lambda out, batch: F.mse_loss(out, batch["target"]),
        eager=lambda m: F.mse_loss(m(x), y),
    )


def test_labels_are_for_the_loss_function() -> None:
    """A model that could compute its own loss from labels gives its outputs when a loss function is given."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor, scale: float = 1.0, labels: Tensor | None = None) -> Tensor:
            y = self.linear(x) * scale
            return y if labels is None else F.mse_loss(y, labels) * 7

    x, y = randn(4, 3), randn(4, 2, seed=1)
    model, named = module(Own), {"x": x, "labels": y}
    for batch in ({**named, "scale": 2.0}, ((), {**named, "scale": 2.0})):
        compare(
            model,
            batch,
            loss=lambda out, given: F.mse_loss(out, (given if isinstance(given, dict) else given[1])["labels"]),
            eager=lambda m: F.mse_loss(m(x, 2.0), y),
            named=named,
        )


def test_capture_leaves_the_model_as_it_was() -> None:
    model = module(Tied)
    before = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters(remove_duplicate=False)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    from meshwright.frontend.capture import capture

    tokens = torch.zeros(4, 6, dtype=torch.int64)
    capture(model, (tokens, tokens), optimizer=optimizer)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert (id(parameter), True) == (before[name][0], torch.equal(parameter, before[name][1]))
    assert model.head.weight is model.embed.weight
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.1
