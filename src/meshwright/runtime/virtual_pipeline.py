"""A pipeline in one process: its ranks as threads, their messages through memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from torch import Tensor

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph.pipeline_program import PIPE, PipelineProgram
from meshwright.compiler.graph.program import TensorSpec
from meshwright.runtime.executor import StepResult
from meshwright.runtime.feed import whole_batch
from meshwright.runtime.holdings import Holdings
from meshwright.runtime.layout import assemble
from meshwright.runtime.materialize import Weights, materialize
from meshwright.runtime.pipeline import PipelineExecutor
from meshwright.runtime.rendezvous import Rendezvous
from meshwright.runtime.virtual import VirtualCommunicator

LONGEST = 300.0
"""Seconds after which a message that has not come is taken for one that never will."""


class _Post:
    """What has been sent and not yet received."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.letters: dict[tuple[int, int, str], list[list[Tensor]]] = {}
        self.failed = False


class _Mailbox:
    """A rank's :class:`~meshwright.runtime.pipeline.Mail`."""

    def __init__(self, post: _Post, rank: int) -> None:
        self._post, self._rank = post, rank

    def send(self, rank: int, name: str, tensors: Sequence[Tensor]) -> None:
        with self._post.changed:
            self._post.letters.setdefault((self._rank, rank, name), []).append([t.clone() for t in tensors])
            self._post.changed.notify_all()

    def receive(self, rank: int, name: str) -> list[Tensor]:
        key = (rank, self._rank, name)
        with self._post.changed:
            come = self._post.changed.wait_for(lambda: self._post.failed or self._post.letters.get(key), LONGEST)
            if self._post.failed or not come:
                raise InternalError(f"rank {self._rank} waits in vain for {name} of rank {rank}")
            return self._post.letters[key].pop(0)


class VirtualPipeline:
    """All ranks of a pipeline, with the shards of their stages."""

    def __init__(self, program: PipelineProgram, weights: Weights, *, seed: int = 0) -> None:
        self.program = program
        self.mesh = program.mesh
        self.seed = seed
        self.steps = 0
        self._post = _Post()
        self._coordinates = [self.mesh.coordinates(rank) for rank in range(self.mesh.ranks)]

        def given(name: str, spec: TensorSpec) -> Tensor:
            return weights(program.copies.get(name, name), spec)

        inner = [{axis: at for axis, at in c.items() if axis != PIPE} for c in self._coordinates]
        everything = materialize(program.whole, given, inner)
        self.executors = [
            PipelineExecutor(
                program,
                self._communicator(rank, Rendezvous(1)),
                _Mailbox(self._post, rank),
                self._own(rank, holdings),
                keep_gradients=True,
            )
            for rank, holdings in enumerate(everything)
        ]

    def step(self, batch: Mapping[str, Tensor], scalars: Mapping[str, float] | None = None) -> StepResult:
        """Run one step on the whole global batch and return the result of the last rank."""
        feed = whole_batch(batch, self.program.whole.program)
        rendezvous = Rendezvous(self.mesh.ranks)
        results: dict[int, StepResult] = {}
        failures: list[BaseException] = []

        def body(rank: int) -> None:
            executor = self.executors[rank]
            executor.communicator = self._communicator(rank, rendezvous)
            try:
                results[rank] = executor.step(feed, step=self.steps, seed=self.seed, scalars=scalars)
            except BaseException as failure:  # every failure must wake the others; it is raised again below
                failures.append(failure)
                rendezvous.fail(rank, failure)
                with self._post.changed:
                    self._post.failed = True
                    self._post.changed.notify_all()
            else:
                rendezvous.finish(rank)

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.mesh.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        self.steps += 1
        norm = next((r.norm for r in results.values() if r.norm is not None), None)
        last = results[self.mesh.ranks - 1]
        return StepResult(last.loss, norm, last.results)

    def full_parameters(self) -> dict[str, Tensor]:
        """All parameters whole, further copies of tied ones too. Raises InternalError if copies in a stage differ."""
        return {name: self._full(name) for stage in self.program.stages for name in stage.parameters}

    def _full(self, name: str) -> Tensor:
        whole = self.program.whole
        shards: dict[int, Tensor] = {}
        for coordinates, executor in zip(self._coordinates, self.executors, strict=True):
            if name in executor.holdings.parameters:
                inner = {axis: at for axis, at in coordinates.items() if axis != PIPE}
                shards[whole.mesh.rank(inner)] = executor.holdings.parameters[name]
        return assemble(lambda c: shards[whole.mesh.rank(c)], whole.layouts[name].rest, whole.mesh, replicas=True)

    def _own(self, rank: int, everything: Holdings) -> Holdings:
        """What a rank's stages hold."""
        stages = [self.program.stages[s] for s in self.program.held_by(self._coordinates[rank][PIPE])]
        parameters = {n for s in stages for n in s.parameters}
        state = {n for s in stages for n in s.state}
        return Holdings(
            {n: t for n, t in everything.parameters.items() if n in parameters},
            dict(everything.buffers),
            {n: t for n, t in everything.state.items() if n in state},
        )

    def _communicator(self, rank: int, rendezvous: Rendezvous) -> VirtualCommunicator:
        return VirtualCommunicator(rank, self.mesh, self.program.schedule.microbatches, rendezvous)
