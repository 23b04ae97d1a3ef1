"""Runs plans on real gloo ranks: measures the memory of each, calibrates the machine, and measures time meanwhile.

The ranks are forked from a process that has captured and compiled everything. Each holds all plans for its number of
ranks at once, and runs one step of each in turn, round after round between the passes of the calibration, so that
whatever else the machine does meets all alike, what is predicted from and what is measured.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.predicted.cases import Case, model
from meshwright.calibration import measure as calibrate
from meshwright.compiler.analysis.offloading import on_host
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.writer import cluster_to_toml
from meshwright.compiler.graph.pending import Kind, Work
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.runtime.communicator import ProcessCommunicator, UnderWay, axes_used
from meshwright.runtime.environment import Place
from meshwright.runtime.executor import Executor
from meshwright.runtime.feed import whole_batch
from meshwright.runtime.holdings import Holdings
from meshwright.runtime.launch import LOOPBACK, defaults, free_port
from meshwright.runtime.materialize import materialize
from meshwright.runtime.measure_memory import allocated
from meshwright.runtime.moved import SETTLED, moved

CPU = torch.device("cpu")
TRIES = 2
"""How often memory is measured."""


@dataclass(frozen=True)
class Measured:
    """A plan on one rank."""

    seconds: float
    """The least over rounds, as the calibration takes the least over passes; of each round, the slowest rank's."""
    peak: int
    """The most bytes that torch's allocator had given out in a step; memory in mapped files is not allocated."""


@dataclass(frozen=True)
class Machine:
    """What ranks of one number found: the machine as a cluster file, and each plan in order."""

    cluster: str
    plans: tuple[Measured, ...]


def measure(ranks: int, cases: Sequence[tuple[Case, RankProgram]], rounds: int, known: Cluster | None) -> Machine:
    """Start the ranks; calibrate unless the cluster is ``known``; run the plans. Time is of all ranks together, memory
    that of the largest rank."""
    context = multiprocessing.get_context("fork")
    variables = {**defaults(ranks), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    variables |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    pipes: list[Connection] = []
    processes = []
    gc.collect()
    gc.freeze()  # what the ranks share is not searched by each of them
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(Place(rank, ranks, rank), variables, cases, rounds, known, theirs), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    found: list[Machine] = [pipe.recv() for pipe in pipes]  # EOFError if a rank failed, which has told why
    for process in processes:
        process.join()
    gc.unfreeze()
    plans = [m.plans for m in found]
    return Machine(
        found[0].cluster,
        tuple(Measured(one[0].seconds, max(m.peak for m in one)) for one in zip(*plans, strict=True)),
    )


def _rank(
    place: Place,
    variables: dict[str, str],
    cases: Sequence[tuple[Case, RankProgram]],
    rounds: int,
    known: Cluster | None,
    pipe: Connection,
) -> None:
    os.environ.update(variables | {"RANK": str(place.rank), "LOCAL_RANK": str(place.local_rank)})
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo", rank=place.rank, world_size=place.ranks, timeout=timedelta(minutes=5))
    steps: list[Callable[[], object]] = []
    peaks = []
    for case, rank_program in cases:
        step, peak = prepare(case, rank_program)
        steps.append(step)
        peaks.append(peak)
    seconds: list[list[float]] = [[] for _ in steps]

    def run(rounds: int) -> None:
        for _ in range(rounds):
            for step, times in zip(steps, seconds, strict=True):
                dist.barrier()
                begun = time.perf_counter()
                step()
                times.append(time.perf_counter() - begun)

    run(1)
    text = cluster_to_toml(*calibrate(place, CPU, lambda: run(rounds))) if known is None else ""
    run(rounds)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    least = [min(times) for times in slowest.tolist()]
    pipe.send(Machine(text, tuple(Measured(s, p) for s, p in zip(least, peaks, strict=True))))
    dist.barrier()
    dist.destroy_process_group()


def prepare(case: Case, rank_program: RankProgram) -> tuple[Callable[[], object], int]:
    """The step of a plan on this rank, and its peak memory after the first step."""
    given = model(case.model)
    feed = whole_batch(given.batch, given.program)
    how = rank_program.mesh, rank_program.plan.microbatches, axes_used(rank_program)
    settling, coordinates = _Settling(*how), rank_program.mesh.coordinates(dist.get_rank())
    made: list[Executor] = []

    def begin() -> None:
        (holdings,) = materialize(rank_program, given.weights, [coordinates])
        made.append(Executor(rank_program, settling, holdings))
        made[0].step(feed, step=0)

    # the profiler may miss frees, so of several measurements the least counts
    held = []
    for _ in range(TRIES):
        made.clear()
        held.append(allocated(begin)[0])
    executor = made.pop()
    _, most = min((allocated(lambda: executor.step(feed, step=1)) for _ in range(TRIES)), key=lambda one: abs(one[0]))
    executor.communicator = ProcessCommunicator(*how)
    return lambda: executor.step(feed, step=2), min(held) - mapped(rank_program, executor.holdings) + most


class _Settling(ProcessCommunicator):
    """Holds every message until gloo's own thread has let go of it, so that its memory is freed by this thread: torch's
    profiler sees only what the thread does that it profiles. What a message takes only while its bytes move is gone
    before anything is computed: how busy the machine is makes no difference."""

    def _start(self, kind: Kind, x: Tensor, axes: tuple[str, ...], reduction: str = "sum", *, beside: bool) -> Any:
        begun = super()._start(kind, x, axes, reduction, beside=True)
        if beside and isinstance(begun, UnderWay) and begun.work is not None:
            moved(begun.work)
        return _Settled(begun)

    def all_to_all(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        result = super().all_to_all(x, axes)
        time.sleep(SETTLED)
        return result


@dataclass
class _Settled:
    work: Work

    def wait(self) -> Tensor:
        result = self.work.wait()
        time.sleep(SETTLED)
        return result


def mapped(rank_program: RankProgram, holdings: Holdings) -> int:
    """The bytes of the file in which offloaded state lies: torch tells the profiler of it, but allocates nothing."""
    storages = [holdings.state[name].untyped_storage() for name in on_host(rank_program.update)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
