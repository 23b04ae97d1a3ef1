"""Microbatches that meet, on real ranks: a statistic of the whole batch over four processes and two microbatches."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

import meshwright
from tests.field.test_batch_norm import classifier
from tests.parallel.ranks import run_ranks, values


def trained(plan: str) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps on this rank: the losses, and the whole weights and buffers after them."""
    one = classifier()
    optimizer = torch.optim.SGD(one.model.parameters(), lr=0.1)
    batch = dict(one.batches[0])
    step = meshwright.parallelize(one.model, optimizer=optimizer, batch=batch, plan=plan, separability="global")
    losses = [float(step(dict(b))) for b in one.batches]
    return losses, step.full_state_dict()


def test_batch_norm_on_four_processes() -> None:
    one = classifier()
    model = copy.deepcopy(one.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in one.batches:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    for found, whole in values(run_ranks(4, trained, "fsdp=4,micro=2")):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=0, atol=1e-9)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(whole[name], value, rtol=0, atol=1e-9)
