"""The communication functions as the checker calls them: on related values in place of tensors."""

from __future__ import annotations

from typing import Any

from meshwright.compiler.equivalence import moved
from meshwright.compiler.equivalence.layout import Layout
from meshwright.compiler.equivalence.related import Related
from meshwright.compiler.equivalence.written import Place
from meshwright.compiler.graph import collectives
from meshwright.compiler.mesh import Mesh


def _moved(function: Any) -> Any:
    def one(mesh: Mesh, x: Related, *args: Any, **kwargs: Any) -> Related:
        return Related(x.term, function(x.layout, *args, mesh=mesh, **kwargs))

    return one


def _all_reduce(x: Layout, axes: Any, reduction: str = "sum", owned: bool = False, *, mesh: Mesh) -> Layout:
    return moved.all_reduce(x, tuple(axes), reduction, mesh)


def _reduce_many(
    mesh: Mesh, xs: list[Related], axes: Any, reduction: str = "sum", owned: bool = False
) -> list[Related]:
    return [Related(x.term, moved.all_reduce(x.layout, tuple(axes), reduction, mesh)) for x in xs]


def _gather_many(mesh: Mesh, xs: list[Related], dims: Any, axes: Any, sizes: Any) -> list[Related]:
    return [
        Related(x.term, moved.all_gather(x.layout, d, tuple(axes), n, mesh))
        for x, d, n in zip(xs, dims, sizes, strict=True)
    ]


def _scatter_many(mesh: Mesh, xs: list[Related], dims: Any, axes: Any) -> list[Related]:
    return [
        Related(x.term, moved.reduce_scatter(x.layout, d, tuple(axes), mesh)) for x, d in zip(xs, dims, strict=True)
    ]


def _scatter_wide(mesh: Mesh, x: Related, dim: int, axes: Any, dtype: Any) -> Related:
    return Related(x.term, moved.reduce_scatter(x.layout, dim, tuple(axes), mesh))


def _scatter_wide_many(mesh: Mesh, xs: list[Related], dims: Any, axes: Any, dtype: Any) -> list[Related]:
    return _scatter_many(mesh, xs, dims, axes)


def _offset(mesh: Mesh, strides: Any) -> Place:
    return Place(tuple((axis, chunk) for axis, chunk in strides if mesh.size(axis) > 1))


def _wait(mesh: Mesh, pending: list[Related]) -> list[Related]:
    return pending


REDUCTIONS = (collectives.all_reduce_many, collectives.all_reduce_begin)
"""What may reduce tensors where they lie."""
FUNCTIONS: dict[Any, Any] = {
    collectives.all_reduce: _moved(_all_reduce),
    collectives.all_gather: _moved(moved.all_gather),
    collectives.reduce_scatter: _moved(moved.reduce_scatter),
    collectives.all_to_all: _moved(moved.all_to_all),
    collectives.shard: _moved(moved.shard),
    collectives.owe: _moved(moved.owe),
    collectives.fill_padding: _moved(moved.fill_padding),
    collectives.offset: _offset,
    collectives.all_gather_many: _gather_many,
    collectives.all_gather_begin: _gather_many,
    collectives.reduce_scatter_many: _scatter_many,
    collectives.reduce_scatter_begin: _scatter_many,
    collectives.reduce_scatter_wide: _scatter_wide,
    collectives.reduce_scatter_wide_many: _scatter_wide_many,
    collectives.reduce_scatter_wide_begin: _scatter_wide_many,
    collectives.all_reduce_many: _reduce_many,
    collectives.all_reduce_begin: _reduce_many,
    collectives.wait: _wait,
}
"""By function of ``graph/collectives.py``: what it gives, of the mesh and its arguments."""
