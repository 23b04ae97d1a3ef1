"""One rank of many, alone in a process: its collectives answer at once with tensors of the right sizes, allocated as
:class:`ProcessCommunicator` allocates them, so that what its step takes of memory can be measured."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.compiler.analysis.offloading import on_host
from meshwright.compiler.graph.pending import Done, Kind, Work, at_once
from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.compiler.mesh import MICRO, Mesh
from meshwright.compiler.plan import PIPE
from meshwright.runtime.executor import Executor
from meshwright.runtime.feed import whole_batch
from meshwright.runtime.mail import Parcel, Pending
from meshwright.runtime.materialize import from_module, materialize
from meshwright.runtime.pipeline import PipelineExecutor

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of its own start and end otherwise


@dataclass(frozen=True)
class _UnderWay:
    """A message that holds what it was given until it is waited for."""

    done: Work
    given: Tensor

    def wait(self) -> Tensor:
        return self.done.wait()


@dataclass
class OneOfMany:
    """The communicator of one rank. The other ranks are thought to hold what it holds."""

    mesh: Mesh
    rank: int = 0
    microbatch: int = 0
    doing: str = ""
    calls: list[tuple[str, tuple[str, ...], int]] = field(default_factory=list)
    """Every call: what, over which axes, and the bytes of the larger side."""
    at: Mapping[str, int] = field(default_factory=dict)
    """Coordinates that are not 0."""

    def coordinate(self, axis: str) -> int:
        return self.microbatch if axis == MICRO else self.at.get(axis, 0)

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], reduction: str) -> Tensor:
        self._note("all-reduce", axes, x)
        return x

    def all_gather(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        made = x.new_empty((self.mesh.size(*axes) * x.shape[0], *x.shape[1:]))
        made.view(self.mesh.size(*axes), *x.shape).copy_(x)
        return self._note("all-gather", axes, made)

    def reduce_scatter(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        self._note("reduce-scatter", axes, x)
        made = x.new_empty((x.shape[0] // self.mesh.size(*axes), *x.shape[1:]))
        return made.copy_(x[: made.shape[0]])

    def all_to_all(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        self._note("all-to-all", axes, x)
        return x.clone()

    def begin(self, kind: Kind, x: Tensor, axes: tuple[str, ...], reduction: str = "sum") -> Work:
        done = at_once(self, kind, x, axes, reduction)
        assert isinstance(done, Done)
        return _UnderWay(done, x)

    def _note(self, kind: str, axes: tuple[str, ...], larger: Tensor) -> Tensor:
        if self.mesh.size(*axes) > 1:
            self.calls.append((kind, tuple(axes), larger.nbytes))
        return larger


@dataclass(frozen=True)
class Measured:
    """What the allocator gave out in one step: what the rank held before, and the most within each graph."""

    held: int
    by_graph: Mapping[str, int]
    calls: tuple[tuple[str, tuple[str, ...], int], ...]

    @property
    def peak(self) -> int:
        return max(self.by_graph.values())


class _Named(nn.Module):
    """Runs a graph under a name that the profiler sees."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module = module
        self.name = name

    def forward(self, *inputs: Any) -> Any:
        with record_function(f"{_MARK}{self.name}"):
            return self.module(*inputs)


_MARK = "graph: "


@dataclass(frozen=True)
class _Nobody:
    """Mail of which nothing ever comes but zeros."""

    def begin(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[Pending]:
        for tensor in (t for parcel in receives for t in parcel.tensors):
            tensor.zero_()
        return [_Come() for _ in (*sends, *receives)]


class _Come:
    def wait(self) -> None:
        pass


def measure_stages(program: PipelineProgram, model: nn.Module, batch: Mapping[str, Tensor], pipe: int) -> int:
    """Run the second step of the first rank at a ``pipe`` coordinate; the most bytes that it held at once."""
    mesh = program.mesh
    at = {**mesh.coordinates(0), PIPE: pipe}
    communicator = OneOfMany(mesh.with_micro(program.plan.microbatches), mesh.rank(at), at=at)
    (holdings,) = materialize(program, from_module(model), [at])
    executor = PipelineExecutor(program, communicator, _Nobody(), holdings, on_non_finite="warn")
    feed = whole_batch(batch, program.program)
    executor.step(feed, step=0)
    kept = [t for _, t in holdings.items()] + list(executor._constants.values())
    kept += [t for buffers in executor._room._free.values() for some in buffers for t in some]
    held = sum(t.untyped_storage().nbytes() for t in kept)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        executor.step(feed, step=1)
    return held + max(_most(found).values())


def measure(rank_program: RankProgram, model: nn.Module, batch: Mapping[str, Tensor]) -> Measured:
    """Run the second step of rank 0 and measure it.

    Of real ranks the profiler would not see what the threads of their process groups free.
    """
    mesh = rank_program.mesh
    communicator = OneOfMany(mesh.with_micro(rank_program.plan.microbatches))
    (holdings,) = materialize(rank_program, from_module(model), [mesh.coordinates(0)])
    executor = Executor(rank_program, communicator, holdings)
    feed = whole_batch(batch, rank_program.program)
    executor.step(feed, step=0)
    executor._micro = _Named(executor._micro, "micro")
    executor._in_place = replace(executor._in_place, module=_Named(executor._in_place.module, "update"))
    away = on_host(rank_program.update)
    kept = [t for v, t in holdings.items() if v.name not in away] + list(executor._constants.values())
    held = sum(t.untyped_storage().nbytes() for t in kept)
    communicator.calls.clear()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        executor.step(feed, step=1)
    return Measured(held, {k: held + n for k, n in _most(found).items()}, tuple(communicator.calls))


def _most(found: profile) -> dict[str, int]:
    """By graph: the most bytes that were allocated at once, beyond those before the step; prologue: before micro."""
    results = found.profiler
    assert results is not None and results.kineto_results is not None
    events = results.kineto_results.events()
    spans = [
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name().removeprefix(_MARK))
        for e in events
        if e.name().startswith(_MARK)
    ]
    most: dict[str, int] = {}
    now = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        graph = next((name for start, end, name in spans if start <= event.start_ns() <= end), "between")
        most[graph] = max(most.get(graph, 0), now)
    return most
