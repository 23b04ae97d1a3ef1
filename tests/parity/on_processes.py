"""A cell of the parity table on real processes: compiled, written, read again by each rank, and run over gloo."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from meshwright.compiler.emit.artefact import read_artefact, write_artefact
from meshwright.compiler.emit.manifest import SourceDescription
from meshwright.compiler.train_settings import TrainSettings
from meshwright.runtime import checkpoint
from meshwright.runtime.checkpoint_planner import Shards
from meshwright.runtime.environment import place_of
from meshwright.runtime.executors import executor_for
from meshwright.runtime.feed import whole_batch
from meshwright.runtime.holdings import Holdings
from meshwright.runtime.mail import ProcessMail
from meshwright.runtime.materialize import from_module, materialize
from meshwright.runtime.virtual import VirtualCluster
from meshwright.runtime.worker import Session, run_session
from tests.parallel.ranks import run_ranks, values
from tests.parity.harness import SEED, STEPS, Cell, Difference, compare, compiled, examples, truth

Told = tuple[float, float | None, dict[str, Tensor], Holdings]
"""Of a step on one rank: loss, norm, and its parts of the gradients and of the new weights."""


def steps_of_artefact(
    folder: str, saved: Mapping[str, Tensor], batches: Mapping[int, dict[str, Tensor]], load: str = "", save: str = ""
) -> list[Told]:
    """Train what an artefact holds on this rank, a step for each batch, by the step's number. With ``load`` it begins
    with the checkpoint that is there, with ``save`` it leaves one."""
    rank_program = read_artefact(folder).rank_program
    told: list[Told] = []

    def body(session: Session) -> None:
        at = rank_program.mesh.coordinates(session.place.rank)
        (holdings,) = materialize(rank_program, lambda name, spec: saved[name], [at])
        shards = Shards(rank_program, [(at, holdings)])
        if load:
            assert checkpoint.load(shards, load).step == min(batches)
        mail = ProcessMail(session.communicator)
        executor = executor_for(rank_program, session.communicator, mail, holdings, keep_gradients=True)
        for step, batch in batches.items():
            result = executor.step(whole_batch(batch, rank_program.program), step=step, seed=SEED)
            told.append((result.loss, result.norm, executor.gradients, copy.deepcopy(holdings)))
        if save:
            checkpoint.save(shards, save, step=max(batches) + 1, seed=SEED)

    assert run_session(rank_program, place_of(), body) == 0
    return told


def measure_on_processes(
    cell: Cell,
    folder: Path,
    steps: Sequence[int] = range(STEPS),
    *,
    load: str = "",
    save: str = "",
    timeout: float = 180,
) -> Difference:
    """Run some steps of the cell on as many processes as it has ranks and say how far they are from one device."""
    rank_program = compiled(cell)
    write_artefact(rank_program, folder, SourceDescription("module", "tests.models"), TrainSettings())
    model = copy.deepcopy(examples(cell.task)[0].model).double()
    saved = {n: x.detach() for n, x in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    batches = {step: examples(cell.task)[step].batch for step in steps}
    outcomes = run_ranks(cell.ranks, steps_of_artefact, str(folder), saved, batches, load, save, timeout=timeout)
    found: list[list[Told]] = values(outcomes)
    cluster = VirtualCluster(rank_program, from_module(model))  # puts together what the ranks have
    differences = []
    for number, told in zip(steps, zip(*found, strict=True), strict=True):
        assert len({(loss, norm) for loss, norm, _, _ in told}) == 1, "ranks disagree on loss or norm"
        for executor, (_, _, gradients, holdings) in zip(cluster.executors, told, strict=True):
            executor.gradients, executor.holdings = gradients, holdings
        loss, norm, _, _ = told[0]
        differences.append(compare(cluster, loss, norm, truth(cell.task)[number]))
    return Difference.worst_of(differences)
