"""What every executor of a step does: inputs, loss, norm and results; how the graphs are run is left open.

An executor holds the rank's shards (:class:`Holdings`) and runs what was compiled under a communicator:
``torch.distributed`` or the virtual cluster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from meshwright.compiler.analysis.offloading import on_host
from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.adapter import write_code
from meshwright.compiler.graph.dtypes import PRECISIONS
from meshwright.compiler.graph.paying import paid
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import Value
from meshwright.compiler.mesh import MICRO, Mesh, Sharding
from meshwright.runtime.accumulate import Accumulator
from meshwright.runtime.finite import OnNonFinite, check_loss, check_norm
from meshwright.runtime.holdings import Holdings
from meshwright.runtime.layout import Coordinates, take_shard
from meshwright.runtime.microbatch import slice_microbatch


class RankCommunicator(collectives.Communicator, Protocol):
    """A communicator as the executor sets it up: it is told which microbatch runs, and what is being done."""

    rank: int
    microbatch: int
    doing: str


class Feed(Protocol):
    """Gives this rank's shard of a tensor of the step's batch."""

    def __call__(self, name: str, sharding: Sharding, mesh: Mesh, coordinates: Coordinates) -> Tensor: ...


@dataclass(frozen=True)
class Local:
    """A tensor of this rank and how it lies on the device mesh."""

    value: Tensor
    sharding: Sharding


@dataclass(frozen=True)
class StepResult:
    """``loss`` of the whole batch, the gradient ``norm`` before clipping, and further outputs as shards, on the ranks
    that have them."""

    loss: float
    norm: float | None = None
    results: Mapping[str, Local] = field(default_factory=dict)


class Options(TypedDict, total=False):
    """How steps are run: ``on_non_finite`` ``"stop"``, ``keep_gradients`` False, ``device`` ``"cpu"`` unless given."""

    on_non_finite: OnNonFinite
    keep_gradients: bool
    device: torch.device | str


class StepExecutor(ABC):
    """Runs the steps of one rank. Parameters and optimizer state are updated in place in ``holdings``."""

    def __init__(
        self,
        rank_program: Compiled,
        communicator: RankCommunicator,
        holdings: Holdings,
        **options: Unpack[Options],
    ) -> None:
        self.rank_program = rank_program
        self.communicator = communicator
        self.holdings = holdings
        self.on_non_finite: Literal["stop", "warn"] = options.get("on_non_finite", "stop")
        self.keep_gradients = options.get("keep_gradients", False)
        self.gradients: dict[str, Tensor] = {}
        """The gradients of the last step as ``update`` got them, if ``keep_gradients``."""
        self.device = torch.device(options.get("device", "cpu"))
        self.microbatches = rank_program.plan.microbatches
        self._offloads = any(on_host(graph) for graph in rank_program.update_graphs)
        self._scales_loss = any(v.kind == "state" for g in rank_program.micro_graphs for v in g.inputs)
        self._constants: dict[tuple[str, Sharding], Tensor] = {}
        write_code(rank_program.prologue.module)

    @property
    def coordinates(self) -> dict[str, int]:
        """The rank's coordinates on the mesh, with the microbatch that is being run as ``micro``."""
        return {axis: self.communicator.coordinate(axis) for axis in self.communicator.mesh.names}

    @torch.no_grad()
    def step(
        self, feed: Feed, *, step: int = 0, seed: int = 0, scalars: Mapping[str, float] | None = None
    ) -> StepResult:
        """Run one step. ``scalars`` override the program's (``{"0/lr": 1e-3}``).

        Raises MeshwrightError E0605 before anything is updated if the loss is not finite.
        """
        values = {**self.rank_program.program.scalars, **(scalars or {})}
        key = torch.tensor([seed, step], dtype=torch.int64, device=self.device)
        with collectives.use(self.communicator):
            totals = self._microbatches(feed, key)
            loss, own = self._loss(totals)
            check_loss(loss, own, self.communicator, step, self.on_non_finite, self.device)
            for name in [v.name for v in totals if v.kind == "buffer"]:
                self.holdings.buffers[name] = totals.pop(Value("buffer", name)).value
            results = {v.name: totals.pop(v) for v in list(totals) if v.kind == "result"}
            gradients = {v.name: totals.pop(v) for v in list(totals) if v.kind == "gradient"}
            if self.keep_gradients:
                self.gradients = {name: g.value.clone() for name, g in gradients.items()}
            returned = self._update(gradients, key, values)
            norm = self._norm(returned)
        if self._offloads and self.device.type == "cuda":
            # copies to the host are under way still, and whoever reads the state there does not wait for them
            torch.cuda.current_stream(self.device).synchronize()
        if not self._scales_loss:  # else the update has left such a step out
            check_norm(norm, step, self.on_non_finite, self.communicator.rank)
        results |= {v.name: t for v, t in returned.items() if v.kind == "result"}
        return StepResult(loss, norm, results)

    @abstractmethod
    def _microbatches(self, feed: Feed, key: Tensor) -> dict[Value, Local]:
        """The totals of all outputs of the graphs that run once for each microbatch."""

    @abstractmethod
    def _update(
        self, gradients: dict[str, Local], key: Tensor, scalars: Mapping[str, float]
    ) -> dict[Value, Local]:  # fmt: skip
        """Update what is held, empty ``gradients``, and return what else the update gives: norm and results."""

    def _loss(self, totals: dict[Value, Local]) -> tuple[float, Local | None]:
        """The loss of the whole batch, and this rank's part; what it owes over axes of the mesh is paid here."""
        (value,) = (v for v in totals if v.kind == "loss")
        own = totals.pop(value)
        return float(self._paid(own)), own

    def _paid(self, own: Local) -> Tensor:
        return paid(own.value, own.sharding, self.rank_program.mesh)

    def _norm(self, returned: Mapping[Value, Local]) -> float | None:
        return next((float(t.value) for v, t in returned.items() if v.kind == "norm"), None)

    def _prologue(self, feed: Feed, key: Tensor) -> dict[Value, Local]:
        self.communicator.microbatch = 0
        graph = self.rank_program.prologue
        inputs = [self._batch_or_constant(v, graph.inputs[v], feed, key) for v in graph.signature.inputs]
        outputs = zip(graph.signature.outputs, graph.module(*inputs), strict=True)
        return {v: Local(t, graph.outputs[v]) for v, t in outputs}

    def _micro_input(self, v: Value, s: Sharding, feed: Feed, prologue: Mapping[Value, Local], key: Tensor) -> Tensor:
        if v.kind in ("parameter", "buffer", "state"):
            return self.holdings.of(v.kind)[v.name]
        if v.kind == "prologue":
            found = prologue[v]
            return slice_microbatch(found.value, found.sharding, s, self.communicator.mesh, self.coordinates)
        return self._batch_or_constant(v, s, feed, key)

    def _update_input(
        self, value: Value, sharding: Sharding, key: Tensor, scalars: Mapping[str, float]
    ) -> Tensor:  # fmt: skip
        """An input of ``update`` that is no gradient."""
        if value.kind in ("parameter", "state"):
            return self.holdings.of(value.kind)[value.name]
        if value.kind == "scalar":
            return torch.tensor(scalars[value.name], dtype=torch.float64, device=self.device)
        return self._batch_or_constant(value, sharding, _no_batch, key)

    def _batch_or_constant(self, value: Value, sharding: Sharding, feed: Feed, key: Tensor) -> Tensor:
        if value.kind == "key":
            return key
        if value.kind == "batch":
            return feed(value.name, sharding, self.communicator.mesh, self.coordinates).to(self.device)
        if value.kind != "constant":
            raise InternalError(f"a graph has an input that the runtime cannot give: {value.kind} '{value.name}'")
        if (value.name, sharding) in self._constants:
            return self._constants[value.name, sharding]
        whole = self.rank_program.program.constants[value.name]
        made = take_shard(whole, sharding, self.communicator.mesh, self.coordinates).to(self.device)
        if MICRO not in sharding.axes:
            self._constants[value.name, sharding] = made
        return made

    def _accumulator(self, value: Value, sharding: Sharding) -> Accumulator:
        """For an output; of gradients in the dtype in which the plan reduces them."""
        dtype = None
        if value.kind == "gradient" and self.microbatches > 1:
            dtype = PRECISIONS[self.rank_program.plan.accumulate]
        return Accumulator(sharding, self.communicator.mesh, dtype)


def _no_batch(name: str, sharding: Sharding, mesh: Mesh, coordinates: Coordinates) -> Tensor:
    raise InternalError(f"update reads the batch tensor '{name}'")
