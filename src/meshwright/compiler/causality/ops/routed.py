"""Products of rows with the weights of the group that each row chose, in any order of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call
from meshwright.compiler.causality.registry import replacement, rule
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.causality.words import any_over, softened


@rule("meshwright.routed_mm")
def routed_mm(call: Call) -> Shadow:
    """A row depends on itself, on its own choice of a group, and on the weights of that group, or where the choice is
    computed on those of any group."""
    rows, group, weight = call["x"], call["group"], call["weight"]
    shape = rows.shape
    chosen = call.shadow(group).map(lambda x: x.unsqueeze(1), lambda x: x.unsqueeze(1)).expand(shape)
    wide = group.unsqueeze(1).expand(shape)
    (own, choice), item = call.interpreter.listings.joined([call.shadow(rows), chosen], [rows, wide], shape)
    if item is not None and not bool((item == item[:, :1]).all()):
        own, choice, item = call.settled(rows), call.settled(group), None
        choice = choice.map(lambda x: x.unsqueeze(1), lambda x: x.unsqueeze(1)).expand(shape)
    deps = None
    for shadow in (own, choice):
        if shadow.deps is not None:
            joined = any_over(shadow.deps, (1,), keepdim=True)
            deps = joined if deps is None else deps | joined
    known = bool(choice.known.all())
    weights = _weights(call, weight, group, known)
    if weights is not None:
        deps = weights if deps is None else deps | weights
    if known and deps is not None:  # a row of no group is zero
        inside = (group >= 0) & (group < weight.shape[0])
        deps = torch.where(inside[:, None, None], deps, 0)
    tags = None if item is None else item[:, :1].expand(call.out.shape)
    sets = None if deps is None else deps.expand(*call.out.shape, call.width)
    return Shadow(constant(call.out.shape, False).known, sets, tags)


def _weights(call: Call, weight: Tensor, group: Tensor, known: bool) -> Tensor | None:
    """``[rows, out, words]``: what the weights of each row depend on, if they do on anything."""
    settled = call.settled(weight)
    if settled.deps is None:
        return None
    columns = any_over(settled.deps, (1,))  # [groups, out, words]
    if not known:
        return softened(any_over(columns, (0,), keepdim=True)).expand(group.shape[0], -1, -1)
    return columns[group.clamp(0, weight.shape[0] - 1)]


@replacement("meshwright.routed_outer")
def routed_outer(call: Call) -> Any:
    """The sum of the products of the rows of each group: all rows, each times whether it is of the group."""
    return _outer(call, call["group"], call["groups"])


@replacement("meshwright.grouped_outer")
def grouped_outer(call: Call) -> Any:
    """Likewise; a row's group is how many groups end before it."""
    ends = call["ends"]
    with call.interpreter:
        group = (ends.unsqueeze(0) <= torch.arange(call["x"].shape[0]).unsqueeze(1)).sum(1)
    return _outer(call, group, ends.shape[0])


def _outer(call: Call, group: Tensor, groups: int) -> Any:
    out = call.func(*call.args, **call.kwargs)
    rows, grad = call["x"], call["grad"]
    with call.interpreter:
        own = group.unsqueeze(0) == torch.arange(groups).unsqueeze(1)
        masked = own.unsqueeze(2).to(rows.dtype) * rows.unsqueeze(0)
        made = torch.matmul(masked.transpose(1, 2), grad.unsqueeze(0).expand(groups, *grad.shape))
    return out, call.interpreter.memory.read(made)
