"""Shards of whole tensors and back, for every way in which segments may be cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.mesh import Mesh, Segment, Sharding, parse_sharding
from meshwright.runtime.layout import assemble, boxes, holder, positions, take_shard
from meshwright.runtime.microbatch import join_microbatches, slice_microbatch

MESH = Mesh((("micro", 2), ("data", 2), ("tensor", 3)))
CASES = [
    "[7]",
    "[]",
    "[12@data, 5]",
    "[7@data@tensor, 3]",
    "[5@tensor@data]",
    "[3*4@tensor, 2]",
    "[2@data*5@tensor*3]",
    "[1@tensor, 6@data]",
    "[8@micro@data, 3]",
]


def everywhere(mesh: Mesh) -> list[dict[str, int]]:
    return [mesh.coordinates(r) for r in range(mesh.ranks)]


def key(coordinates: dict[str, int]) -> tuple[int, ...]:
    return tuple(coordinates[a] for a in MESH.names)


@pytest.mark.parametrize("text", CASES)
def test_assemble_undoes_take_shard(text: str) -> None:
    sharding = parse_sharding(text)
    whole = torch.randn(sharding.shape)
    shards = {key(c): take_shard(whole, sharding, MESH, c) for c in everywhere(MESH)}
    assert all(tuple(s.shape) == sharding.local_shape(MESH) for s in shards.values())
    assert torch.equal(assemble(shards, sharding, MESH, replicas=True), whole)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 2)), min_size=1, max_size=2), min_size=1, max_size=2),
    st.permutations(["micro", "data", "tensor"]),
)
def test_any_cut_comes_back(dims: list[list[tuple[int, int]]], axes: list[str]) -> None:
    left = list(axes)
    made = []
    for dim in dims:
        segments = []
        for size, count in dim:
            taken, left = left[:count], left[count:]
            segments.append(Segment(size, tuple(taken)))
        made.append(tuple(segments))
    sharding = Sharding(tuple(made))
    whole = torch.arange(torch.Size(sharding.shape).numel()).reshape(sharding.shape) + 1
    back = assemble(lambda c: take_shard(whole, sharding, MESH, c), sharding, MESH, replicas=True)
    assert torch.equal(back, whole)
    # the same by the dim's positions and by its blocks, of which every element lies in one
    seen = torch.zeros(sharding.shape, dtype=torch.int64)
    for c in everywhere(MESH):
        shard = take_shard(whole, sharding, MESH, c)
        index = [positions(dim, MESH, c) for dim in sharding.dims]
        for place in itertools.product(*(range(len(i)) for i in index)):
            source = tuple(int(i[p]) for i, p in zip(index, place, strict=True))
            assert shard[place] == (0 if -1 in source else whole[source])
        for box in boxes(sharding, MESH, c):
            slices = tuple(slice(s, s + n) for s, n in zip(box.whole, box.size, strict=True))
            assert torch.equal(box.view(shard), whole[slices])
            if all(c[a] == v for a, v in holder(17, sharding, MESH).items()):
                seen[slices] += 1
    assert bool((seen == 1).all())


def test_owed_sums_are_paid_in_order() -> None:
    sharding = parse_sharding("[4@data] +tensor")
    parts = {key(c): torch.full((2,), 10.0 ** c["tensor"]) for c in everywhere(MESH)}
    assert assemble(parts, sharding, MESH).tolist() == [111.0] * 4


def test_copies_that_differ_are_found() -> None:
    sharding = parse_sharding("[4@data]")
    parts = {key(c): torch.zeros(2) for c in everywhere(MESH)}
    parts[(1, 1, 2)] = torch.tensor([0.0, 1.0])
    assert assemble(parts, sharding, MESH).sum() == 0
    with pytest.raises(InternalError, match="copies"):
        assemble(parts, sharding, MESH, replicas=True)


def test_a_shard_never_shares_memory_with_the_whole() -> None:
    whole = torch.zeros(4, 4)
    for text in ("[4, 4]", "[4@data, 4]"):
        shard = take_shard(whole, parse_sharding(text), MESH, {"micro": 0, "data": 0, "tensor": 0})
        shard += 1
    assert whole.sum() == 0


@pytest.mark.parametrize("source", ["[2*4@data, 3]", "[8, 3]"])
def test_a_microbatch_is_sliced_from_what_the_rank_has(source: str) -> None:
    whole = torch.randn(8, 3)
    target = parse_sharding("[8@micro@data, 3]")
    for c in everywhere(MESH):
        local = take_shard(whole, parse_sharding(source), MESH, c)
        got = slice_microbatch(local, parse_sharding(source), target, MESH, c)
        assert torch.equal(got, take_shard(whole, target, MESH, c))


def test_microbatches_are_joined() -> None:
    sharding = parse_sharding("[8@micro@data, 3]")
    whole = torch.randn(8, 3)
    c = {"micro": 0, "data": 1, "tensor": 0}
    parts = [take_shard(whole, sharding, MESH, {**c, "micro": m}) for m in range(2)]
    joined, laid = join_microbatches(parts, sharding, MESH)
    assert laid == parse_sharding("[2*4@data, 3]")
    assert torch.equal(joined, take_shard(whole, laid, MESH, c))


def test_rows_that_the_rank_has_not_are_an_error_of_ours() -> None:
    local = torch.zeros(4, 3)
    with pytest.raises(InternalError, match="not a part"):
        slice_microbatch(local, parse_sharding("[8@data, 3]"), parse_sharding("[8@micro@data, 3]"), MESH, {"micro": 0})
