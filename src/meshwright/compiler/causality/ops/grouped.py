"""Products whose rows are grouped by expert: each row with the weights of its group."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call
from meshwright.compiler.causality.registry import rule
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.causality.words import any_over, softened


@rule("aten._grouped_mm", "transformers.grouped_mm_fallback", "aten._scaled_grouped_mm", "meshwright.grouped_mm")
def grouped(call: Call) -> Shadow:
    """Rows sorted by group stay in their listing, if the groups end where the sorted keys change."""
    names = list(call.arguments)
    rows, weights, ends = call[names[0]], call[names[1]], call.arguments.get("ends", call.arguments.get("offs"))
    if ends is None or rows.dim() != 2:
        return _all(call)
    shadow = call.shadow(rows)
    offsets = call.shadow(ends)
    item = _rows(shadow)
    if item is None or not _ends_with_keys(call, item, ends):
        shadow, item = call.settled(rows), None
    deps = None if shadow.deps is None else any_over(shadow.deps, (1,), keepdim=True)
    if item is not None:
        keys = call.interpreter.listings.key_deps
        assert keys is not None
        own = keys[item.long()].unsqueeze(1)
        deps = own if deps is None else deps | own
    elif offsets.deps is not None:
        union = softened(any_over(offsets.deps, (0,))).expand(rows.shape[0], 1, -1)
        deps = union if deps is None else deps | union
    weighted = call.settled(weights)
    if weighted.deps is not None:
        union = any_over(weighted.deps.reshape(-1, call.width), (0,)).expand(rows.shape[0], 1, -1)
        deps = union if deps is None else deps | union
    wide = None if deps is None else deps.expand(*call.out.shape, call.width)
    tags = None if item is None else item.unsqueeze(1).expand(call.out.shape)
    return Shadow(constant(call.out.shape, False).known, wide, tags)


def _rows(shadow: Shadow) -> Tensor | None:
    """The item of each row, if every row is of one."""
    if shadow.item is None:
        return None
    item = shadow.item[:, 0]
    return item if bool((shadow.item == item.unsqueeze(1)).all()) and bool((item != 0).all()) else None


def _ends_with_keys(call: Call, item: Tensor, ends: Tensor) -> bool:
    """Whether rows of one group are those of one key."""
    keys = call.interpreter.listings.keys[item.long()]
    group = torch.searchsorted(ends.long(), torch.arange(item.shape[0]), right=True)
    changes = keys[1:] != keys[:-1]
    return bool((changes == (group[1:] != group[:-1])).all())


def _all(call: Call) -> Shadow:
    union = torch.zeros(call.width, dtype=torch.int64)
    for value in call.tensors():
        deps = call.settled(value).deps
        if deps is not None:
            union = union | any_over(deps.reshape(-1, call.width), (0,))
    return Shadow(constant(call.out.shape, False).known, union.expand(*call.out.shape, -1))
