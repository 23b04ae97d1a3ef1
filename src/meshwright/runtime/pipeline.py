"""One step of one rank of a pipeline: it does what its program says, pass by pass and message by message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Unpack

import torch
from torch import Tensor, fx

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.program import Value
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.plan import PIPE
from meshwright.compiler.schedules.instructions import Compute, Exchange, Wait
from meshwright.compiler.schedules.lower import UPDATE
from meshwright.compiler.schedules.table import Action, parse_rows
from meshwright.runtime.accumulate import Accumulator, AllTaken, Product, Taken
from meshwright.runtime.deposit import runnable, taking
from meshwright.runtime.holdings import Holdings
from meshwright.runtime.mail import Mail, Parcel
from meshwright.runtime.mailroom import Mailroom
from meshwright.runtime.rounds import Opening, met, opening_of
from meshwright.runtime.stage_update import StageUpdate
from meshwright.runtime.step_executor import Feed, Local, Options, RankCommunicator, StepExecutor
from meshwright.runtime.two_directions import put_together


class PipelineExecutor(StepExecutor):
    """Runs the steps of one rank. Parameters and optimizer state of its stages are in ``holdings``."""

    rank_program: PipelineProgram

    def __init__(
        self,
        rank_program: PipelineProgram,
        communicator: RankCommunicator,
        mail: Mail,
        holdings: Holdings,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(rank_program, communicator, holdings, **options)
        self.mail = mail
        self._pipe = communicator.coordinate(PIPE)
        self._modules: dict[tuple[int, str], fx.GraphModule] = {}
        self._graphs: dict[tuple[int, str], tuple[LocalGraph, Mapping[str, int]]] = {}
        """By stage and pass: the graph, and by value that comes in, the stage that makes it."""
        self._openings: dict[tuple[int, str], Opening] = {}
        for number in rank_program.held_by(self._pipe):
            takes = rank_program.stages[number].takes
            for kind, graph in rank_program.stages[number].passes.items():
                self._graphs[number, kind] = (
                    graph,
                    {name: made[0] for (into, name), made in takes.items() if into == kind},
                )
                module = runnable(graph, deposits=self.microbatches > 1)
                opening = opening_of(module)
                if opening is not None:
                    self._openings[number, kind] = opening
                self._modules[number, kind] = module if opening is None else opening.module
        self._program = rank_program.programs[self._pipe]
        # said of every instruction of every step, and dear to put into words
        self._doing = [f"at instruction {number} ({one})" for number, one in enumerate(self._program)]
        self._actions = {
            i.name: parse_rows(i.name)[0][0] for i in self._program if isinstance(i, Compute) and i.name != UPDATE
        }
        self._room = Mailroom(rank_program, communicator.rank, self._pipe, self.device)
        self._stage_update = StageUpdate(rank_program, self._pipe)

    def _microbatches(self, feed: Feed, key: Tensor) -> dict[Value, Local]:
        return _Passes(self, feed, key).run()

    def _update(
        self, gradients: dict[str, Local], key: Tensor, scalars: Mapping[str, float]
    ) -> dict[Value, Local]:  # fmt: skip
        self.communicator.doing = UPDATE

        def read(value: Value, graph: LocalGraph) -> Tensor:
            return self._update_input(value, graph.inputs[value], key, scalars)

        return self._stage_update.run(gradients, self.holdings, read, self.mail, self._room)

    def _loss(self, totals: dict[Value, Local]) -> tuple[float, Local | None]:
        """On every stage; only the last one has a part, for the microbatches of its direction."""
        value = next((v for v in totals if v.kind == "loss"), None)
        own = totals.pop(value) if value is not None else None
        part = self._paid(own).to(torch.float64) if own is not None else self._nothing()
        return float(collectives.all_reduce(part.clone(), (PIPE,), "sum")), own

    def _norm(self, returned: Mapping[Value, Local]) -> float | None:
        """On every stage; only the last one has computed it."""
        outputs = (v for graph in self.rank_program.update_graphs for v in graph.signature.outputs)
        if not any(v.kind == "norm" for v in outputs):
            return None
        own = super()._norm(returned)
        part = self._nothing() if own is None else self._nothing() + own
        return float(collectives.all_reduce(part, (PIPE,), "sum"))

    def _nothing(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)


class _Passes:
    """The microbatches of a step, as far as they have come."""

    def __init__(self, executor: PipelineExecutor, feed: Feed, key: Tensor) -> None:
        self.executor, self.feed, self.key = executor, feed, key
        self.room = executor._room
        self.values: dict[tuple[int, int, str], Tensor] = {}
        """By microbatch, stage that made it, and name: what passes have made and others, or other ranks, still read."""
        self.left: dict[int, Counter[tuple[int, str]]] = {}
        """By microbatch, stage that made it, and name: how many readers are left."""
        # what a microbatch that waits in a round reads may lie in the memory of a gradient that it has given already
        self.taken = AllTaken() if executor._openings else Taken()
        self.taken.whole(t for _, t in executor.holdings.items())
        self.accumulators: dict[Value, Accumulator] = {}
        self.ran: set[tuple[int, str]] = set()
        self.met: dict[tuple[int, str, int], list[Tensor]] = {}
        """By stage, pass and microbatch: what the meetings have made that the pass begins with."""

    def run(self) -> dict[Value, Local]:
        executor = self.executor
        self.prologue = executor._prologue(self.feed, self.key)
        self.taken.whole(t.value for t in self.prologue.values())
        for doing, instruction in zip(executor._doing, executor._program, strict=True):
            executor.communicator.doing = doing
            if isinstance(instruction, Exchange):
                self._begin(instruction)
            elif isinstance(instruction, Wait):
                self._finish(instruction.value)
            elif isinstance(instruction, Compute) and instruction.name != UPDATE:
                for action in executor._actions[instruction.name]:
                    for one in action.passes:
                        self._pass(one.stage, one.kind, one.microbatch)
        if self.values:
            raise InternalError(f"values that nothing has read: {sorted({name for *_, name in self.values})}")
        executor.communicator.microbatch = 0
        executor.communicator.doing = "putting together what both directions have made"
        put_together(executor.rank_program, executor._pipe, self.accumulators, executor.mail, self.room)
        return {v: Local(*a.take()) for v, a in self.accumulators.items()}

    def _begin(self, exchange: Exchange) -> None:
        sends, receives = [], []
        for transfer in exchange.transfers:
            action = _action(transfer.value)
            if transfer.sends:
                names = self.room.leaving(action, transfer.peer)
                tensors = [self.values[action.microbatch, action.stage, n].contiguous() for n in names]
                sends.append(Parcel(self.room.rank_of(transfer.peer), transfer.value, tensors))
            else:
                tensors = self.room.buffers(action)
                self.taken.whole(tensors)
                receives.append(Parcel(self.room.rank_of(transfer.peer), transfer.value, tensors))
        self.room.under_way(self.executor.mail.begin(sends, receives), sends, receives)

    def _finish(self, value: str) -> None:
        """Of what was sent nothing is kept any longer; what has come can be read."""
        action = _action(value)
        for parcel, came in self.room.wait(value):
            if came:
                for name, tensor in zip(self.room.coming(action), parcel.tensors, strict=True):
                    self._keep(action.microbatch, action.stage, name, tensor)
            else:
                for name in self.room.leaving(action, self.room.pipe_of(parcel.rank)):
                    self._read(action.microbatch, action.stage, name)

    def _pass(self, stage: int, kind: str, microbatch: int) -> None:
        executor = self.executor
        graph, takes = self.executor._graphs[stage, kind]
        opening = executor._openings.get((stage, kind))
        if opening is not None and (stage, kind) not in self.ran:
            self._meet(stage, kind, opening)
        executor.communicator.microbatch = microbatch
        inputs = [self._input(v, graph, takes, microbatch) for v in graph.signature.inputs]
        if (stage, kind) not in self.ran:
            self.ran.add((stage, kind))
            self.taken.whole(t for v, t in zip(graph.signature.inputs, inputs, strict=True) if v.kind != "value")

        def put(at: int, value: Tensor | Product) -> None:
            self._add(graph, graph.signature.outputs[at], value, microbatch)

        with taking(put):
            outputs = executor._modules[stage, kind](*inputs, *self.met.pop((stage, kind, microbatch), ()))
        del inputs
        # kept before what it may be a view of is read: else the microbatch could seem to have nothing here any more
        for value, output in zip(graph.signature.outputs, outputs, strict=True):
            if value.kind == "value":
                self._keep(microbatch, stage, value.name, output)
            elif output is not None:  # else it was deposited
                self._add(graph, value, output, microbatch)
        for value in graph.signature.inputs:
            if value.kind == "value":
                self._read(microbatch, takes[value.name], value.name)

    def _meet(self, stage: int, kind: str, opening: Opening) -> None:
        """Add up or join what all microbatches have come with, before the first of them goes on."""
        communicator, microbatches = self.executor.communicator, range(self.executor.microbatches)
        graph, takes = self.executor._graphs[stage, kind]
        results: list[list[Tensor]] = []
        for node, operand in zip(opening.meetings, opening.operands, strict=True):
            parts = []
            for microbatch in microbatches:
                communicator.microbatch = microbatch
                parts.append(self._input(graph.signature.inputs[operand], graph, takes, microbatch))
            results.append(met(node, parts, communicator))
        for microbatch in microbatches:
            self.met[stage, kind, microbatch] = [each[microbatch] for each in results]

    def _add(self, graph: LocalGraph, value: Value, output: Tensor | Product, microbatch: int) -> None:
        if value not in self.accumulators:
            self.accumulators[value] = self.executor._accumulator(value, graph.outputs[value])
        self.accumulators[value].add(output, self.taken, microbatch)

    def _input(self, value: Value, graph: LocalGraph, takes: Mapping[str, int], microbatch: int) -> Tensor:
        if value.kind == "value":
            return self.values[microbatch, takes[value.name], value.name]
        return self.executor._micro_input(value, graph.inputs[value], self.feed, self.prologue, self.key)

    def _keep(self, microbatch: int, stage: int, name: str, tensor: Tensor) -> None:
        """``stage``: the one that made it."""
        if readers := self.room.readers(stage, name, microbatch):
            self.values[microbatch, stage, name] = tensor
            self.left.setdefault(microbatch, Counter())[stage, name] = readers

    def _read(self, microbatch: int, stage: int, name: str) -> None:
        """One reader is done. Buffers of messages are used again when a microbatch has nothing here any more, since
        what is kept may be a view of them."""
        left = self.left[microbatch]
        left[stage, name] -= 1
        if not left[stage, name]:
            del left[stage, name], self.values[microbatch, stage, name]
        if not left:
            self.room.release(microbatch)


@cache
def _action(value: str) -> Action:
    ((action,),) = parse_rows(value)[0]
    return action
