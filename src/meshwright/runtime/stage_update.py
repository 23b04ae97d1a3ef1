"""The update of a rank of a pipeline: in rounds, between which stages hand values over.

The global norm is made of the norms of all stages, a tied weight's gradient is the sum of those of its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.program import Value
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.graph.stage_messages import copies_after, moves_after, specs
from meshwright.runtime.holdings import Holdings, input_dtypes
from meshwright.runtime.inplace import InPlaceUpdate, update_in_place
from meshwright.runtime.mail import Mail, Parcel
from meshwright.runtime.mailroom import Mailroom
from meshwright.runtime.step_executor import Local

Read = Callable[[Value, LocalGraph], Tensor]
"""Gives an input of the update that is neither a gradient nor made by another round."""


@dataclass(frozen=True)
class _Round:
    graph: LocalGraph
    module: InPlaceUpdate
    dtypes: Mapping[Value, torch.dtype | None]
    """What the graph expects of its inputs."""
    later: frozenset[Value]
    """Inputs that a later round of the stage reads too."""
    shared: frozenset[str]
    """Values for other stages of the same rank."""


class StageUpdate:
    """Of one rank, whose stages do each round one after the other. What the graphs say is read once, not in each step:
    there is a value for every parameter of every other rank."""

    def __init__(self, program: PipelineProgram, pipe: int) -> None:
        self._pipe = pipe
        rounds = len(program.stages[0].update)
        self._rounds: list[list[_Round]] = [[] for _ in range(rounds)]
        for number in program.updated_by(pipe):
            graphs = program.stages[number].update
            shared = {
                name
                for other in program.updated_by(pipe)
                for (_, name), (source, _) in program.stages[other].hands_over.items()
                if source == number != other
            }
            for at, graph in enumerate(graphs):
                later = frozenset(v for after in graphs[at + 1 :] for v in after.signature.inputs)
                frozen = later & frozenset(graph.signature.inputs)
                made = update_in_place(graph, frozen)
                self._rounds[at].append(_Round(graph, made, input_dtypes(graph), frozen, frozenset(shared)))
        self._moves = [moves_after(program, at) for at in range(rounds)]
        self._copies = list(copies_after(program))
        ours = [one.graph for stages in self._rounds for one in stages]
        self._specs = {value.name: spec for graph in ours for value, spec in specs(graph).items()}
        self._needed = [
            {v.name for later in self._rounds[at + 1 :] for one in later for v in one.graph.signature.inputs}
            for at in range(rounds)
        ]

    def run(
        self, gradients: dict[str, Local], holdings: Holdings, read: Read, mail: Mail, room: Mailroom
    ) -> dict[Value, Local]:
        """Update what is held; the norm and further results are returned. ``gradients`` are used up."""
        made: dict[str, Tensor] = {}
        returned: dict[Value, Local] = {}
        for at, stages in enumerate(self._rounds):
            for one in stages:
                inputs = [self._input(v, one, gradients, made, read) for v in one.graph.signature.inputs]
                outputs = one.module.module(inputs)
                for value, output in zip(one.module.outputs, outputs, strict=True):
                    if value.kind == "value":
                        # a gradient that is handed over as it is may be written over before the other stage reads it
                        made[value.name] = output.clone() if value.name in one.shared else output
                    else:
                        returned[value] = Local(output, one.graph.outputs[value])
            self._hand_over(at, made, mail, room)
            made = {name: tensor for name, tensor in made.items() if name in self._needed[at]}
        gradients.clear()
        for value in [v for v in returned if v.kind in ("parameter", "state")]:
            # a later round has read the old value
            holdings.of(value.kind)[value.name].copy_(returned.pop(value).value)
        self._copy(holdings, mail, room)
        return returned

    def _input(
        self, value: Value, one: _Round, gradients: dict[str, Local], made: dict[str, Tensor], read: Read
    ) -> Tensor:
        if value.kind == "value":
            return made[value.name]
        if value.kind != "gradient":
            return read(value, one.graph)
        gradient = gradients[value.name] if value in one.later else gradients.pop(value.name)
        return gradient.value.to(one.dtypes[value] or gradient.value.dtype)

    def _hand_over(self, at: int, made: dict[str, Tensor], mail: Mail, room: Mailroom) -> None:
        sends, receives = [], []
        for (source, target), names in self._moves[at].items():
            label = f"round {at} of the update"
            if source == self._pipe:
                sends.append(Parcel(room.rank_of(target), label, [made[n].contiguous() for n in names]))
            elif target == self._pipe:
                buffers = [self._empty(name, room) for name in names]
                made.update(zip(names, buffers, strict=True))
                receives.append(Parcel(room.rank_of(source), label, buffers))
        for pending in mail.begin(sends, receives):
            pending.wait()

    def _empty(self, name: str, room: Mailroom) -> Tensor:
        shape, dtype = self._specs[name]
        return torch.empty(shape, dtype=dtype, device=room.device)

    def _copy(self, holdings: Holdings, mail: Mail, room: Mailroom) -> None:
        """Give further copies of parameters their new value: of tied ones, and of stages that two ranks hold."""
        sends, receives = [], []
        for name, source, copy, target in self._copies:
            if source == self._pipe:
                sends.append(Parcel(room.rank_of(target), copy, [holdings.parameters[name].contiguous()]))
            elif target == self._pipe:
                receives.append(Parcel(room.rank_of(source), copy, [holdings.parameters[copy]]))
        for pending in mail.begin(sends, receives):
            pending.wait()
