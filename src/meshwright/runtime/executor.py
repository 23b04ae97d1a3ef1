"""One step of one rank: prologue, ``micro`` once per microbatch, update.

The executor holds the rank's shards (:class:`Holdings`) and runs the rank program under a
communicator: ``torch.distributed`` or the virtual cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from meshwright.compiler.analysis.offloading import on_host
from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.adapter import write_code
from meshwright.compiler.graph.program import Value
from meshwright.compiler.graph.rank_program import LocalGraph, RankProgram
from meshwright.compiler.mesh import MICRO, Mesh, Sharding
from meshwright.runtime.accumulate import PRECISIONS, Accumulator, Taken
from meshwright.runtime.deposit import depositing, taking
from meshwright.runtime.finite import OnNonFinite, check_loss, check_norm
from meshwright.runtime.holdings import Holdings, input_dtype
from meshwright.runtime.inplace import update_in_place
from meshwright.runtime.layout import Coordinates, take_shard
from meshwright.runtime.microbatch import slice_microbatch


class RankCommunicator(collectives.Communicator, Protocol):
    """A communicator as the executor sets it up: it is told which microbatch runs."""

    rank: int
    microbatch: int


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
    """``loss`` of the whole batch, the gradient ``norm`` before clipping, and further outputs as shards."""

    loss: float
    norm: float | None = None
    results: Mapping[str, Local] = field(default_factory=dict)


class Executor:
    """Runs the steps of one rank. Parameters and optimizer state are updated in place in ``holdings``."""

    def __init__(
        self,
        rank_program: RankProgram,
        communicator: RankCommunicator,
        holdings: Holdings,
        *,
        on_non_finite: OnNonFinite = "stop",
        keep_gradients: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rank_program = rank_program
        self.communicator = communicator
        self.holdings = holdings
        self.on_non_finite: Literal["stop", "warn"] = on_non_finite
        self.keep_gradients = keep_gradients
        self.gradients: dict[str, Tensor] = {}
        """The gradients of the last step as ``update`` got them, if ``keep_gradients``."""
        self.device = torch.device(device)
        self.microbatches = rank_program.plan.microbatches
        for graph in (rank_program.prologue, rank_program.micro):
            write_code(graph.module)
        self._micro = depositing(rank_program.micro) if self.microbatches > 1 else rank_program.micro.module
        self._update = update_in_place(rank_program.update)
        self._dtypes = {v: input_dtype(rank_program.update, v) for v in rank_program.update.signature.inputs}
        self._offloads = bool(on_host(rank_program.update))
        self._constants: dict[tuple[str, Sharding], Tensor] = {}

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
            loss = self._loss(totals, step)
            for name in [v.name for v in totals if v.kind == "buffer"]:
                self.holdings.buffers[name] = totals.pop(Value("buffer", name)).value
            results = {v.name: totals.pop(v) for v in list(totals) if v.kind == "result"}
            returned = self._run_update(totals, key, values)
        norm = next((float(t.value) for v, t in returned.items() if v.kind == "norm"), None)
        check_norm(norm, step, self.on_non_finite, self.communicator.rank)
        results |= {v.name: t for v, t in returned.items() if v.kind == "result"}
        return StepResult(loss, norm, results)

    def _microbatches(self, feed: Feed, key: Tensor) -> dict[Value, Local]:
        """The totals of all outputs of ``micro``."""
        communicator, graph = self.communicator, self.rank_program.micro
        communicator.microbatch = 0
        prologue = self._prologue(feed, key)
        accumulators = {
            v: Accumulator(s, communicator.mesh, self._accumulator_dtype(v)) for v, s in graph.outputs.items()
        }
        taken = Taken()
        for microbatch in range(self.microbatches):
            communicator.microbatch = microbatch
            inputs = [self._micro_input(v, graph.inputs[v], feed, prologue, key) for v in graph.signature.inputs]
            if not microbatch:
                taken.whole(inputs)
                taken.whole(t for _, t in self.holdings.items())
            with taking(lambda at, value: accumulators[graph.signature.outputs[at]].add(value, taken)):
                outputs = list(self._micro(*inputs))
            for value, output in zip(graph.signature.outputs, outputs, strict=True):
                if output is not None:  # else it was deposited
                    accumulators[value].add(output, taken)
        communicator.microbatch = 0
        return {v: Local(*accumulators.pop(v).take()) for v in graph.signature.outputs}

    def _prologue(self, feed: Feed, key: Tensor) -> dict[Value, Local]:
        graph = self.rank_program.prologue
        inputs = [self._batch_or_constant(v, graph.inputs[v], feed, key) for v in graph.signature.inputs]
        return {
            v: Local(t, graph.outputs[v])
            for v, t in zip(graph.signature.outputs, graph.module(*inputs), strict=True)
        }  # fmt: skip

    def _micro_input(self, v: Value, s: Sharding, feed: Feed, prologue: Mapping[Value, Local], key: Tensor) -> Tensor:
        if v.kind in ("parameter", "buffer"):
            return self.holdings.of(v.kind)[v.name]
        if v.kind == "prologue":
            found = prologue[v]
            return slice_microbatch(found.value, found.sharding, s, self.communicator.mesh, self.coordinates)
        return self._batch_or_constant(v, s, feed, key)

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

    def _accumulator_dtype(self, value: Value) -> torch.dtype | None:
        if value.kind != "gradient" or self.microbatches == 1:
            return None
        return PRECISIONS[self.rank_program.plan.precision.reduce]

    def _loss(self, totals: dict[Value, Local], step: int) -> float:
        """The loss of the whole batch; what it owes over axes of the mesh is paid here."""
        (value,) = (v for v in totals if v.kind == "loss")
        own = totals.pop(value)
        total = own.value
        for reduction in sorted({r for _, r in own.sharding.partial}):
            axes = tuple(a for a in self.rank_program.mesh.names if (a, reduction) in own.sharding.partial)
            total = collectives.all_reduce(total, axes, reduction)
        check_loss(float(total), own, self.communicator, step, self.on_non_finite)
        return float(total)

    def _run_update(self, totals: dict[Value, Local], key: Tensor, scalars: Mapping[str, float]) -> dict[Value, Local]:
        graph: LocalGraph = self.rank_program.update
        gradients = {v.name: totals.pop(v) for v in list(totals) if v.kind == "gradient"}
        if self.keep_gradients:
            self.gradients = {name: g.value.clone() for name, g in gradients.items()}
        inputs: list[Tensor] = []
        for value in graph.signature.inputs:
            sharding = graph.inputs[value]
            if value.kind in ("parameter", "state"):
                inputs.append(self.holdings.of(value.kind)[value.name])
            elif value.kind == "gradient":
                gradient = gradients.pop(value.name)
                if gradient.sharding != sharding:
                    raise InternalError(f"gradient '{value.name}' lies as {gradient.sharding}, update takes {sharding}")
                inputs.append(gradient.value.to(self._dtypes[value] or gradient.value.dtype))
                del gradient
            elif value.kind == "scalar":
                inputs.append(torch.tensor(scalars[value.name], dtype=torch.float64, device=self.device))
            else:
                inputs.append(self._batch_or_constant(value, sharding, _no_batch, key))
        gradients.clear()
        outputs = self._update.module(inputs)
        if self._offloads and self.device.type == "cuda":
            # copies to the host are under way still, and whoever reads the state there does not wait for them
            torch.cuda.current_stream(self.device).synchronize()
        return {v: Local(t, graph.outputs[v]) for v, t in zip(self._update.outputs, outputs, strict=True)}


def _no_batch(name: str, sharding: Sharding, mesh: Mesh, coordinates: Coordinates) -> Tensor:
    raise InternalError(f"update reads the batch tensor '{name}'")
