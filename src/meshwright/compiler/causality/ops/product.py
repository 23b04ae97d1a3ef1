"""Matrix products: a term with a known zero brings nothing of the other factor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call
from meshwright.compiler.causality.listings import steady
from meshwright.compiler.causality.registry import rule
from meshwright.compiler.causality.shadow import CHOICE, Shadow, nothing
from meshwright.compiler.causality.typed import joint_shape
from meshwright.compiler.causality.words import any_over, pack, union, unpack


@rule("aten.mm", "aten.bmm", "aten.matmul")
def product(call: Call) -> Shadow:
    return contracted(call, call["self"], call.arguments.get("mat2", call.get("other")))


@rule("aten.mv", "aten.dot", "aten.vdot")
def vector(call: Call) -> Shadow:
    a, b = call["self"], call.arguments.get("vec", call.arguments.get("tensor", call.get("other")))
    made = contracted(call, a if a.dim() == 2 else a.unsqueeze(0), b.unsqueeze(1))
    return made.map(lambda x: x.reshape(call.out.shape), lambda x: x.reshape(*call.out.shape, call.width))


@rule("aten.addmm", "aten.baddbmm", "aten._addmm_activation")
def with_addend(call: Call) -> Shadow:
    a = call.arguments.get("mat1", call.get("batch1"))
    b = call.arguments.get("mat2", call.get("batch2"))
    made = contracted(call, a, b)
    return _plus(call, made, call["self"]) if call.get("beta", 1) != 0 else made


@rule("aten.addmv")
def vector_with_addend(call: Call) -> Shadow:
    made = contracted(call, call["mat"], call["vec"].unsqueeze(1))
    made = made.map(lambda x: x.reshape(call.out.shape), lambda x: x.reshape(*call.out.shape, call.width))
    return _plus(call, made, call["self"])


@rule("aten.addbmm")
def summed_with_addend(call: Call) -> Shadow:
    made = contracted(call, call["batch1"], call["batch2"])
    made = Shadow(made.known.all(0), None if made.deps is None else any_over(made.deps, (0,)))
    return _plus(call, made, call["self"])


@rule("aten.linear")
def linear(call: Call) -> Shadow:
    value = call["input"]
    made = contracted(call, value, call["weight"].t()) if value.dim() > 1 else None
    if made is None:
        made = contracted(call, value.unsqueeze(0), call["weight"].t())
        made = made.map(lambda x: x.squeeze(0))
    return _plus(call, made, call["bias"]) if call.get("bias") is not None else made


def _plus(call: Call, made: Shadow, addend: Tensor) -> Shadow:
    shadow = call.shadow(addend).expand(made.known.shape)
    if shadow.item is not None:
        shadow = call.settled(addend).expand(made.known.shape)
    listings = call.interpreter.listings
    if made.item is not None and not steady(shadow, addend, listings.row_dims(made.item), made.known.shape):
        made = listings.settle(made)
    deps = made.deps if shadow.deps is None else union(call.words(made), shadow.deps)
    return Shadow(made.known & shadow.known, deps, made.item)


def contracted(call: Call, a: Tensor, b: Tensor) -> Shadow:
    """The shadow of ``a @ b``, ``[..., m, k] @ [..., k, n]`` with equal or absent batch dims."""
    left, right, item = _in_listing(call, a, b)
    zero_a, zero_b = _zeros(left, a), _zeros(right, b)
    batch = joint_shape(a.shape[:-2], b.shape[:-2])
    shape = (*batch, a.shape[-2], b.shape[-1])
    deps = None
    for deps_of, zero, swap in ((left, zero_b, False), (right, zero_a, True)):
        if deps_of.deps is None:
            continue
        chosen = (right if not swap else left).has(CHOICE)
        part = _weighted(deps_of.deps, zero, chosen, swap, call.width)
        part = part.expand(*shape, call.width)
        deps = part if deps is None else union(deps, part)
    return Shadow(_known(left, right, zero_a, zero_b, shape), deps, None if item is None else item.expand(shape))


def _zeros(shadow: Shadow, value: Tensor) -> Tensor:
    """Where an element is known to be zero."""
    return shadow.known if nothing(shadow.known) else shadow.known & (value == 0)


def _known(left: Shadow, right: Shadow, zero_a: Tensor, zero_b: Tensor, shape: tuple[int, ...]) -> Tensor:
    if nothing(left.known) and nothing(right.known):
        return torch.tensor(False).expand(shape)
    if (nothing(left.known) and nothing(zero_b)) or (nothing(right.known) and nothing(zero_a)):
        return torch.tensor(False).expand(shape)
    # terms that are neither a known zero nor of two known factors
    open_a, open_b = (~zero_a).float(), (~zero_b).float()
    loose_a, loose_b = (~left.known).float(), (~right.known).float()
    return ((loose_a @ open_b + open_a @ loose_b) < 0.5).expand(shape)


def _weighted(words: Tensor, zero: Tensor, chosen: Tensor, swap: bool, width: int) -> Tensor:
    """The union over k of sets ``[..., m, k, w]``, for each n over those k where ``zero[..., k, n]`` is False.

    With ``swap`` the sets are ``[..., k, n, w]`` and ``zero`` is ``[..., m, k]``. The result is ``[..., m, n, w]``.
    """
    if swap:
        turned = _weighted(words.transpose(-3, -2), zero.transpose(-1, -2), chosen.transpose(-1, -2), False, width)
        return turned.transpose(-3, -2)
    if nothing(zero) and nothing(chosen):
        return any_over(words, (words.dim() - 2,), keepdim=True)  # broadcasts over n
    half = width // 2
    parts = []
    for plane, weights in ((words[..., :half], ~zero), (words[..., half:], ~zero & ~chosen)):
        bits = unpack(plane)  # [..., m, k, bits]
        counts = bits.transpose(-1, -2) @ weights.float().unsqueeze(-3)  # [..., m, bits, n]
        parts.append(pack(counts.transpose(-1, -2)))
    return torch.cat(parts, -1)


def _in_listing(call: Call, a: Tensor, b: Tensor) -> tuple[Shadow, Shadow, Tensor | None]:
    """The factors in one listing, with the items of the result, or both in true positions."""
    left, right = call.shadow(a), call.shadow(b)
    if left.item is None and right.item is None:
        return left, right, None
    listings = call.interpreter.listings
    items: list[Any] = []
    for shadow, dim in ((left, -1), (right, -2)):
        if shadow.item is not None:
            same = bool((shadow.item.narrow(dim, 0, 1) == shadow.item).all())
            items.append(shadow.item.narrow(dim, 0, 1) if same else None)
    shape = joint_shape(items[0].shape, items[-1].shape) if None not in items else None
    if shape is not None and len({tuple(i.expand(shape).flatten().tolist()) for i in items}) == 1:
        whole = (*joint_shape(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        item = items[0].expand(whole)
        rows = listings.row_dims(item)
        if _other_steady(left, right, a, b, rows, len(whole)):
            return left, right, item
    return call.settled(a), call.settled(b), None


def _other_steady(left: Shadow, right: Shadow, a: Tensor, b: Tensor, rows: list[int], rank: int) -> bool:
    """Whether a factor outside the listing is the same for all rows of it."""
    for shadow, value, own in ((left, a, rank - 2), (right, b, rank - 1)):
        if shadow.item is not None:
            continue
        for row in rows:
            if row not in (own, *range(rank - 2)):
                continue  # the dim is the other factor's alone
            dim = row - (rank - value.dim())
            if dim >= 0 and not steady(shadow, value, [dim], value.shape):
                return False
    return True
