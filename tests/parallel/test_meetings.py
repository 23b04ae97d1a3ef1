"""Microbatches that meet, on real ranks: a statistic of the whole batch over four processes and two microbatches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import meshwright
from tests.field.against_one_device import Case
from tests.field.test_batch_norm import classifier
from tests.parallel.ranks import run_ranks, values
from tests.unit.separability.models import Norms, case


def trained(plan: str, stack: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps on this rank: the losses, and the whole weights and buffers after them."""
    one = of_blocks() if stack else classifier()
    optimizer = torch.optim.SGD(one.model.parameters(), lr=0.1)
    batch = dict(one.batches[0])
    step = meshwright.parallelize(one.model, optimizer=optimizer, batch=batch, plan=plan, separability="global")
    losses = [float(step(dict(b))) for b in one.batches]
    return losses, step.full_state_dict()


def of_blocks() -> Case:
    """Blocks with a batch norm each."""
    torch.manual_seed(3)
    return case(Norms())


def alone(one: Case) -> tuple[list[float], dict[str, Tensor]]:
    """The same on one device, without meshwright."""
    model = copy.deepcopy(one.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in one.batches:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def compare(plan: str, stack: bool) -> None:
    losses, state = alone(of_blocks() if stack else classifier())
    for found, whole in values(run_ranks(4, trained, plan, stack)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=0, atol=1e-9)
        for name, value in state.items():
            torch.testing.assert_close(whole[name], value, rtol=0, atol=1e-9)


def test_batch_norm_on_four_processes() -> None:
    compare("fsdp=4,micro=2", False)


@pytest.mark.slow
def test_batch_norm_in_a_pipeline_on_four_processes() -> None:
    compare("pp=2,ddp=2,micro=2,schedule=gpipe", True)
