"""What a graph asks of its communicator, call by call.

Found by running the very functions of :mod:`meshwright.compiler.graph.collectives` that the graph calls, on tensors
without data: padding, several axes and joined messages are then what they are at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.analysis.shaped import shaped
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.dtypes import dtype_named, short_name
from meshwright.compiler.graph.functions import COLLECTIVES
from meshwright.compiler.graph.pending import Kind, Work
from meshwright.compiler.graph.shapes import Shapes
from meshwright.compiler.graph.trial import tensor
from meshwright.compiler.mesh import MICRO, Mesh


@dataclass(frozen=True)
class Call:
    """A collective: what is done, over which axes (in the order of the mesh, those of more than one rank), and with how
    many elements of this rank."""

    name: str
    axes: tuple[str, ...]
    dtype: str
    elements: int

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {self.elements}"


Event = Call | int
"""A collective begins, or that of a number, counted from 0, is waited for."""


class Recorder:
    """A communicator that answers with the right shapes and keeps what it is asked for, as ``events``. Collectives over
    a single rank are none, and so are those over the axis ``micro`` alone, which the mesh may have."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.events: list[Event] = []
        self._shapes = Shapes(mesh)
        self._begun = 0

    def coordinate(self, axis: str) -> int:
        return 0

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], reduction: str) -> Tensor:
        return self.begin("all_reduce", x, axes, reduction).wait()

    def all_gather(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return self.begin("all_gather", x, axes).wait()

    def reduce_scatter(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return self.begin("reduce_scatter", x, axes).wait()

    def all_to_all(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return self._begin("all_to_all", x, axes, self._shapes.all_to_all(x, axes)).wait()

    def begin(self, kind: Kind, x: Tensor, axes: tuple[str, ...], reduction: str = "sum") -> Work:
        name = f"all_reduce({reduction})" if kind == "all_reduce" else kind
        return self._begin(name, x, axes, self._shapes.begin(kind, x, axes, reduction).wait())

    def _begin(self, name: str, x: Tensor, axes: tuple[str, ...], result: Tensor) -> Work:
        over = tuple(axis for axis, size in self.mesh.axes if axis in axes and axis != MICRO and size > 1)
        if not over:
            return _Recorded(result, [], 0)
        self.events.append(Call(name, over, short_name(x.dtype), x.numel()))
        self._begun += 1
        return _Recorded(result, self.events, self._begun - 1)


@dataclass(frozen=True)
class _Recorded:
    result: Tensor
    events: list[Event]
    number: int

    def wait(self) -> Tensor:
        self.events.append(self.number)
        return self.result


@dataclass(frozen=True)
class _Spec:
    """Stands for a tensor among the arguments of a call."""

    shape: tuple[int, ...]
    dtype: str


def asked(node: fx.Node, mesh: Mesh) -> tuple[Event, ...]:
    """What a node asks for, its own collectives counted from 0. Of what a node merely begins, the last events are
    missing: the node that waits for it does so in the order in which it began."""
    if COLLECTIVES.get(getattr(node.target, "__name__", "")) is not node.target or node.target in _SILENT:
        return ()
    arguments = tuple([_described(a) for a in node.args])
    return _asked(node.target, arguments, tuple((k, _described(v)) for k, v in node.kwargs.items()), mesh)


_SILENT = (collectives.shard, collectives.owe, collectives.offset, collectives.fill_padding, collectives.wait)
"""What asks for nothing, or (``wait``) for nothing new."""


def asked_by(function: Callable[[], object], mesh: Mesh) -> tuple[Event, ...]:
    """What a function asks of its communicator, which is given tensors without data."""
    recorder = Recorder(mesh)
    with collectives.use(recorder), torch.no_grad():
        function()
    return tuple(recorder.events)


_Described = tuple[Any, ...]


@lru_cache(maxsize=10_000)
def _asked(target: Any, arguments: _Described, named: tuple[tuple[str, Any], ...], mesh: Mesh) -> tuple[Event, ...]:
    given = [_given(a) for a in arguments]
    return asked_by(lambda: target(*given, **{k: _given(v) for k, v in named}), mesh)


def _described(value: Any) -> Any:
    if isinstance(value, fx.Node):
        found = shaped(value)
        return _Spec(found.shape, found.dtype)
    return tuple([_described(v) for v in value]) if isinstance(value, (list, tuple)) else value


def _given(value: Any) -> Any:
    if isinstance(value, _Spec):
        return tensor(value.shape, dtype_named(value.dtype), meta=True)
    if isinstance(value, tuple) and any(isinstance(v, _Spec) for v in value):
        return [_given(v) for v in value]
    return value
