"""The virtual cluster: all ranks of a mesh in one process, as threads. Any size, any dtype, no launcher.

Reductions are taken in the order of the ranks, so a step gives the same numbers each time. It runs
the rank program itself, by the same executor as real processes do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import Diagnostic, InternalError, MeshwrightError
from meshwright.compiler.graph.pending import Kind, Work, at_once
from meshwright.compiler.graph.pipeline_program import Compiled, copies_of
from meshwright.compiler.graph.program import Value
from meshwright.compiler.mesh import MICRO, Mesh, Sharding
from meshwright.compiler.plan import PIPE
from meshwright.runtime.executors import executor_for
from meshwright.runtime.feed import whole_batch
from meshwright.runtime.finite import OnNonFinite
from meshwright.runtime.holdings import Holdings, held
from meshwright.runtime.layout import Coordinates, assemble, reduce_in_order
from meshwright.runtime.mail import VirtualMail
from meshwright.runtime.materialize import Weights, materialize
from meshwright.runtime.pipeline import PipelineExecutor
from meshwright.runtime.rendezvous import Aborted, Call, Rendezvous
from meshwright.runtime.step_executor import Feed, StepExecutor, StepResult

T = TypeVar("T")


class VirtualCommunicator:
    """A rank's :class:`Communicator` in the virtual cluster."""

    def __init__(self, rank: int, mesh: Mesh, microbatches: int, rendezvous: Rendezvous) -> None:
        self.rank = rank
        self.mesh = mesh.with_micro(microbatches)
        self.microbatch = 0
        self.doing = ""
        self._devices = mesh
        self._coordinates = mesh.coordinates(rank)
        self._rendezvous = rendezvous

    def coordinate(self, axis: str) -> int:
        return self.microbatch if axis == MICRO else self._coordinates[axis]

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], reduction: str) -> Tensor:
        total = self._exchange(f"all_reduce({reduction})", x, axes, lambda i, all_: reduce_in_order(all_, reduction))
        return x.copy_(total)  # written over, as torch.distributed does, so that wrong programs show here too

    def all_gather(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return self._exchange("all_gather", x, axes, lambda i, all_: torch.cat(all_))

    def reduce_scatter(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        count = self._devices.size(*axes)
        return self._exchange(
            "reduce_scatter", x, axes, lambda i, all_: reduce_in_order([t.chunk(count)[i] for t in all_], "sum")
        )

    def all_to_all(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        count = self._devices.size(*axes)
        return self._exchange("all_to_all", x, axes, lambda i, all_: torch.cat([t.chunk(count)[i] for t in all_]))

    def begin(self, kind: Kind, x: Tensor, axes: tuple[str, ...], reduction: str = "sum") -> Work:
        return at_once(self, kind, x, axes, reduction)

    def _exchange(
        self, name: str, x: Tensor, axes: tuple[str, ...], read: Callable[[int, list[Tensor]], Tensor]
    ) -> Tensor:
        group = self._devices.group(self.rank, axes)
        index = group.index(self.rank)
        count = len(group)
        if name in ("reduce_scatter", "all_to_all") and x.shape[0] % count:
            raise InternalError(f"{name} of a tensor of shape {tuple(x.shape)} over {count} ranks")
        call = Call(name, axes, tuple(x.shape), str(x.dtype))
        return self._rendezvous.exchange(self.rank, group, call, x, lambda tensors: read(index, tensors))


class VirtualCluster:
    """All ranks of a rank program, with their shards.

    ``weights`` gives the initial parameters and buffers; see :mod:`meshwright.runtime.materialize`.
    """

    def __init__(
        self,
        rank_program: Compiled,
        weights: Weights,
        *,
        seed: int = 0,
        keep_gradients: bool = False,
        on_non_finite: OnNonFinite = "stop",
    ) -> None:
        self.rank_program = rank_program
        self.mesh = rank_program.mesh
        self.seed = seed
        self.steps = 0
        """The number of steps that have been run; the next step's number."""
        everyone = [self.mesh.coordinates(r) for r in range(self.mesh.ranks)]
        self.executors = [
            executor_for(
                rank_program,
                self._communicator(rank, Rendezvous(1)),
                VirtualMail(rank, Rendezvous(1)),
                holdings,
                keep_gradients=keep_gradients,
                on_non_finite=on_non_finite,
            )
            for rank, holdings in enumerate(materialize(rank_program, weights, everyone))
        ]

    def step(self, batch: Mapping[str, Tensor] | Feed, scalars: Mapping[str, float] | None = None) -> StepResult:
        """Run one step on the whole global batch and return the result of rank 0.

        ``batch`` has the whole tensors by name, or is a feed that gives the ranks' shards. Raises InternalError
        if the ranks do not agree on loss and norm.
        """
        feed = whole_batch(batch, self.rank_program.program) if isinstance(batch, Mapping) else batch
        results = self.run(lambda e: e.step(feed, step=self.steps, seed=self.seed, scalars=scalars))
        self.steps += 1
        for rank, result in enumerate(results):
            for mine, theirs in ((results[0].loss, result.loss), (results[0].norm, result.norm)):
                if mine != theirs and not (
                    mine is not None and theirs is not None and mine != mine and theirs != theirs
                ):
                    raise InternalError(f"rank 0 and rank {rank} disagree: {mine} and {theirs}")
        return results[0]

    def run(self, function: Callable[[StepExecutor], T]) -> list[T]:
        """Run a function on all ranks at once and return what each gave.

        If a rank fails the others stop at once, and its error is raised with the rank named.
        """
        rendezvous = self._meet()
        results: dict[int, T] = {}

        def body(rank: int) -> None:
            executor = self.executors[rank]
            executor.communicator = self._communicator(rank, rendezvous)
            if isinstance(executor, PipelineExecutor):
                executor.mail = VirtualMail(rank, rendezvous)
            try:
                results[rank] = function(executor)
            except BaseException as failure:  # every failure must wake the others; it is raised again below
                rendezvous.fail(rank, failure)
            else:
                rendezvous.finish(rank)

        threads = [
            threading.Thread(target=body, args=(r,), name=f"rank {r}", daemon=True) for r in range(self.mesh.ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if rendezvous.failure is not None:
            _raise(*rendezvous.failure)
        return [results[r] for r in range(self.mesh.ranks)]

    def full_parameters(self) -> dict[str, Tensor]:
        """All parameters whole, by canonical name. Raises InternalError if copies differ."""
        found, copies = self._full("parameter"), copies_of(self.rank_program)
        for copy, name in copies.items():
            if not torch.equal(found[name], found.pop(copy)):
                raise InternalError(f"copies of the tied parameter '{name}' differ between stages")
        return found

    def full_buffers(self) -> dict[str, Tensor]:
        """All buffers whole, by name."""
        return self._full("buffer")

    def full_state(self) -> dict[str, Tensor]:
        """The optimizer state whole, by ``<parameter>/<entry>``."""
        return self._full("state")

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients of the last step whole and paid, by parameter. Needs ``keep_gradients``."""
        copies = copies_of(self.rank_program)
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(n for e in self.executors for n in e.gradients):
            whole = self._assemble([e.gradients.get(name) for e in self.executors], self.gradient_sharding(name))
            owner = copies.get(name, name)
            found[owner] = found[owner] + whole if owner in found else whole
        return found

    def full_result(self, results: list[StepResult], name: str) -> Tensor:
        """A further output of the step, whole, from the results of all ranks."""
        there = [r.results.get(name) for r in results]
        sharding = next(r.sharding for r in there if r is not None)
        return self._assemble([r.value if r is not None else None for r in there], sharding)

    def gradient_sharding(self, name: str) -> Sharding:
        """How the gradient of a parameter lies when ``update`` gets it."""
        value = Value("gradient", name)
        return next(graph.inputs[value] for graph in self.rank_program.update_graphs if value in graph.inputs)

    @property
    def holdings(self) -> list[Holdings]:
        """What each rank holds, by rank."""
        return [e.holdings for e in self.executors]

    def _meet(self) -> Rendezvous:
        return Rendezvous(self.mesh.ranks)

    def _communicator(self, rank: int, rendezvous: Rendezvous) -> VirtualCommunicator:
        return VirtualCommunicator(rank, self.mesh, self.rank_program.plan.microbatches, rendezvous)

    def _full(self, kind: str) -> dict[str, Tensor]:
        return {
            v.name: self._assemble([h.of(kind).get(v.name) for h in self.holdings], h.sharding)
            for v, h in held(self.rank_program).items()
            if v.kind == kind
        }

    def _assemble(self, locals_: list[Tensor | None], sharding: Sharding) -> Tensor:
        """The whole of what ranks hold; all that differ on ``pipe`` alone hold the same, or nothing."""
        there = [self.mesh.coordinates(rank) for rank, local in enumerate(locals_) if local is not None]
        holders = dict.fromkeys(at.get(PIPE, 0) for at in there)
        found = [self._assembled(locals_, sharding, pipe) for pipe in holders]
        for other in found[1:]:
            if not torch.equal(found[0], other):
                raise InternalError(f"copies of a tensor that lies as {sharding} differ between stages")
        return found[0]

    def _assembled(self, locals_: list[Tensor | None], sharding: Sharding, pipe: int) -> Tensor:
        inner = Mesh(tuple(axis for axis in self.mesh.axes if axis[0] != PIPE))

        def shard(at: Coordinates) -> Tensor:
            there = {**at, PIPE: pipe} if PIPE in self.mesh.names else at
            local = locals_[self.mesh.rank(there)]
            assert local is not None
            return local

        return assemble(shard, sharding, inner, replicas=True)


def _raise(rank: int, failure: BaseException) -> None:
    """The failure of a rank, with the rank named."""
    if isinstance(failure, MeshwrightError):
        named = [
            Diagnostic(d.code, d.message, d.place, d.action, (*d.notes, f"raised on rank {rank}"))
            for d in failure.diagnostics
        ]
        raise MeshwrightError(*named) from failure
    if isinstance(failure, (KeyboardInterrupt, SystemExit)):
        raise failure
    assert not isinstance(failure, Aborted)
    raise InternalError(f"rank {rank} failed: {type(failure).__name__}: {failure}") from failure
