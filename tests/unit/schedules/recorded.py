"""What the ranks of the virtual cluster ask of one another in a step, and what their programs say, in one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.graph.pending import Kind, Work, at_once
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.schedules.instructions import Collective, Exchange, Program, Wait
from meshwright.compiler.schedules.symmetry import group_of
from meshwright.runtime.feed import whole_batch
from meshwright.runtime.mail import Mail, Parcel, Pending
from meshwright.runtime.materialize import Weights
from meshwright.runtime.pipeline import PipelineExecutor
from meshwright.runtime.step_executor import RankCommunicator, StepExecutor
from meshwright.runtime.virtual import VirtualCluster

Log = list[str]
"""Of one rank, in order: ``0: all_reduce(sum) f32 64 over 0,1``, ``1: send 256 > 4``, ``wait 0``."""


def recorded(compiled: Compiled, weights: Weights, batch: Mapping[str, Tensor]) -> list[Log]:
    """What every rank does in one step."""
    feed = whole_batch(batch, compiled.program)

    def step(executor: StepExecutor) -> Log:
        log = _Log()
        executor.communicator = _Communicator(executor.communicator, compiled.mesh, log)
        if isinstance(executor, PipelineExecutor):
            executor.mail = _Mail(executor.mail, log)
        executor.step(feed, step=0, seed=0)
        return log.lines

    return VirtualCluster(compiled, weights, on_non_finite="warn").run(step)


def listed(program: Program) -> Log:
    """What a rank does according to its program."""
    log = _Log()
    open_: dict[str, list[int]] = {}
    for instruction in program:
        if isinstance(instruction, Collective):
            open_[instruction.value] = [log.begin(_collective(instruction.signature, instruction.group))]
        elif isinstance(instruction, Exchange):
            for t in sorted(instruction.transfers, key=lambda t: not t.sends):
                open_.setdefault(t.value, []).append(log.begin(_transfer(t.sends, t.size, t.peer)))
        elif isinstance(instruction, Wait):
            log.lines += [f"wait {number}" for number in open_.pop(instruction.value)]
    return log.lines


class _Log:
    def __init__(self) -> None:
        self.lines: Log = []
        self.begun = 0

    def begin(self, what: str) -> int:
        self.lines.append(f"{self.begun}: {what}")
        self.begun += 1
        return self.begun - 1


def _collective(signature: str, group: Sequence[int]) -> str:
    return f"{signature} over {','.join(map(str, group))}"


def _transfer(sends: bool, size: int, peer: int) -> str:
    return f"send {size} > {peer}" if sends else f"receive {size} < {peer}"


class _Communicator:
    """Does what another one does, and writes it down."""

    def __init__(self, of: RankCommunicator, devices: Mesh, log: _Log) -> None:
        self.mesh, self.rank = of.mesh, of.rank
        self.microbatch, self.doing = 0, ""
        self._of, self._devices, self._log = of, devices, log

    def coordinate(self, axis: str) -> int:
        self._of.microbatch = self.microbatch
        return self._of.coordinate(axis)

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], reduction: str) -> Tensor:
        return self.begin("all_reduce", x, axes, reduction).wait()

    def all_gather(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return self.begin("all_gather", x, axes).wait()

    def reduce_scatter(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return self.begin("reduce_scatter", x, axes).wait()

    def all_to_all(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        number = self._begin("all_to_all", x, axes)
        return _Done(self._of.all_to_all(x, axes), number, self._log).wait()

    def begin(self, kind: Kind, x: Tensor, axes: tuple[str, ...], reduction: str = "sum") -> Work:
        number = self._begin(f"all_reduce({reduction})" if kind == "all_reduce" else kind, x, axes)
        return _Done(at_once(self._of, kind, x, axes, reduction).wait(), number, self._log)

    def _begin(self, name: str, x: Tensor, axes: tuple[str, ...]) -> int | None:
        if not group_of(self._devices, axes):
            return None
        group = sorted(self._devices.group(self.rank, axes))
        return self._log.begin(_collective(f"{name} {short_name(x.dtype)} {x.numel()}", group))


class _Done:
    def __init__(self, result: Tensor, number: int | None, log: _Log) -> None:
        self.result, self.number, self.log = result, number, log

    def wait(self) -> Tensor:
        if self.number is not None:
            self.log.lines.append(f"wait {self.number}")
        return self.result


class _Mail:
    """Does what another one does, and writes it down."""

    def __init__(self, of: Mail, log: _Log) -> None:
        self.of, self.log = of, log

    def begin(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[Pending]:
        numbers = [
            self.log.begin(_transfer(way, sum(t.nbytes for t in parcel.tensors), parcel.rank))
            for way, parcels in ((True, sends), (False, receives))
            for parcel in parcels
        ]
        begun = self.of.begin(sends, receives)
        return [_Awaited(pending, number, self.log) for pending, number in zip(begun, numbers, strict=True)]


class _Awaited:
    def __init__(self, pending: Pending, number: int, log: _Log) -> None:
        self.pending, self.number, self.log = pending, number, log

    def wait(self) -> None:
        self.log.lines.append(f"wait {self.number}")
        self.pending.wait()
