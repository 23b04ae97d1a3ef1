"""A small training step, cut by hand: weighted linear regression with clipping and momentum.

Every variant computes the same numbers as :func:`reference` on one device. ``ddp``: parameters whole,
gradients paid in the update. ``fsdp``: parameters, gradients and state cut along the first dim over ``data``,
which is padded where 5 does not divide. With an axis ``tensor``, columns are cut over it as well.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.program import Graph, Parameter, Signature, StepProgram, TensorSpec, Value
from meshwright.compiler.graph.rank_program import Layout, LocalGraph, RankProgram
from meshwright.compiler.mesh import MICRO, Mesh, Segment, Sharding
from meshwright.compiler.plan import Plan

aten = torch.ops.aten
ROWS, IN, OUT = 8, 5, 4
X, Y, VALID = Value("batch", "x"), Value("batch", "y"), Value("batch", "valid")
W, GRADIENT, MOMENT = Value("parameter", "w"), Value("gradient", "w"), Value("state", "w/momentum")
SEEN, LR = Value("buffer", "seen"), Value("scalar", "0/lr")
WEIGHT, LOSS, NORM = Value("prologue", "weight"), Value("loss", "loss"), Value("norm", "norm")
PREDICTION = Value("result", "prediction")


class Build:
    """An FX graph by calls: ``Build(names)`` makes the placeholders, attribute access finds them."""

    def __init__(self, inputs: dict[Value, Tensor]) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[Value, fx.Node] = {}
        for value, example in inputs.items():
            node = self.graph.placeholder(f"{value.kind}_{value.name.replace('/', '_')}")
            node.meta["val"] = example
            self.nodes[value] = node

    def __call__(self, function: object, *args: object, **kwargs: object) -> fx.Node:
        return self.graph.call_function(function, args, kwargs)  # type: ignore[arg-type]

    def finish(self, outputs: dict[Value, fx.Node]) -> tuple[fx.GraphModule, Signature]:
        self.graph.output(tuple(outputs.values()))
        return fx.GraphModule(torch.nn.Module(), self.graph), Signature(tuple(self.nodes), tuple(outputs))


def program(mesh: Mesh, variant: str = "ddp", microbatches: int = 1, dtype: torch.dtype = torch.float64) -> RankProgram:
    """The rank program of a mesh with axes ``data`` and, if wanted, ``tensor``."""
    tensor = ("tensor",) if "tensor" in mesh.names else ()
    stored = ("data",) if variant == "fsdp" else ()
    axes = ("data", *tensor)
    owing = frozenset({(MICRO, "sum")})

    def rows(axes: tuple[str, ...]) -> tuple[Segment, ...]:
        return (Segment(ROWS, axes),)

    columns = (Segment(OUT, tensor),)
    kept = (Segment(microbatches), Segment(ROWS // microbatches, ("data",)))
    rest = Sharding(((Segment(IN, stored),), columns))
    computed = Sharding(((Segment(IN),), columns))
    gradient = rest if stored else rest.owing([("data", "sum")])
    example = torch.zeros((), dtype=dtype)

    b = Build({VALID: example})
    valid = b.nodes[VALID]
    count = b(aten.clamp_min.default, b(collectives.all_reduce, b(aten.sum.default, valid), ("data",), "sum"), 1)
    module, signature = b.finish({WEIGHT: b(aten.div.Tensor, valid, count)})
    prologue = LocalGraph(module, signature, {VALID: Sharding((kept,))}, {WEIGHT: Sharding((kept,))})

    b = Build({W: example, SEEN: torch.zeros((), dtype=torch.int64), X: example, Y: example, WEIGHT: example})
    w, x = b.nodes[W], b.nodes[X]
    if stored:
        w = b(collectives.all_gather, w, 0, ("data",), IN)
    predicted = b(aten.mm.default, x, w)
    difference = b(aten.sub.Tensor, predicted, b.nodes[Y])
    weighted = b(aten.mul.Tensor, difference, b(aten.unsqueeze.default, b.nodes[WEIGHT], 1))
    loss = b(aten.sum.default, b(aten.mul.Tensor, weighted, difference))
    grad = b(aten.mul.Tensor, b(aten.mm.default, b(aten.t.default, x), weighted), 2)
    if stored:
        grad = b(collectives.reduce_scatter, grad, 0, ("data",))
    seen = b(aten.add.Tensor, b.nodes[SEEN], 1)
    module, signature = b.finish({LOSS: loss, GRADIENT: grad, SEEN: seen, PREDICTION: predicted})
    cut = (MICRO, "data")
    micro = LocalGraph(
        module,
        signature,
        {
            W: rest,
            SEEN: Sharding(()),
            X: Sharding((rows(cut), (Segment(IN),))),
            Y: Sharding((rows(cut), columns)),
            WEIGHT: Sharding((rows(cut),)),
        },
        {
            LOSS: Sharding((), owing | {(a, "sum") for a in axes}),
            GRADIENT: Sharding(gradient.dims, gradient.partial | owing),
            SEEN: Sharding(()),
            PREDICTION: Sharding((rows(cut), columns)),
        },
    )

    b = Build({W: example, GRADIENT: example, MOMENT: example, LR: torch.zeros((), dtype=torch.float64)})
    grad = b.nodes[GRADIENT]
    if stored:
        grad = b(collectives.fill_padding, grad, 0, IN, stored, 0.0)
    else:
        grad = b(collectives.all_reduce, grad, ("data",), "sum")
    squares = b(aten.sum.default, b(aten.mul.Tensor, grad, grad))
    if stored or tensor:
        squares = b(collectives.all_reduce, squares, (*stored, *tensor), "sum")
    norm = b(aten.sqrt.default, squares)
    scale = b(aten.clamp_max.default, b(aten.div.Tensor, b(aten.full.default, [], 1.0, dtype=dtype), norm), 1)
    moment = b(aten.add.Tensor, b(aten.mul.Tensor, b.nodes[MOMENT], 0.9), b(aten.mul.Tensor, grad, scale))
    updated = b(aten.sub.Tensor, b.nodes[W], b(aten.mul.Tensor, moment, b.nodes[LR]))
    module, signature = b.finish({W: updated, MOMENT: moment, NORM: norm})
    update = LocalGraph(
        module,
        signature,
        {W: rest, GRADIENT: gradient, MOMENT: rest, LR: Sharding(())},
        {W: rest, MOMENT: rest, NORM: Sharding(())},
    )

    spec = TensorSpec((IN, OUT), dtype)
    empty = Graph(fx.GraphModule(torch.nn.Module(), fx.Graph()), Signature((), ()))
    whole = StepProgram(
        empty,
        empty,
        empty,
        parameters=(Parameter("w", spec, aliases=("head.w",)),),
        buffers={"seen": TensorSpec((), torch.int64)},
        batch={
            "x": TensorSpec((ROWS, IN), dtype),
            "y": TensorSpec((ROWS, OUT), dtype),
            "valid": TensorSpec((ROWS,), dtype),
        },
        batch_dims={"x": 0, "y": 0, "valid": 0},
        state={"w/momentum": spec},
        state_init={"w/momentum": 0.0},
        scalars={"0/lr": 0.1},
        constants={},
        batch_size=ROWS,
        fingerprint="toy",
    )
    layout = Layout(rest, computed, gradient, rest)
    plan = Plan(mesh, ("data",), microbatches)
    return RankProgram(whole, plan, mesh, prologue, micro, update, {"w": layout}, {"w/momentum": rest})


def weights(name: str, spec: TensorSpec) -> Tensor:
    """Fixed first weights, given under the alias of the tied parameter only."""
    if name == "head.w":
        generator = torch.Generator().manual_seed(7)
        return torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    if name == "seen":
        return torch.zeros((), dtype=torch.int64)
    raise KeyError(name)


def batch(step: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The global batch of a step; rows count unequally often on the ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(ROWS, IN, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS, OUT, generator=generator, dtype=torch.float64)
    valid = torch.tensor([1, 1, 1, 0, 0, 0, 0, 1], dtype=torch.float64)
    return {"x": x.to(dtype), "y": y.to(dtype), "valid": valid.to(dtype)}


class Reference:
    """The same training on one device, by autograd."""

    def __init__(self) -> None:
        self.w = weights("head.w", TensorSpec((IN, OUT), torch.float64))
        self.moment = torch.zeros_like(self.w)

    def step(self, batch: dict[str, Tensor], lr: float = 0.1) -> tuple[float, float, Tensor]:
        """Loss, norm and gradient."""
        w = self.w.clone().requires_grad_()
        difference = batch["x"] @ w - batch["y"]
        loss = (difference.square() * batch["valid"][:, None]).sum() / batch["valid"].sum().clamp(min=1)
        loss.backward()
        assert w.grad is not None
        norm = w.grad.norm()
        self.moment = 0.9 * self.moment + w.grad * (1 / norm).clamp(max=1)
        self.w = self.w - lr * self.moment
        return float(loss.detach()), float(norm), w.grad


__all__ = ["Reference", "batch", "program", "weights"]
