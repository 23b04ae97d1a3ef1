"""Two directions on real ranks: stages that two ranks hold get the same weights as on the virtual cluster."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.runtime import checkpoint
from meshwright.runtime.checkpoint_planner import Shards
from meshwright.runtime.environment import place_of
from meshwright.runtime.executors import executor_for
from meshwright.runtime.feed import whole_batch
from meshwright.runtime.gather import full_state_dict
from meshwright.runtime.mail import ProcessMail
from meshwright.runtime.materialize import from_module, materialize
from meshwright.runtime.virtual import VirtualCluster
from meshwright.runtime.worker import Session, run_session
from tests.models import Variant
from tests.parallel.ranks import run_ranks, values
from tests.parity.harness import SEED, Task, canonical, captured, examples, far, truth

TASK = Task("GPT-2", Variant(layers=2, dropout=0.1))
TOLERANCE = 1e-9


def compiled() -> Compiled:
    """GPT-2, whose first and last stage share a weight, on two ranks."""
    program = captured(TASK)
    return compile_plan(program, preset("pp=2,schedule=dualpipe,micro=4", program))


def trained(folder: str) -> tuple[list[tuple[float, float | None]], dict[str, Tensor], set[str]]:
    """Loss and norm of every step, the whole weights, and of which state this rank has a part; it is saved too."""
    program = compiled()
    kept: list[Any] = []

    def body(session: Session) -> None:
        at = program.mesh.coordinates(session.place.rank)
        weights = from_module(copy.deepcopy(examples(TASK)[0].model).double())
        (holdings,) = materialize(program, weights, [at])
        executor = executor_for(program, session.communicator, ProcessMail(session.communicator), holdings)
        told = []
        for step, example in enumerate(examples(TASK)):
            found = executor.step(whole_batch(example.batch, program.program), step=step, seed=SEED)
            told.append((found.loss, found.norm))
        checkpoint.save(Shards(program, [(at, holdings)]), Path(folder), step=len(told), seed=SEED)
        kept.append((told, full_state_dict(executor), set(holdings.state)))

    assert run_session(program, place_of(), body) == 0
    result: tuple[list[tuple[float, float | None]], dict[str, Tensor], set[str]] = kept[0]
    return result


def test_two_ranks_agree_with_one_device_and_write_everything_once(tmp_path: Path) -> None:
    expected = truth(TASK)
    found = values(run_ranks(2, trained, str(tmp_path), timeout=120))
    for told, weights, _ in found:
        for (loss, norm), step in zip(told, expected, strict=True):
            assert abs(loss - step.loss) <= TOLERANCE * step.loss
            assert norm is not None and abs(norm - step.norm) <= TOLERANCE * step.norm
        names = {p.name for p in compiled().program.parameters}
        mine = {name: tensor for name, tensor in weights.items() if name in names}
        assert far(mine, canonical(captured(TASK), expected[-1].weights)) < TOLERANCE
    (_, _, first), (_, _, second) = found
    assert not first & second and first | second == set(captured(TASK).state), "each state is held once"
    # what was written by the two ranks is whole
    program = compiled()
    cluster = VirtualCluster(program, from_module(copy.deepcopy(examples(TASK)[0].model).double()))
    everyone = [program.mesh.coordinates(rank) for rank in range(program.mesh.ranks)]
    record = checkpoint.load(Shards(program, list(zip(everyone, cluster.holdings, strict=True))), tmp_path)
    assert record.step == len(expected)
    assert far(cluster.full_parameters(), canonical(captured(TASK), expected[-1].weights)) < TOLERANCE
