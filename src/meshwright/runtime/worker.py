"""What one process of a real run does: meet the others, make its shards, train, and end cleanly.

Started by ``meshwright run``, torchrun, or any launcher that says which rank a process is
(:mod:`meshwright.runtime.environment`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.compiler.diagnostics import MeshwrightError, error
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.runtime.communicator import ProcessCommunicator, axes_used
from meshwright.runtime.data import Source
from meshwright.runtime.environment import Place, complete, place_of
from meshwright.runtime.executors import executor_for
from meshwright.runtime.failure import CollectiveFailed, Watch, described, report
from meshwright.runtime.finite import OnNonFinite
from meshwright.runtime.mail import ProcessMail
from meshwright.runtime.materialize import Weights, check_same_weights, materialize
from meshwright.runtime.metrics import Metrics, forget_peak, memory_in_use
from meshwright.runtime.signatures import VARIABLE, SignatureCheck
from meshwright.runtime.step_executor import StepExecutor
from meshwright.runtime.torch_distributed import PrefixStore, Store, TCPStore, connection_of_its_own, rendezvous
from meshwright.runtime.train import Scalars, TrainConfig, train


@dataclass(frozen=True)
class WorkerJob:
    """All that a worker needs; made by the caller's ``load`` on every rank."""

    rank_program: Compiled
    weights: Weights
    source: Source
    scalars: Scalars
    config: TrainConfig
    on_non_finite: OnNonFinite = "stop"
    check_weights: bool = True
    """Whether the ranks compare checksums of their first weights (not done when resuming)."""


@dataclass(frozen=True)
class Session:
    """A rank that has met the others: where it is, and how it communicates."""

    place: Place
    device: torch.device
    communicator: ProcessCommunicator
    watch: Watch


def run_worker(load: Callable[[], WorkerJob], *, timeout: timedelta = timedelta(minutes=10)) -> int:
    """Run a job on this rank and return the exit code. Errors are reported once for all ranks, without traceback.

    ``load`` is called before the ranks meet, so that a bad file is told at once. ``timeout`` is how long a rank waits
    in a collective for the others.
    """
    try:
        place = place_of()
        job = load()
        check_world_size(job.rank_program, place)
    except MeshwrightError as failure:
        # every rank finds the same, so it is told without meeting
        return _alone(failure)
    return run_session(job.rank_program, place, lambda s: _train(job, s), timeout=timeout)


def run_session(
    rank_program: Compiled,
    place: Place,
    body: Callable[[Session], object],
    *,
    timeout: timedelta = timedelta(minutes=10),
) -> int:
    """Meet the other ranks, run ``body``, and part; the exit code. If a rank fails, all end within seconds."""
    try:
        device = device_of(place)
        with _store(place, timeout) as store:
            watch = Watch(connection_of_its_own(store, "watch"), place.rank, place.ranks)
            try:
                backend = "nccl" if device.type == "cuda" else "gloo"
                met = PrefixStore("ranks", store)
                dist.init_process_group(
                    backend, store=met, rank=place.rank, world_size=place.ranks, timeout=timeout
                )  # fmt: skip
                body(Session(place, device, _communicator(rank_program, store, timeout, watch), watch))
            except BaseException as cause:  # whatever it is, the others must be told, or they wait forever
                if isinstance(cause, SystemExit) and not cause.code:
                    raise
                secondary = isinstance(cause, CollectiveFailed) or "gloo" in str(cause)
                if isinstance(cause, KeyboardInterrupt):
                    os._exit(130)
                if secondary:
                    broken = (
                        cause if isinstance(cause, CollectiveFailed) else CollectiveFailed(watch.last_call(), cause)
                    )
                    watch.exit(watch.cause_of(broken))
                watch.exit(watch.tell(described(place.rank, watch.last_call(), cause)))
            watch.close()
            # nobody leaves while another may still need the store that rank 0 hosts
            dist.barrier()
            dist.destroy_process_group()
    except MeshwrightError as failure:
        return _alone(failure)
    return 0


def check_world_size(rank_program: Compiled, place: Place) -> None:
    """Raises MeshwrightError E0601 if the number of processes is not that of the mesh."""
    needed = rank_program.mesh.ranks
    if place.ranks != needed:
        raise error(
            "E0601",
            f"the program was compiled for {needed} ranks ({rank_program.mesh}), {place.ranks} were started",
            action=f"start {needed} ranks, or compile for {place.ranks}",
        )


def device_of(place: Place) -> torch.device:
    """The GPU of this rank if the machine has one for every local rank, else the CPU."""
    if torch.cuda.is_available() and dist.is_nccl_available():
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def executor_of(job: WorkerJob, session: Session) -> StepExecutor:
    """The executor of this rank with its first weights, which are compared over the ranks if the job says so."""
    digests: dict[str, int] = {}
    mesh = job.rank_program.mesh
    coordinates = mesh.coordinates(session.place.rank)
    compare = job.check_weights and job.config.resume is None
    (holdings,) = materialize(
        job.rank_program, job.weights, [coordinates], device=session.device, digests=digests if compare else None
    )
    if compare:
        check_same_weights(digests, session.communicator, mesh.names, session.device)
    return executor_for(
        job.rank_program,
        session.communicator,
        ProcessMail(session.communicator),
        holdings,
        on_non_finite=job.on_non_finite,
        device=session.device,
    )


def _train(job: WorkerJob, session: Session) -> list[Metrics]:
    forget_peak(session.device)
    base, _ = memory_in_use(session.device)
    return train(executor_of(job, session), job.source, job.scalars, job.config, base=base)


@contextmanager
def _store(place: Place, timeout: timedelta) -> Iterator[Store]:
    """The store at which all ranks meet, as the launcher has set it up."""
    complete(place)
    store: Store
    if place.ranks == 1:
        store = TCPStore("127.0.0.1", 0, 1, True, timeout)
    else:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    yield store


def _communicator(rank_program: Compiled, store: Store, timeout: timedelta, watch: Watch) -> ProcessCommunicator:
    before = None
    if os.environ.get(VARIABLE) == "1":
        before = SignatureCheck(
            connection_of_its_own(store, "calls"), dist.get_rank(), min(timeout, timedelta(minutes=1))
        )
    microbatches = rank_program.plan.microbatches
    made = ProcessCommunicator(
        rank_program.mesh, microbatches, axes_used(rank_program), timeout=timeout, before=before
    )  # fmt: skip
    watch.last_call = lambda: made.last_call
    return made


def _alone(failure: MeshwrightError) -> int:
    """Report what every rank finds for itself; only rank 0 prints it."""
    try:
        rank = place_of().rank
    except MeshwrightError:
        rank = 0
    report(described(rank, "", failure), rank)
    sys.stdout.flush()
    return 1
