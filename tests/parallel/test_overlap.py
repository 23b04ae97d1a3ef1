"""Messages that run beside the computation, over real processes: the same results, and no rank waits in vain."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.compiler.graph import collectives
from meshwright.compiler.mesh import Mesh
from meshwright.runtime.communicator import ProcessCommunicator
from meshwright.runtime.environment import place_of
from meshwright.runtime.virtual import VirtualCluster
from meshwright.runtime.worker import Session, run_session
from tests.parallel.ranks import run_ranks, values
from tests.parallel.test_failures import FOUR, errors_of
from tests.parallel.test_gloo import AXES
from tests.parallel.test_parallelize import RANKS, check, train
from tests.unit.api.small_model import eager_steps, language
from tests.unit.runtime import toy


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("fsdp=4,prefetch", marks=pytest.mark.slow),
        pytest.param("ddp=2,fsdp=2,prefetch", marks=pytest.mark.slow),
        "fsdp=2,tp=2,sp,prefetch=2",
        "zero1,prefetch",
    ],
)
def test_training_equals_one_device(plan: str, tmp_path: Path) -> None:
    truth = language(seed=0)
    losses = eager_steps(truth, 3, clip=0.5)
    # the order of all begins is compared over the ranks as well
    found = values(run_ranks(RANKS, train, plan, "", variables={"MESHWRIGHT_CHECK": "1"}, timeout=120))
    check(found, losses, truth.state_dict())


def many(here: collectives.Communicator) -> list[Tensor]:
    """Several messages of every kind under way at once over groups that cross, waited for in another order."""
    own = 10.0 * here.coordinate("data") + here.coordinate("tensor")
    found: list[Tensor] = []
    with collectives.use(here):
        for axes in AXES:
            count = here.mesh.size(*axes)
            # padded: 5 rows do not divide
            rows = [torch.arange(6.0).view(3, 2) + own, torch.arange(4.0).view(2, 2) - own]
            sums = [torch.arange(10.0).view(5, 2) * (own + 1), torch.arange(6.0).view(2, 3) + own]
            large = torch.full((collectives.LARGE // 4,), own)
            sizes = [3 * count, 2 * count - 1] if len(axes) == 1 else [3 * count, 2 * count]
            gathered = collectives.all_gather_begin(rows, [0, 1], axes, sizes)
            scattered = [collectives.reduce_scatter_begin(sums[:1] if len(axes) == 1 else [sums[0][:4]], [0], axes)]
            reduced = collectives.all_reduce_begin(sums, axes, "max")
            owned = collectives.all_reduce_begin([large, sums[1].clone()], axes, "sum", True)
            for pending in (owned, *scattered, reduced, gathered):
                found += collectives.wait(pending)
            found += collectives.all_gather_many(rows, [0, 1], axes, sizes)
    return [x.clone() for x in found]


def many_messages() -> list[Tensor]:
    kept: list[Tensor] = []

    def body(session: Session) -> None:
        kept.extend(many(ProcessCommunicator(Mesh(FOUR), 1, AXES)))

    assert run_session(toy.program(Mesh(FOUR)), place_of(), body) == 0
    return kept


def test_messages_under_way_at_once_equal_those_of_the_virtual_cluster() -> None:
    found = values(run_ranks(4, many_messages))
    cluster = VirtualCluster(toy.program(Mesh(FOUR)), toy.weights)
    expected = cluster.run(lambda executor: many(executor.communicator))
    for real, virtual in zip(found, expected, strict=True):
        assert len(real) == len(AXES) * 9
        for a, b in zip(real, virtual, strict=True):
            assert torch.equal(a, b)


def pending(how: str, rank: int) -> None:
    """A session in which one rank is lost while messages are under way: it never begins those that others wait for."""

    def body(session: Session) -> None:
        here: Any = session.communicator
        here.all_reduce(torch.ones(2), ("data", "tensor"), "sum")
        begun = [here.begin("all_gather", torch.ones(1 << 20), ("data",))]
        if here.rank == rank:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("something odd")
        begun.append(here.begin("reduce_scatter", torch.ones(1 << 20), ("data", "tensor")))
        begun.append(here.begin("all_reduce", torch.ones(1 << 20), ("tensor",)))
        if here.rank == (rank + 1) % 4:
            time.sleep(30)  # this one computes on and does not wait for anything
        for work in begun:
            work.wait()

    sys.exit(run_session(toy.program(Mesh(FOUR), "fsdp"), place_of(), body, timeout=timedelta(seconds=60)))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("kill", "error[E0602]: rank {rank} has died without a word"),
        ("raise", "error[E0602]: rank {rank} failed: ArithmeticError: something odd"),
    ],
    ids=["kill", "raise"],
)
def test_a_rank_that_is_lost_while_messages_are_under_way_ends_all(how: str, text: str, rank: int) -> None:
    outcomes = run_ranks(4, pending, how, rank, timeout=40)
    assert errors_of(outcomes) == [text.format(rank=rank)], [o.output for o in outcomes]
    assert all(o.exit_code == (-signal.SIGKILL if how == "kill" and r == rank else 1) for r, o in enumerate(outcomes))
    assert max(o.seconds for o in outcomes) < 15
    assert not any("Traceback" in o.output for o in outcomes), [o.output for o in outcomes]
