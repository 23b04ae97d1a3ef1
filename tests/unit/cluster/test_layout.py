"""How the groups of mesh axes lie on nodes."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.compiler.cluster.layout import _counted, layout
from meshwright.compiler.mesh import Mesh

NODES = (8, 4, 2)
"""Nodes of 8 devices, groups of 4 nodes, 2 groups."""


def test_inner_axes_stay_within_a_node() -> None:
    mesh = Mesh((("data", 8), ("tensor", 8)))
    inner, outer = layout(NODES, mesh, ("tensor",)), layout(NODES, mesh, ("data",))
    assert (inner.members, inner.inside, inner.units) == (8, (1, 8, 8, 8), (8, 1, 1, 1))
    assert (outer.members, outer.inside, outer.units) == (8, (1, 1, 4, 8), (8, 8, 2, 1))


def test_an_axis_of_a_few_ranks_a_node_shares_their_links() -> None:
    lies = layout(NODES, Mesh((("data", 32), ("tensor", 2))), ("data",))
    assert (lies.inside, lies.units) == ((1, 4, 16, 32), (32, 8, 2, 1))


def test_a_mesh_smaller_than_the_cluster_takes_its_first_devices() -> None:
    assert layout(NODES, Mesh((("tensor", 6),)), ("tensor",)).units == (6, 1, 1, 1)
    assert layout(NODES, Mesh((("tensor", 12),)), ("tensor",)).units == (12, 2, 1, 1)
    assert layout(NODES, Mesh((("tensor", 12),)), ("tensor",)).inside == (1, 4, 12, 12)


def test_an_axis_that_straddles_nodes_takes_its_worst_group() -> None:
    # groups of 3 on nodes of 8: ranks 6, 7, 8 lie on two nodes, one of them alone
    lies = layout(NODES, Mesh((("data", 16), ("tensor", 3))), ("tensor",))
    assert lies.units[1] == 2
    assert lies.inside[1] == 1


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3),
    axes=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3),
    chosen=st.sets(st.integers(0, 2), min_size=1),
)
def test_products_and_counting_agree(sizes: list[int], axes: list[int], chosen: set[int]) -> None:
    mesh = Mesh(tuple((f"a{i}", n) for i, n in enumerate(axes)))
    names = tuple(f"a{i}" for i in sorted(chosen) if i < len(axes)) or ("a0",)
    cluster = 1
    for size in sizes:
        cluster *= size
    if mesh.ranks > cluster:
        sizes = [*sizes, -(-mesh.ranks // cluster)]
    levels = tuple(accumulate((1, *sizes), mul))
    assert layout(tuple(sizes), mesh, names) == _counted(levels, mesh, names)
