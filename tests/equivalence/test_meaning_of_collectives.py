"""What the checker says of a collective is what the collective does: on random tensors, layouts and meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from meshwright.compiler.equivalence import moved
from meshwright.compiler.equivalence.layout import Layout, Mismatch, merged, of_sharding
from meshwright.compiler.graph import collectives
from meshwright.compiler.mesh import Mesh, Segment, Sharding, parse_sharding
from tests.partitioned import on_ranks

MESHES = [Mesh((("a", 2), ("b", 2))), Mesh((("a", 3), ("b", 2)))]
SHAPE = (6, 4, 5)


def _module(target: Callable[..., Any], *args: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output((graph.call_function(target, (graph.placeholder("x"), *args)),))
    return fx.GraphModule(torch.nn.Module(), graph)


@st.composite
def lying(draw: st.DrawFn, mesh: Mesh) -> Sharding:
    cuts: list[tuple[str, ...]] = [() for _ in SHAPE]
    for axis in draw(st.permutations(mesh.names)):
        where = draw(st.integers(-1, len(SHAPE) - 1))
        if where >= 0:
            cuts[where] = (*cuts[where], axis)
    return Sharding(tuple((Segment(n, c),) for n, c in zip(SHAPE, cuts, strict=True)))


@st.composite
def calls(draw: st.DrawFn, mesh: Mesh) -> tuple[str, tuple[Any, ...]]:
    dim, other = draw(st.permutations(range(len(SHAPE))))[:2]
    axes = tuple(draw(st.permutations(mesh.names))[: draw(st.integers(1, 2))])
    name = draw(st.sampled_from(["all_gather", "shard", "all_to_all"]))
    size = draw(st.sampled_from([SHAPE[dim], -(-SHAPE[dim] // 2), -(-SHAPE[dim] // 3)]))
    given = {"all_gather": (dim, axes, size), "shard": (dim, axes), "all_to_all": (other, dim, axes[0], size)}
    return name, given[name]


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_move_that_is_accepted_gives_what_is_said(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES), label="mesh")
    sharding = data.draw(lying(mesh), label="lies")
    name, args = data.draw(calls(mesh), label="call")
    try:
        after: Layout = getattr(moved, name)(of_sharding(sharding, mesh), *args, mesh=mesh)
    except Mismatch:
        return
    dims = after.dims(SHAPE, mesh)
    assert dims is not None
    said = Sharding(tuple(d or (Segment(1),) for d in dims))
    x = torch.arange(120.0).reshape(SHAPE)
    (whole,) = on_ranks(_module(getattr(collectives, name), *args), mesh, [x], [sharding], [said])
    assert torch.equal(whole, x)
    assert said.local_shape(mesh) == after.shape


MESH = Mesh((("a", 2), ("b", 2), ("one", 1)))


@pytest.mark.parametrize(
    ("lies", "call", "args", "said"),
    [
        ("[8, 4] +a", "all_reduce", (("b",), "sum"), "counts 2 times"),
        ("[8@a, 4]", "all_reduce", (("a",), "sum"), "different parts of the tensor are added up over 'a'"),
        ("[8, 4] +a", "all_reduce", (("a",), "max"), "are reduced by max"),
        ("[8@a@b, 4]", "all_gather", (0, ("b", "a"), 8), "are joined in the order of (b, a)"),
        ("[8, 4]", "all_gather", (0, ("a",), 16), "comes several times"),
        ("[8, 4] +a", "all_gather", (0, ("a",), 16), "none of them is a part"),
        ("[8@a, 4]", "all_gather", (1, ("a",), 8), "are not those of dim 1"),
        ("[8@a, 4]", "all_gather", (0, ("a",), 7), "a part is cut off"),
        ("[8@a, 4]", "shard", (1, ("a",)), "cut by it"),
        ("[8, 4] +a", "shard", (1, ("a",)), "owed over it"),
        ("[8@a, 4]", "reduce_scatter", (1, ("b",)), "counts 2 times"),
        ("[8@a, 4]", "owe", (("a",),), "differs along it"),
        ("[8@a, 4]", "fill_padding", (0, 7, ("a",), 0.0), "has no such dim"),
    ],
)
def test_a_move_that_is_none_is_told(lies: str, call: str, args: tuple[Any, ...], said: str) -> None:
    with pytest.raises(Mismatch) as caught:
        getattr(moved, call)(of_sharding(parse_sharding(lies), MESH), *args, mesh=MESH)
    assert said in caught.value.message


def test_equal_cuts_have_one_form() -> None:
    mesh = Mesh((("m", 3), ("d", 2), ("t", 4)))
    assert merged([Segment(9, ("m", "d"))], mesh) == merged([Segment(3, ("m",)), Segment(3, ("d",))], mesh)
    assert merged([Segment(3, ("m",)), Segment(8, ("t",))], mesh) == (Segment(24, ("m", "t")),)
    assert merged([Segment(6, ("m",)), Segment(5)], mesh) == (Segment(30, ("m",)),)
    assert merged([Segment(7, ("m",)), Segment(5)], mesh) == (Segment(7, ("m",)), Segment(5))


def test_an_axis_of_one_rank_says_nothing() -> None:
    assert of_sharding(parse_sharding("[8@one@a, 4] +one"), MESH) == of_sharding(parse_sharding("[8@a, 4]"), MESH)
