"""One step of one rank of a pipeline: it does what its program says, pass by pass and message by message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.adapter import write_code
from meshwright.compiler.graph.pipeline_program import PIPE, PipelineProgram
from meshwright.compiler.graph.program import Value
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Sharding
from meshwright.compiler.schedules.instructions import Compute, Exchange, Wait
from meshwright.compiler.schedules.lower import UPDATE
from meshwright.compiler.schedules.table import Action, parse_rows
from meshwright.runtime.accumulate import PRECISIONS, Accumulator, Taken
from meshwright.runtime.executor import Feed, Local, RankCommunicator, StepResult
from meshwright.runtime.finite import OnNonFinite, check_loss, check_norm
from meshwright.runtime.holdings import Holdings, input_dtype
from meshwright.runtime.layout import take_shard
from meshwright.runtime.microbatch import slice_microbatch

Origin = tuple[int, str]


class Mail(Protocol):
    """Messages between ranks, each known by a name."""

    def send(self, rank: int, name: str, tensors: Sequence[Tensor]) -> None: ...

    def receive(self, rank: int, name: str) -> list[Tensor]: ...


class PipelineExecutor:
    """Runs the steps of one rank. Parameters and optimizer state of its stages are in ``holdings``."""

    def __init__(
        self,
        program: PipelineProgram,
        communicator: RankCommunicator,
        mail: Mail,
        holdings: Holdings,
        *,
        on_non_finite: OnNonFinite = "stop",
        keep_gradients: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.program = program
        self.communicator = communicator
        self.mail = mail
        self.holdings = holdings
        self.on_non_finite: OnNonFinite = on_non_finite
        self.keep_gradients = keep_gradients
        self.gradients: dict[str, Tensor] = {}
        self.device = torch.device(device)
        self._pipe = communicator.coordinate(PIPE)
        self._stages = program.held_by(self._pipe)
        for number in self._stages:
            stage = program.stages[number]
            for graph in (*stage.passes.values(), *stage.update):
                write_code(graph.module)
        write_code(program.whole.prologue.module)
        self._rank_of = {
            pipe: program.mesh.rank({**program.mesh.coordinates(communicator.rank), PIPE: pipe})
            for pipe in range(program.mesh.size(PIPE))
        }
        self._leaving = self._names_that_leave()

    def _names_that_leave(self) -> dict[tuple[Origin, int], list[str]]:
        """By the pass that makes them and the ``pipe`` coordinate that reads them: values that are sent."""
        found: dict[tuple[Origin, int], dict[str, None]] = {}
        for pipe in range(self.program.mesh.size(PIPE)):
            for number in self.program.held_by(pipe):
                for (_, name), origin in self.program.stages[number].takes.items():
                    if origin[0] not in self.program.held_by(pipe):
                        found.setdefault((origin, pipe), {})[name] = None
        return {key: sorted(names) for key, names in found.items()}

    @torch.no_grad()
    def step(
        self, feed: Feed, *, step: int = 0, seed: int = 0, scalars: Mapping[str, float] | None = None
    ) -> StepResult:
        """Run one step. Raises MeshwrightError E0605 before anything is updated if the loss is not finite."""
        values = {**self.program.whole.program.scalars, **(scalars or {})}
        key = torch.tensor([seed, step], dtype=torch.int64, device=self.device)
        with collectives.use(self.communicator):
            return _Step(self, feed, key, step, values).run()

    def coordinates(self) -> dict[str, int]:
        return {axis: self.communicator.coordinate(axis) for axis in self.communicator.mesh.names}


class _Step:
    """What a step has come to."""

    def __init__(
        self, executor: PipelineExecutor, feed: Feed, key: Tensor, number: int, scalars: Mapping[str, float]
    ) -> None:
        self.executor = executor
        self.program = executor.program
        self.feed = feed
        self.key = key
        self.number = number
        self.scalars = scalars
        self.values: dict[tuple[int, str], Tensor] = {}
        """By microbatch and name: what passes have made and others of this rank will read."""
        self.taken = Taken()
        self.taken.whole(t for _, t in executor.holdings.items())
        self.accumulators: dict[Value, Accumulator] = {}
        self.prologue = self._prologue()
        self.result = StepResult(float("nan"))

    def run(self) -> StepResult:
        incoming: dict[str, int] = {}
        for instruction in self.program.programs[self.executor._pipe]:
            if isinstance(instruction, Exchange):
                for transfer in instruction.transfers:
                    if transfer.sends:
                        self._send(transfer.value, transfer.peer)
                    else:
                        incoming[transfer.value] = transfer.peer
            elif isinstance(instruction, Wait):
                if instruction.value in incoming:
                    self._receive(instruction.value, incoming.pop(instruction.value))
            elif isinstance(instruction, Compute) and instruction.name != UPDATE:
                for action in parse_rows(instruction.name)[0][0]:
                    for kind in ("I", "W") if action.kind == "B" else (action.kind,):
                        self._pass(action.stage, kind, action.microbatch)
        self._update()
        return self.result

    def _names(self, value: str, pipe: int) -> tuple[Action, list[str]]:
        ((action,),) = parse_rows(value)[0]
        return action, self.executor._leaving[(action.stage, action.kind), pipe]

    def _send(self, value: str, pipe: int) -> None:
        action, names = self._names(value, pipe)
        tensors = [self.values[action.microbatch, name] for name in names]
        self.executor.mail.send(self.executor._rank_of[pipe], value, tensors)

    def _receive(self, value: str, pipe: int) -> None:
        action, names = self._names(value, self.executor._pipe)
        tensors = self.executor.mail.receive(self.executor._rank_of[pipe], value)
        for name, tensor in zip(names, tensors, strict=True):
            self.values[action.microbatch, name] = tensor

    def _pass(self, stage: int, kind: str, microbatch: int) -> None:
        executor = self.executor
        executor.communicator.microbatch = microbatch
        graph = self.program.stages[stage].passes[kind]
        inputs = [self._input(v, graph.inputs[v], microbatch) for v in graph.signature.inputs]
        for value, output in zip(graph.signature.outputs, graph.module(*inputs), strict=True):
            if value.kind == "value":
                self.values[microbatch, value.name] = output
            else:
                if value not in self.accumulators:
                    dtype = self._accumulator_dtype(value)
                    self.accumulators[value] = Accumulator(graph.outputs[value], executor.communicator.mesh, dtype)
                self.accumulators[value].add(output, self.taken)

    def _input(self, v: Value, s: Sharding, microbatch: int) -> Tensor:
        executor = self.executor
        if v.kind == "value":
            return self.values[microbatch, v.name]
        if v.kind in ("parameter", "buffer"):
            return executor.holdings.of(v.kind)[v.name]
        if v.kind == "prologue":
            found = self.prologue[v]
            return slice_microbatch(found.value, found.sharding, s, executor.communicator.mesh, executor.coordinates())
        return self._batch_or_constant(v, s)

    def _batch_or_constant(self, v: Value, s: Sharding) -> Tensor:
        executor = self.executor
        if v.kind == "key":
            return self.key
        if v.kind == "batch":
            return self.feed(v.name, s, executor.communicator.mesh, executor.coordinates()).to(executor.device)
        if v.kind != "constant":
            raise InternalError(f"a graph has an input that the runtime cannot give: {v.kind} '{v.name}'")
        whole = self.program.whole.program.constants[v.name]
        return take_shard(whole, s, executor.communicator.mesh, executor.coordinates()).to(executor.device)

    def _prologue(self) -> dict[Value, Local]:
        self.executor.communicator.microbatch = 0
        graph = self.program.whole.prologue
        inputs = [self._batch_or_constant(v, graph.inputs[v]) for v in graph.signature.inputs]
        outputs = zip(graph.signature.outputs, graph.module(*inputs), strict=True)
        return {v: Local(t, graph.outputs[v]) for v, t in outputs}

    def _accumulator_dtype(self, value: Value) -> torch.dtype | None:
        if value.kind != "gradient" or self.program.schedule.microbatches == 1:
            return None
        return PRECISIONS[self.program.whole.plan.precision.reduce]

    def _update(self) -> None:
        executor, program = self.executor, self.program
        executor.communicator.microbatch = 0
        self.values.clear()
        totals = {v: Local(*a.take()) for v, a in self.accumulators.items()}
        loss = self._loss(totals)
        for value in [v for v in totals if v.kind == "buffer"]:
            executor.holdings.buffers[value.name] = totals.pop(value).value
        results = {v.name: totals.pop(v) for v in list(totals) if v.kind == "result"}
        gradients = {v.name: totals.pop(v) for v in list(totals) if v.kind == "gradient"}
        if executor.keep_gradients:
            executor.gradients = {name: g.value.clone() for name, g in gradients.items()}
        norm: float | None = None
        written: dict[Value, Tensor] = {}
        made: dict[str, Tensor] = {}
        for number in range(len(program.stages[0].update)):
            for stage in executor._stages:
                graph = program.stages[stage].update[number]
                inputs = [self._update_input(v, graph, gradients, made) for v in graph.signature.inputs]
                for value, output in zip(graph.signature.outputs, graph.module(*inputs), strict=True):
                    if value.kind == "value":
                        made[value.name] = output
                    elif value.kind == "norm":
                        norm = float(output)
                    elif value.kind == "result":
                        results[value.name] = Local(output, graph.outputs[value])
                    else:
                        written[value] = output
            self._hand_over(number, made)
        self._copies(written)
        for value, tensor in written.items():
            executor.holdings.of(value.kind)[value.name] = tensor.clone()
        check_norm(norm, self.number, executor.on_non_finite, executor.communicator.rank)
        self.result = StepResult(loss, norm, results)

    def _update_input(
        self, v: Value, graph: LocalGraph, gradients: Mapping[str, Local], made: Mapping[str, Tensor]
    ) -> Tensor:
        if v.kind == "value":
            return made[v.name]
        if v.kind in ("parameter", "state"):
            return self.executor.holdings.of(v.kind)[v.name]
        if v.kind == "gradient":
            gradient = gradients[v.name]
            return gradient.value.to(input_dtype(graph, v) or gradient.value.dtype)
        if v.kind == "scalar":
            return torch.tensor(self.scalars[v.name], dtype=torch.float64, device=self.executor.device)
        return self._batch_or_constant(v, graph.inputs[v])

    def _hand_over(self, number: int, made: dict[str, Tensor]) -> None:
        """What other stages need of a round: all is sent, then all is received."""
        program = self.program
        moves: dict[tuple[int, int], set[str]] = {}
        for pipe in range(program.mesh.size(PIPE)):
            for stage in program.held_by(pipe):
                for (_, name), origin in program.stages[stage].hands_over.items():
                    source = program.schedule.placement[0][origin[0]]
                    if origin[1] == number and source != pipe:
                        moves.setdefault((source, pipe), set()).add(name)
        self._move(moves, f"round {number}", made)

    def _move(self, moves: Mapping[tuple[int, int], set[str]], label: str, made: dict[str, Tensor]) -> None:
        executor = self.executor
        for (source, target), names in sorted(moves.items()):
            if source == executor._pipe:
                executor.mail.send(executor._rank_of[target], label, [made[n] for n in sorted(names)])
        for (source, target), names in sorted(moves.items()):
            if target == executor._pipe:
                found = executor.mail.receive(executor._rank_of[source], label)
                made.update(zip(sorted(names), found, strict=True))

    def _copies(self, written: dict[Value, Tensor]) -> None:
        """Give all copies of tied parameters their new value."""
        program, executor = self.program, self.executor
        home = {n: i for i, stage in enumerate(program.stages) for n in stage.parameters}
        moves: dict[tuple[int, int], set[str]] = {}
        place = program.schedule.placement[0]
        for copy, name in program.copies.items():
            moves.setdefault((place[home[name]], place[home[copy]]), set()).add(copy)
        own = {c: written.pop(Value("parameter", c), None) for c in program.copies}
        made = {c: t for c, t in own.items() if t is not None}
        self._move({pair: names for pair, names in moves.items() if pair[0] != pair[1]}, "copies", made)
        for copy in program.copies:
            if copy in made and place[home[copy]] == executor._pipe:
                written[Value("parameter", copy)] = made[copy]

    def _loss(self, totals: dict[Value, Local]) -> float:
        """The loss of the whole batch, on every stage."""
        executor, mesh = self.executor, self.program.mesh
        value = next((v for v in totals if v.kind == "loss"), None)
        total = torch.zeros((), dtype=torch.float64, device=executor.device)
        own = None
        if value is not None:
            own = totals.pop(value)
            part = own.value
            for reduction in sorted({r for _, r in own.sharding.partial}):
                axes = tuple(a for a in mesh.names if (a, reduction) in own.sharding.partial)
                part = collectives.all_reduce(part, axes, reduction)
            total = part.to(torch.float64)
        loss = float(collectives.all_reduce(total.clone(), (PIPE,), "sum"))
        if own is not None:
            check_loss(loss, own, executor.communicator, self.number, executor.on_non_finite)
        return loss
