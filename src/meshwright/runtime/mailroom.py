"""What a rank of a pipeline sends and receives: names, buffers, and what is under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.graph.stage_messages import Origin, Spec, specs, wanted
from meshwright.compiler.plan import PIPE
from meshwright.compiler.schedules.table import Action
from meshwright.runtime.mail import Parcel, Pending

Way = int
"""The direction in which a microbatch goes, which says which rank runs a stage."""


class Mailroom:
    """Of one rank. Messages carry the values of one pass of one microbatch for one other rank, in the order of names;
    their buffers are allocated once."""

    def __init__(self, program: PipelineProgram, rank: int, pipe: int, device: torch.device) -> None:
        self._program, self._pipe, self.device = program, pipe, device
        at = program.mesh.coordinates(rank)
        self._ranks = [program.mesh.rank({**at, PIPE: other}) for other in range(program.mesh.size(PIPE))]
        self._ways = range(len(program.schedule.placement))
        reads = {
            (way, other): wanted(program.stages, program.schedule.placement[way], other)
            for way in self._ways
            for other in range(program.mesh.size(PIPE))
        }
        self._leaving = {
            (way, origin, other): names
            for (way, other), found in reads.items()
            for origin, names in found.items()
            if other != pipe
        }
        self._coming = {(way, origin): names for way in self._ways for origin, names in reads[way, pipe].items()}
        self._specs = self._specs_of({name for names in self._coming.values() for name in names})
        self._free: dict[tuple[Way, Origin], list[list[Tensor]]] = {}
        self._lent: dict[int, list[tuple[tuple[Way, Origin], list[Tensor]]]] = {}
        self._under_way: dict[str, list[tuple[Parcel, bool, Pending]]] = {}
        self._readers = [self._count(way) for way in self._ways]

    def rank_of(self, pipe: int) -> int:
        """The rank at a ``pipe`` coordinate whose other coordinates are this one's."""
        return self._ranks[pipe]

    def pipe_of(self, rank: int) -> int:
        return self._ranks.index(rank)

    def leaving(self, action: Action, pipe: int) -> list[str]:
        """The values of a pass that a ``pipe`` coordinate reads."""
        return self._leaving[self._way(action.microbatch), (action.stage, action.kind), pipe]

    def coming(self, action: Action) -> list[str]:
        """The values of another rank's pass that this one reads."""
        return self._coming[self._way(action.microbatch), (action.stage, action.kind)]

    def readers(self, stage: int, name: str, microbatch: int) -> int:
        """How many read a value that a stage makes: passes of this rank, and ranks that it is sent to. What several
        stages need and is as easily made as sent has the same name in each."""
        return self._readers[self._way(microbatch)][stage, name]

    def buffers(self, action: Action) -> list[Tensor]:
        """For what comes of a pass; they are lent until the microbatch is released."""
        origin = (self._way(action.microbatch), (action.stage, action.kind))
        free = self._free.get(origin)
        made = free.pop() if free else [self._empty(name) for name in self._coming[origin]]
        self._lent.setdefault(action.microbatch, []).append((origin, made))
        return made

    def release(self, microbatch: int) -> None:
        """Nothing in the buffers of a microbatch is read any more. Those of messages that are still to come stay."""
        busy = {id(p.tensors) for parcels in self._under_way.values() for p, _, _ in parcels}
        lent = self._lent.pop(microbatch, [])
        kept = [(origin, buffers) for origin, buffers in lent if id(buffers) in busy]
        if kept:
            self._lent[microbatch] = kept
        for origin, buffers in lent:
            if id(buffers) not in busy:
                self._free.setdefault(origin, []).append(buffers)

    def under_way(self, begun: Sequence[Pending], sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Keep what was begun until :meth:`wait`."""
        parcels = [*((parcel, False) for parcel in sends), *((parcel, True) for parcel in receives)]
        for (parcel, comes), pending in zip(parcels, begun, strict=True):
            self._under_way.setdefault(parcel.name, []).append((parcel, comes, pending))

    def wait(self, name: str) -> Iterator[tuple[Parcel, bool]]:
        """Finish the messages of a name; each parcel, and whether it came here."""
        if name not in self._under_way:
            raise InternalError(f"no message with {name} is under way")
        for parcel, comes, pending in self._under_way[name]:
            pending.wait()
            yield parcel, comes
        del self._under_way[name]

    def _empty(self, name: str) -> Tensor:
        shape, dtype = self._specs[name]
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _specs_of(self, names: set[str]) -> dict[str, Spec]:
        graphs = (graph for way in self._ways for graph in self._passes(way))
        return {v.name: spec for graph in graphs for v, spec in specs(graph).items() if v.name in names}

    def _way(self, microbatch: int) -> Way:
        return self._program.schedule.direction(microbatch)

    def _passes(self, way: Way) -> Iterator[LocalGraph]:
        for number in _stages(self._program, way, self._pipe):
            yield from self._program.stages[number].passes.values()

    def _count(self, way: Way) -> Counter[tuple[int, str]]:
        mine = _stages(self._program, way, self._pipe)
        takes = (self._program.stages[number].takes for number in mine)
        found = Counter((made_in, name) for each in takes for (_, name), (made_in, _) in each.items())
        leaving = ((origin, names) for (one, origin, _), names in self._leaving.items() if one == way)
        found.update((origin[0], name) for origin, names in leaving if origin[0] in mine for name in names)
        return found


def _stages(program: PipelineProgram, way: Way, pipe: int) -> list[int]:
    """The stages that a ``pipe`` coordinate runs for the microbatches that go one way."""
    return [stage for stage, rank in enumerate(program.schedule.placement[way]) if rank == pipe]
