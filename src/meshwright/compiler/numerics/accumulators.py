"""Which ops keep their partial sums in half precision, as it was measured: ``accumulators.toml``.

``benchmarks/accumulators.py`` measures and writes it, on the device at hand.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from torch import fx

from meshwright.compiler.graph.adapter import OpOverload, overload_name
from meshwright.compiler.numerics.casts import shape_of


@dataclass(frozen=True)
class Accumulator:
    """How an op adds numbers in half precision."""

    keeps: Literal["half", "fp32"]
    """The dtype of partial sums: that of the addends, or one of 32 bits."""
    errors: tuple[float, ...]
    """Of the sums of 16, 256 and 4096 addends of random signs, in roundings."""


@cache
def measured(backend: str = "cpu") -> dict[str, dict[str, Accumulator]]:
    """By dtype (``bf16``) and op (``aten.index_add.default``), what was measured; empty for an unknown backend."""
    tables = _tables().get(backend, {})
    return {
        dtype: {op: Accumulator(entry["keeps"], tuple(entry["errors"])) for op, entry in ops.items()}
        for dtype, ops in tables.items()
        if isinstance(ops, dict)
    }


def backends() -> tuple[str, ...]:
    """The backends that were measured."""
    return tuple(_tables())


@cache
def _tables() -> dict[str, dict[str, Any]]:
    """The file, by backend."""
    return tomllib.loads(files(__package__).joinpath("accumulators.toml").read_text(encoding="utf-8"))


def measured_on(op: str, dtype: str, backend: str | None = None) -> str:
    """Where an op was measured to keep its partial sums in half precision, and where nothing was, told. ``backend``:
    that which counts; None: any."""
    tables = _tables()
    asked = (backend,) if backend is not None else tuple(tables)
    where = [f"{tables[b]['device']}, torch {tables[b]['torch']}" for b in asked if keeps_half(op, dtype, b)]
    other = "" if "cuda" in tables else "; no GPU was measured, whose kernels may keep them in fp32"
    return f"measured on {' and '.join(where)}{other}"


def keeps_half(op: str, dtype: str, backend: str) -> bool:
    """Whether an op was measured to keep its partial sums in half precision. A variant that was not probed counts as
    another one of the same op (``aten.sum.default`` as ``aten.sum.dim_IntList``)."""
    ops = measured(backend).get(dtype, {})
    found = ops.get(op)
    if found is None:
        packet = op.rpartition(".")[0]
        found = next((a for name, a in ops.items() if name.rpartition(".")[0] == packet), None)
    return found is not None and found.keeps == "half"


def rows(node: fx.Node) -> int:
    """How many addends an accumulating op may add up into one number; 0 for an op that is none, or not known.

    Of lookups and scatters: all of their rows, as they may all go to one place.
    """
    if not isinstance(node.target, OpOverload):
        return 0
    counted = _ROWS.get(overload_name(node.target).rpartition(".")[0])
    return counted(node) if counted is not None else 0


def _elements(node: Any) -> int:
    return math.prod(shape_of(node)) if isinstance(node, fx.Node) else 0


def _reduced(node: fx.Node) -> int:
    return _elements(node.args[0]) // max(1, _elements(node))


def _along(node: fx.Node) -> int:
    """The size of the dim that the second argument names."""
    shape, dim = shape_of(node.all_input_nodes[0]), node.args[1]
    return shape[dim] if isinstance(dim, int) and shape else 1


def _source(node: fx.Node) -> int:
    """The places of ``(x, dim, index, source)``."""
    return _elements(node.args[2]) if len(node.args) > 2 else 0


def _scattered(node: fx.Node) -> int:
    index, dim = node.args[2], node.args[1]
    shape = shape_of(index) if isinstance(index, fx.Node) else ()
    return shape[dim] if isinstance(dim, int) and shape else 1


def _put(node: fx.Node) -> int:
    """Of ``(x, indices, values, accumulate)``: the places, if values add up."""
    if len(node.args) < 4 or not node.args[3]:
        return 0
    indices: Any = node.args[1]
    return max((_elements(i) for i in indices if i is not None), default=0)


def _places(node: fx.Node) -> int:
    """The places of ``(grad, index, ...)``."""
    return _elements(node.args[1])


def _layer_norm_rows(node: fx.Node) -> int:
    arguments: Any = node.args
    mask = arguments[7] if len(arguments) > 7 else (True, True, True)
    return _elements(arguments[0]) // math.prod(arguments[2]) if any(mask[1:]) else 0


def _rms_norm_rows(node: fx.Node) -> int:
    arguments: Any = node.args
    return int(_elements(arguments[0]) // math.prod(arguments[2]))


def _contracted(node: fx.Node) -> int:
    """The length of the sums of a matrix product: from the sizes of operands and result."""
    sizes = [_elements(n) for n in node.all_input_nodes[-2:]]
    made = _elements(node)
    return math.isqrt(math.prod(sizes) // made) if made and len(sizes) == 2 else 0


_ROWS: dict[str, Callable[[fx.Node], int]] = {
    "aten.sum": _reduced,
    "aten.mean": _reduced,
    "aten.cumsum": _along,
    "aten.mm": _contracted,
    "aten.addmm": _contracted,
    "aten.mv": _contracted,
    "aten.index_add": _source,
    "aten.index_put": _put,
    "aten._unsafe_index_put": _put,
    "aten.scatter_add": _scattered,
    "aten.embedding_dense_backward": _places,
    "meshwright.embedding_backward": _places,
    "aten.native_layer_norm_backward": _layer_norm_rows,
    "meshwright.rms_norm_backward": _rms_norm_rows,
}
"""By op: its addends. Of an op with batch dims (``bmm``) they would be too many; none of these was found in half."""
