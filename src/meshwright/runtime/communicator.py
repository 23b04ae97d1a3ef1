"""The communicator of real processes: ``torch.distributed`` on gloo or NCCL by the same code.

Every group that a program uses is made before the first step, in one order that all ranks share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph.functions import COLLECTIVES
from meshwright.compiler.graph.pending import Done, Kind, Work
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.mesh import MICRO, Mesh
from meshwright.compiler.plan import PIPE
from meshwright.runtime.failure import CollectiveFailed
from meshwright.runtime.holdings import held
from meshwright.runtime.rendezvous import Call
from meshwright.runtime.torch_distributed import all_gather_single, reduce_scatter_single

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

Before = Callable[[Call, tuple[int, ...]], None]
"""Called before each collective with the call and the ranks of its group; see :mod:`signatures`."""


def axes_used(rank_program: Compiled) -> tuple[tuple[str, ...], ...]:
    """Every tuple of axes over which a step, a checkpoint or a gathering of weights communicates.

    The order is the same on all ranks: by length, then by name.
    """
    mesh = rank_program.mesh
    found = {mesh.names, *((PIPE,) for name in mesh.names if name == PIPE)}
    for graph in rank_program.graphs:
        for node in graph.module.graph.nodes:
            if node.op == "call_function" and COLLECTIVES.get(getattr(node.target, "__name__", "")) is node.target:
                found.update(_axes_of((*node.args, *node.kwargs.values()), mesh))
    owed = [s.owed for graph in rank_program.micro_graphs for s in graph.outputs.values()]
    cutting = [h.sharding.axes for h in held(rank_program).values()]
    found.update(tuple(a for a in mesh.names if a in axes) for axes in (*owed, *cutting))
    # padded dims are gathered and scattered axis by axis
    found.update((axis,) for axes in list(found) for axis in axes)
    return tuple(sorted((axes for axes in found if axes), key=lambda axes: (len(axes), axes)))


def _axes_of(arguments: Iterable[object], mesh: Mesh) -> Iterable[tuple[str, ...]]:
    for argument in arguments:
        if isinstance(argument, str) and argument in mesh.names:
            yield (argument,)
        elif isinstance(argument, (tuple, list)) and argument and all(a in (MICRO, *mesh.names) for a in argument):
            yield tuple(str(a) for a in argument if a != MICRO)


class ProcessCommunicator:
    """A rank's :class:`Communicator` over the default process group, which must have been initialized."""

    def __init__(
        self,
        mesh: Mesh,
        microbatches: int,
        axes: Iterable[tuple[str, ...]],
        *,
        timeout: timedelta | None = None,
        before: Before | None = None,
    ) -> None:
        self.rank = dist.get_rank()
        self.mesh = mesh.with_micro(microbatches)
        self.microbatch = 0
        self._doing = ""
        self._devices = mesh
        self._coordinates = mesh.coordinates(self.rank)
        self._before = before
        self._last: tuple[Call, tuple[int, ...]] | None = None
        self._groups: dict[tuple[str, ...], _Group] = {}
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for names in axes:
            everyone = {mesh.group(rank, names) for rank in range(mesh.ranks)}
            for ranks in sorted({tuple(sorted(g)) for g in everyone}):
                if ranks not in made and len(ranks) > 1:
                    made[ranks] = dist.new_group(list(ranks), timeout=timeout)
            own = mesh.group(self.rank, names)
            self._groups[names] = _Group(own, made.get(tuple(sorted(own))))

    @property
    def doing(self) -> str:
        """What this rank is at, such as an instruction of a pipeline's program; what it communicated before that is not
        told any more."""
        return self._doing

    @doing.setter
    def doing(self, what: str) -> None:
        self._doing, self._last = what, None

    @property
    def last_call(self) -> str:
        """What this rank communicated last, and what it is doing if that is known, for error messages."""
        if self._last is None:
            return self.doing or "before its first collective"
        call, ranks = self._last
        last = f"in {call} with ranks {', '.join(map(str, ranks))}"
        return f"{self.doing}, {last}" if self.doing else last

    def coordinate(self, axis: str) -> int:
        return self.microbatch if axis == MICRO else self._coordinates[axis]

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], reduction: str) -> Tensor:
        return self._start("all_reduce", x, axes, reduction, beside=False).wait()

    def all_gather(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return self._start("all_gather", x, axes, beside=False).wait()

    def reduce_scatter(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return self._start("reduce_scatter", x, axes, beside=False).wait()

    def all_to_all(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return self._start("all_to_all", x, axes, beside=False).wait()

    def begin(self, kind: Kind, x: Tensor, axes: tuple[str, ...], reduction: str = "sum") -> Work:
        return self._start(kind, x, axes, reduction, beside=True)

    def _start(self, kind: Kind, x: Tensor, axes: tuple[str, ...], reduction: str = "sum", *, beside: bool) -> Work:
        """Begin a collective and, unless it may run ``beside`` what follows, finish it."""
        group = self._announce(f"all_reduce({reduction})" if kind == "all_reduce" else kind, x, axes)
        if group.handle is None:
            return Done(x)
        given, result = x, x
        if kind == "all_gather":
            given = x.contiguous()
            result = x.new_empty((len(group.ranks) * x.shape[0], *x.shape[1:]))
        elif kind == "reduce_scatter":
            given = group.to_torch_order(x).contiguous()
            result = x.new_empty((x.shape[0] // len(group.ranks), *x.shape[1:]))
        elif kind == "all_to_all":
            given = group.to_torch_order(x).contiguous()
            result = torch.empty_like(given)
        call = self.last_call
        with named(call):
            if kind == "all_reduce":
                work = dist.all_reduce(x, REDUCTIONS[reduction], group.handle, async_op=beside)
            elif kind == "all_gather":
                work = all_gather_single(result, given, group=group.handle, async_op=beside)
            elif kind == "all_to_all":
                work = dist.all_to_all_single(result, given, group=group.handle, async_op=beside)
            else:
                work = reduce_scatter_single(result, given, group=group.handle, async_op=beside)
        finish = group.to_own_order if kind in ("all_gather", "all_to_all") else _unchanged
        return UnderWay(call, work, given, result, finish)

    def _announce(self, name: str, x: Tensor, axes: tuple[str, ...]) -> _Group:
        group = self._groups.get(tuple(axes))
        if group is None:
            raise InternalError(f"no group was made for the axes ({', '.join(axes)}) before the first step")
        if name in ("reduce_scatter", "all_to_all") and x.shape[0] % len(group.ranks):
            raise InternalError(f"{name} of a tensor of shape {tuple(x.shape)} over {len(group.ranks)} ranks")
        call = Call(name, tuple(axes), tuple(x.shape), str(x.dtype))
        self._last = (call, group.ranks)
        if self._before is not None and group.handle is not None:
            self._before(call, group.ranks)
        return group


@contextlib.contextmanager
def named(call: str, peer: int | None = None) -> Iterator[None]:
    """Errors of torch's collectives and messages, told with the call in which they happened, and the rank at the other
    end of a message."""
    try:
        yield
    except RuntimeError as failed:
        raise CollectiveFailed(call, failed, peer) from failed


@dataclass
class UnderWay:
    """A collective that torch has been given, with the memory that it reads and writes."""

    call: str
    work: dist.Work | None
    given: Tensor
    result: Tensor
    finish: Callable[[Tensor], Tensor]

    def wait(self) -> Tensor:
        if self.work is not None:
            with named(self.call):
                self.work.wait()
        return self.finish(self.result)


def _unchanged(x: Tensor) -> Tensor:
    return x


class _Group:
    """The ranks of a group in the order of its axes, and torch's handle, which has them sorted."""

    def __init__(self, ranks: tuple[int, ...], handle: dist.ProcessGroup | None) -> None:
        self.ranks = ranks
        self.handle = handle
        in_torch = sorted(ranks)
        self._own = [in_torch.index(r) for r in ranks]
        self._torch = [ranks.index(r) for r in in_torch]
        self._same = in_torch == list(ranks)

    def to_own_order(self, x: Tensor) -> Tensor:
        """The chunks of dim 0, which come in torch's order, in the order of the axes."""
        return x if self._same else _reorder(x, self._own)

    def to_torch_order(self, x: Tensor) -> Tensor:
        """The chunks of dim 0, which are in the order of the axes, as torch wants them."""
        return x if self._same else _reorder(x, self._torch)


def _reorder(x: Tensor, order: list[int]) -> Tensor:
    return x.view(len(order), -1, *x.shape[1:])[order].reshape(x.shape)
