"""For random programs, meshes and placements the partitioned value is the global one."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.compiler.mesh import Mesh, Segment, Sharding
from tests.partitioned import partition, run_on_ranks, traced

EINSUM = torch.ops.meshwright.einsum.default
SIZES = {"b": 6, "t": 4, "d": 8, "f": 5}


def _ops() -> list[tuple[str, object]]:
    """``[b t d] -> [b t d]`` steps with one weight ``[d f]``; sizes that do not divide among them."""
    return [
        ("mlp", lambda x, w, key: EINSUM("btf,df->btd", torch.relu(EINSUM("btd,df->btf", x, w)), w)),
        ("softmax", lambda x, w, key: torch.softmax(x, -1)),
        ("softmax over time", lambda x, w, key: torch.softmax(x, 1)),
        ("residual", lambda x, w, key: x + EINSUM("btf,df->btd", EINSUM("btd,df->btf", x, w), w)),
        (
            "two branches",
            lambda x, w, key: (
                (x + EINSUM("btf,df->btd", EINSUM("btd,df->btf", x, w), w))
                + EINSUM("btf,df->btd", torch.tanh(EINSUM("btd,df->btf", x, w)), w)
            ),
        ),
        ("norm", lambda x, w, key: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1)),
        ("flatten", lambda x, w, key: torch.tanh(x.reshape(24, 8)).reshape(6, 4, 8)),
        ("heads", lambda x, w, key: (x.reshape(6, 4, 2, 4).transpose(1, 2) * 2).transpose(1, 2).reshape(6, 4, 8)),
        ("merge and split", lambda x, w, key: x.reshape(6, 32).sigmoid().reshape(6, 8, 4).transpose(1, 2)),
        ("slices", lambda x, w, key: torch.cat([-x[..., 4:], x[..., :4]], -1)),
        ("fused halves", lambda x, w, key: x[..., :4].repeat(1, 1, 2) * x),
        ("mean of batch", lambda x, w, key: x - x.sum(0, keepdim=True) * (1 / 6)),
        ("scores", lambda x, w, key: EINSUM("bts,bsd->btd", EINSUM("btd,bsd->bts", x, x), x) * 0.01),
        ("log sum", lambda x, w, key: x + torch.ops.meshwright.logsumexp.default(x).unsqueeze(-1)),
        ("max", lambda x, w, key: x - x.amax(1, keepdim=True)),
        ("where", lambda x, w, key: torch.where(x > 0, x, torch.zeros_like(x)) + 1.0),
        ("dropout", lambda x, w, key: torch.ops.meshwright.dropout.default(x, key, 0.3, 7, [], [])),
    ]


OPS = dict(_ops())
MESHES = [Mesh((("a", 2),)), Mesh((("a", 3),)), Mesh((("a", 2), ("b", 2))), Mesh((("a", 4), ("b", 2)))]


@st.composite
def shardings(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> Sharding:
    """A random cut: each axis on one dim or none, padded where it does not divide."""
    cuts: list[tuple[str, ...]] = [() for _ in shape]
    for axis in mesh.names:
        where = draw(st.integers(-1, len(shape) - 1))
        if where >= 0:
            cuts[where] = (*cuts[where], axis)
    return Sharding(tuple((Segment(n, c),) for n, c in zip(shape, cuts, strict=True)))


@given(data=st.data())
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
def test_partitioned_value_is_the_global_one(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES), label="mesh")
    names = data.draw(st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=4), label="ops")
    x_cut = data.draw(shardings(mesh, (6, 4, 8)), label="x")
    w_cut = data.draw(shardings(mesh, (8, 5)), label="w")
    sequence = frozenset(data.draw(st.lists(st.sampled_from(mesh.names), unique=True), label="sequence"))

    def program(x: Tensor, w: Tensor, key: Tensor) -> list[Tensor]:
        for name in names:
            x = OPS[name](x, w, key)  # type: ignore[operator]
        return [x, (x * x).sum()]

    torch.manual_seed(0)
    inputs = {"x": torch.randn(6, 4, 8, dtype=torch.float64), "w": torch.randn(8, 5, dtype=torch.float64)}
    inputs["key"] = torch.tensor([3, 1])
    expected = program(*inputs.values())
    local = partition(traced(program, inputs), mesh, {"x": x_cut, "w": w_cut}, sequence=sequence)
    for found, right in zip(run_on_ranks(local, mesh, inputs), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)
