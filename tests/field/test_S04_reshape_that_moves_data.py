"""S04: a view that needs communication is treated as free.

Reported: a view that merges a sharded inner dimension and splits it anew was declared a plain shard, and the tensor put
together again differed from the reference; with two mesh axes on one dimension, unflatten gave a wrong shape or
silently wrong gradients.
https://github.com/pytorch/pytorch/issues/179502
https://github.com/pytorch/pytorch/pull/186282
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import meshwright
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.mesh import Mesh, Segment, Sharding, parse_sharding
from tests.partitioned import collective_names, on_ranks

FOUR = Mesh((("a", 4),))
TWO_BY_TWO = Mesh((("a", 2), ("b", 2)))


def viewed(mesh: Mesh, shape: tuple[int, ...], sharding: Sharding, target: tuple[int, ...]) -> list[str]:
    """View a tensor that lies so in another shape, and check the whole result. Returns the collectives that it took."""
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    graph = make_fx(lambda x: (x.reshape(target) * 2,))(x)
    local = meshwright.transform(graph, mesh=mesh, inputs={"x_1": sharding})
    (found,) = on_ranks(local, mesh, [x], [sharding], [Sharding.whole(target)])
    assert torch.equal(found, x.reshape(target) * 2), f"{sharding} viewed as {target}"
    return collective_names(local)


def test_merge_and_split_of_a_cut_inner_dim() -> None:
    """The reported case: [12, 8] cut along dim 1, viewed as [16, 6], which is no shard of the result."""
    viewed(FOUR, (12, 8), parse_sharding("[12, 8@a]"), (16, 6))
    graph = make_fx(lambda x: (x.reshape(16, 6),))(torch.ones(12, 8))
    local = meshwright.transform(graph, mesh=FOUR, inputs={"x_1": "[12, 8@a]"}, outputs={0: "[16@a, 6]"})
    order = [getattr(n.target, "__name__", "") for n in local.graph.nodes]
    assert collective_names(local) == ["all_gather"]
    assert order.index("all_gather") < order.index("reshape.default")


def test_a_view_along_the_cut_is_free_until_somebody_wants_it_whole() -> None:
    took = viewed(FOUR, (12, 8), parse_sharding("[12@a, 8]"), (4, 3, 8))
    assert took == ["all_gather"]  # of the result alone
    graph = make_fx(lambda x: (x.reshape(4, 3, 8),))(torch.ones(12, 8))
    local = meshwright.transform(graph, mesh=FOUR, inputs={"x_1": "[12@a, 8]"}, outputs={0: "[4@a, 3, 8]"})
    assert collective_names(local) == []
    elsewhere = meshwright.transform(graph, mesh=FOUR, inputs={"x_1": "[12@a, 8]"}, outputs={0: "[4, 3, 8@a]"})
    assert collective_names(elsewhere) == ["all_to_all"]


SHAPES = [(12,), (2, 6), (6, 2), (3, 4), (4, 3), (2, 2, 3), (3, 2, 2), (2, 3, 2)]


@pytest.mark.parametrize("mesh", [Mesh((("a", 2),)), Mesh((("a", 3),)), TWO_BY_TWO], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_small_view(shape: tuple[int, ...], mesh: Mesh) -> None:
    """All cuts of all shapes of 12 elements, viewed as all others, padded ones among them."""
    places = range(len(shape))
    for cut in itertools.product(places, repeat=len(mesh.names)):
        axes = [tuple(a for a, d in zip(mesh.names, cut, strict=True) if d == k) for k in places]
        sharding = Sharding(tuple((Segment(n, a),) for n, a in zip(shape, axes, strict=True)))
        for target in SHAPES:
            viewed(mesh, shape, sharding, target)


@pytest.mark.parametrize(
    "cut", ["[4@a, 6@b, 8]", "[4, 6@a@b, 8]", "[4@a@b, 6, 8]", "[4@b, 6@a, 8]", "[4, 6@b, 8@a]", "[4@a, 6, 8@b]"]
)
def test_batch_and_time_flattened_around_a_linear(cut: str) -> None:
    """Flattened, multiplied, unflattened, with its gradients: each is what one device gives."""

    def step(x: Tensor, w: Tensor, g: Tensor) -> list[Tensor]:
        flat = x.reshape(24, 8)
        y = torch.mm(flat, w).reshape(4, 6, 10)
        back = g.reshape(24, 10)
        return [y, torch.mm(back, w.t()).reshape(4, 6, 8), torch.mm(flat.t(), back)]

    torch.manual_seed(0)
    x, w, g = (torch.randn(s, dtype=torch.float64) for s in ((4, 6, 8), (8, 10), (4, 6, 10)))
    local = meshwright.transform(
        make_fx(step)(x, w, g), mesh=TWO_BY_TWO, inputs={"x_1": cut, "g_1": cut.replace("8", "10")}
    )
    lying = [annotation(n).sharding for n in local.graph.find_nodes(op="placeholder")]
    found = on_ranks(local, TWO_BY_TWO, [x, w, g], lying, [Sharding.whole(t.shape) for t in step(x, w, g)])
    for got, right in zip(found, step(x, w, g), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
