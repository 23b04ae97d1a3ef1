"""What a captured step promises besides its numbers: dropout by element, precision, meta models, fingerprints."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from meshwright.compiler.graph.program import StepProgram, Value
from meshwright.compiler.graph.single import run_graph, run_single
from meshwright.compiler.plan import Precision
from meshwright.frontend.capture import capture
from tests.unit.capture.against_eager import compare, sgd


class Dropper(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 5))
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return (F.dropout(x * self.w, self.p, self.training) ** 2).sum()


def run(program: StepProgram, model: nn.Module, x: Tensor, seed: int, step: int) -> dict[str, Tensor]:
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return run_single(program, weights, {}, None, {"0": x}, seed, step).gradients


def test_gradient_is_zero_exactly_where_forward_dropped() -> None:
    """Field case T04: backward uses the mask of forward, made anew from the key."""
    model = Dropper()
    x = torch.randn(8, 5).abs() + 1
    program = capture(model, (x,), optimizer=sgd(model))
    grad = run(program, model, x, 3, 0)["w"]
    kept = torch.ops.meshwright.dropout(torch.ones(8, 5), torch.tensor([3, 0]), 0.5, 0, [], []) != 0
    assert torch.equal(grad != 0, kept) and 0 < kept.sum() < 40
    assert torch.equal(grad, run(program, model, x, 3, 0)["w"])
    assert not torch.equal(grad != 0, run(program, model, x, 3, 1)["w"] != 0)
    assert not torch.equal(grad != 0, run(program, model, x, 4, 0)["w"] != 0)


def test_two_sites_have_masks_of_their_own() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8, 5))

        def forward(self, x: Tensor) -> Tensor:
            return (F.dropout(x * self.w, 0.5) * 2 + F.dropout(x * self.w, 0.5)).sum()

    model = Twice()
    x = torch.ones(8, 5)
    grad = run(capture(model, (x,)), model, x, 0, 0)["w"]
    assert set(grad.unique().tolist()) == {0.0, 2.0, 4.0, 6.0}


@pytest.mark.parametrize("model", [Dropper(0.0), Dropper().eval()], ids=["p = 0", "eval"])
def test_dropout_that_drops_nothing_vanishes(model: nn.Module) -> None:
    program = capture(model, (torch.ones(8, 5),))
    assert not any("dropout" in str(n.target) for n in program.micro.module.graph.nodes)
    assert not any(v.kind == "key" for v in program.micro.signature.inputs)


class Mixed(nn.Module):
    """A model that goes through float32 by itself, as many norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(16, 32)
        self.two = nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.one(x).tanh()
        h = (h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)
        return F.cross_entropy(self.two(h), y)


def test_precision() -> None:
    torch.manual_seed(0)
    model = Mixed()
    batch = (torch.randn(8, 16), torch.randint(4, (8,)))
    program = capture(
        model, batch, optimizer=torch.optim.AdamW(model.parameters()), precision=Precision(compute="bf16")
    )
    products = [n for n in program.micro.module.graph.nodes if str(n.target) == "meshwright.einsum.default"]
    assert {n.meta["val"].dtype for n in products} == {torch.bfloat16}
    kinds = {v: n.meta["val"].dtype for v, n in program.micro.outputs().items()}
    assert set(kinds.values()) == {torch.float32}, "loss and gradients are fp32"
    assert {s.dtype for n, s in program.state.items() if "exp" in n} == {torch.float32}
    exact = capture(model, batch)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    named = {"0": batch[0], "1": batch[1]}
    low, high = (run_single(p, weights, {}, None, named) for p in (program, exact))
    assert low.loss.item() == pytest.approx(high.loss.item(), rel=2e-2)
    for name, grad in high.gradients.items():
        torch.testing.assert_close(low.gradients[name], grad, rtol=0.1, atol=0.02)
    half = capture(model, batch, optimizer=sgd(model), precision=Precision("bf16", "bf16", "fp32"))
    assert {p.spec.dtype for p in half.parameters} == {torch.bfloat16}
    assert {n.meta["val"].dtype for v, n in half.micro.outputs().items() if v.kind == "gradient"} == {torch.float32}


def llama(layers: int, device: str) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).train()


def test_meta_model_is_captured_without_weights() -> None:
    """Two layers of the shape of Llama 8B: 1.5 billion parameters, none of them in memory."""
    model = llama(2, "meta")
    tokens = torch.empty(8, 4096, dtype=torch.int64, device="meta")
    begun = time.process_time()
    program = capture(
        model,
        {"input_ids": tokens, "labels": tokens},
        optimizer=torch.optim.AdamW(model.parameters()),
        clip=1.0,
        precision=Precision(compute="bf16"),
    )
    assert time.process_time() - begun < 60
    assert sum(torch.Size(p.spec.shape).numel() for p in program.parameters) > 1.4e9
    assert program.batch_size == 8
    (attention, _) = (n for n in program.micro.module.graph.nodes if str(n.target) == "meshwright.attention.default")
    assert attention.args[5] is True and attention.meta["meshwright"].block == "model.layers.0"
    assert all(p.device.type == "meta" for p in model.parameters())


def test_fingerprint() -> None:
    def of(width: int, p: float = 0.5) -> str:
        torch.manual_seed(width)
        model = nn.Sequential(nn.Linear(3, width), nn.Dropout(p), nn.Linear(width, 1))
        batch = (torch.ones(4, 3),)
        return capture(model, batch, optimizer=sgd(model), loss=lambda out, _: out.sum()).fingerprint

    assert of(4) == of(4) and len({of(4), of(5), of(4, 0.4)}) == 3


def test_batch_dims() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x: Tensor, table: Tensor, last: Tensor) -> Tensor:
            return (x * self.w * table.sum(0) * last.sum(0).unsqueeze(-1)).sum()

    x, table, last = (torch.ones(s, dtype=torch.float64) for s in ((4, 3), (5, 3), (2, 4)))
    program = compare(Shared(), (x, table, last), batch_dims={"2": 1}).program
    assert program.batch_dims == {"0": 0, "1": None, "2": 1}
    assert not program.prologue.signature.outputs


class Weighted(nn.Module):
    """A loss weighted by what the whole batch says of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return ((x * self.w).sin().sum(-1) * weight / weight.sum()).sum() + weight.max() * self.w.sum()


def test_values_of_the_batch_alone_go_to_the_prologue() -> None:
    x, weight = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    found = compare(Weighted(), (x, weight))
    prologue = found.program.prologue
    assert [v.name for v in prologue.signature.inputs] == ["1"]
    values = run_graph(prologue, {Value("batch", "1"): weight})
    assert sorted(v.item() for v in values.values()) == pytest.approx(
        sorted([weight.sum().item(), weight.max().item()])
    )
    assert {n.meta["meshwright"].phase for n in prologue.module.graph.nodes if n.op == "call_function"} == {"prologue"}


def test_constant_factories_stay_in_micro() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.table(torch.arange(x.shape[1]))).sin().mean()

    found = compare(Positions().double(), (torch.randn(4, 6, 3, dtype=torch.float64),))
    assert not found.program.prologue.signature.outputs and not found.program.constants
