"""Ops that join elements along dims into one, or let all of a dim act on all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call, tensors_in
from meshwright.compiler.causality.masks import assume_low, lowness
from meshwright.compiler.causality.ops.pointwise import elementwise
from meshwright.compiler.causality.registry import rule
from meshwright.compiler.causality.shadow import CHOICE, LOW, MAYBE_GONE, MAYBE_LOW, VERY_LOW, Shadow, constant, nothing
from meshwright.compiler.causality.words import any_over, running, softened


def dims_of(given: Any, rank: int) -> list[int]:
    """The dims that an argument ``dim`` says; all for None or none."""
    if given is None or given == [] or given == ():
        return list(range(rank))
    each = [given] if isinstance(given, int) else list(given)
    return sorted({d % rank for d in each}) if rank else []


def joined_over(call: Call, value: Tensor, dims: list[int]) -> Shadow:
    """The union over dims, which stay with size 1. Items survive where a row is reduced within itself."""
    shadow = call.shadow(value)
    if shadow.item is not None and any(
        bool((shadow.item.narrow(d, 0, 1) != shadow.item).any()) for d in dims if shadow.item.shape[d] > 0
    ):
        shadow = call.settled(value)
    known, item = shadow.known, shadow.item
    for dim in dims:
        known = known.all(dim, keepdim=True)
        item = None if item is None else item.narrow(dim, 0, 1)
    deps = None if shadow.deps is None else any_over(shadow.deps, dims, keepdim=True)
    return Shadow(known, deps, item)


def squeezed(shadow: Shadow, dims: list[int], out: Tensor, width: int) -> Shadow:
    """Without the dims of size 1, to the result's shape."""
    del dims
    return shadow.map(lambda x: x.reshape(out.shape), lambda x: x.reshape(*out.shape, width))


@rule(
    *(
        "aten." + name
        for name in ("sum", "mean", "prod", "argmax", "argmin", "std", "var", "norm", "linalg_vector_norm")
    ),
    *("aten." + name for name in ("count_nonzero", "aminmax", "min", "median", "nanmedian", "mode", "nansum")),
    *("aten." + name for name in ("std_mean", "var_mean", "kthvalue", "dist")),
)
def reduction(call: Call) -> Any:
    """The union over the reduced dims."""
    value = call["self"] if "self" in call.arguments else call.tensors()[0]
    if call.name == "aten.min.other":
        return elementwise(call, call.tensors(), call.out)
    dims = dims_of(call.get("dim"), value.dim())
    made = joined_over(call, value, dims)
    if call.name.startswith("aten.sum") or call.name.startswith("aten.mean"):
        shadow = call.shadow(value)
        if shadow.trait is not None:
            picks = shadow.has(CHOICE) | (shadow.known & (value == 0))
            for dim in dims:
                picks = picks.all(dim, keepdim=True)
            made = replace(made, trait=torch.where(picks & ~made.known, CHOICE, 0).to(torch.uint8))
    outs = tensors_in(call.out)
    results = tuple(squeezed(made, dims, out, call.width) for out in outs)
    return results[0] if isinstance(call.out, Tensor) else results


@rule("aten.any", "aten.all")
def decided(call: Call) -> Shadow:
    """One known True decides ``any``, one known False decides ``all``."""
    value = call["self"]
    dims = dims_of(call.get("dim"), value.dim())
    made = joined_over(call, value, dims)
    shadow = call.shadow(value)
    truth = (value != 0) if call.name.startswith("aten.any") else (value == 0)
    decides = shadow.known & truth
    for dim in dims:
        decides = decides.any(dim, keepdim=True)
    if bool(decides.any()):
        deps = None if made.deps is None else torch.where(decides.unsqueeze(-1), 0, made.deps)
        made = Shadow(made.known | decides, deps, made.item)
    return squeezed(made, dims, call.out, call.width)


@rule("aten.amax", "aten.max", "aten.logsumexp", "aten.amin")
def largest(call: Call) -> Any:
    """Masking numbers bring nothing where there is another."""
    if call.name == "aten.max.other":
        return elementwise(call, call.tensors(), call.out)
    value = call["self"]
    dims = dims_of(call.get("dim"), value.dim())
    if call.name.startswith("aten.amin"):
        made = joined_over(call, value, dims)
    else:
        drops, _ = dropped(call, value, dims)
        made = joined_over(call, value, dims)
        shadow = call.shadow(value)
        if shadow.deps is not None and shadow.item is None and bool(drops.any()):
            made = replace(made, deps=any_over(torch.where(drops.unsqueeze(-1), 0, shadow.deps), dims, keepdim=True))
    results = tuple(squeezed(made, dims, out, call.width) for out in tensors_in(call.out))
    return results[0] if isinstance(call.out, Tensor) else results


def dropped(call: Call, value: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Which elements a softmax over dims makes zero for every input, and of which rows nothing else is left."""
    shadow = call.shadow(value)
    if shadow.trait is None and nothing(shadow.known):
        none = constant(value.shape, False).known
        return none, none
    infinite = shadow.known & torch.isneginf(value) if value.is_floating_point() else torch.zeros_like(shadow.known)
    known_low = torch.where(shadow.known, lowness(value), 0) if value.is_floating_point() else shadow.known * 0
    own = known_low if shadow.trait is None else known_low | (shadow.trait & (LOW | VERY_LOW | MAYBE_LOW))
    surely = ((own & (LOW | VERY_LOW)) != 0) & ((own & MAYBE_LOW) == 0)
    surely = surely | ((own & VERY_LOW) != 0)
    ordinary = ~infinite & (own == 0)
    for dim in dims:
        ordinary = ordinary.any(dim, keepdim=True)
    low = surely & ordinary & ~infinite
    if bool((low & ((own & LOW) != 0)).any()):
        assume_low(call)
    empty = infinite
    for dim in dims:
        empty = empty.all(dim, keepdim=True)
    return infinite | low, empty


@rule("aten._softmax", "aten._log_softmax", "aten._safe_softmax", "aten.special_log_softmax")
def softmax(call: Call) -> Shadow:
    """Masked elements are zero and bring nothing; a row of nothing but finite masks is one of equal weights."""
    value = call["self"]
    dims = dims_of(call["dim"], value.dim())
    drops, empty = dropped(call, value, dims)
    shadow = call.shadow(value)
    chosen = shadow.has(MAYBE_LOW | MAYBE_GONE)
    zero = 0 if "log" in call.name else CHOICE  # what is masked is zero, or minus infinity
    if shadow.deps is not None and shadow.item is None and not nothing(chosen):
        words = torch.where(chosen.unsqueeze(-1), softened(shadow.deps), shadow.deps)
        shadow = replace(shadow, deps=words)
        if not bool(drops.any()):
            joined = any_over(words, dims, keepdim=True)
            trait = torch.where(chosen, zero, 0).to(torch.uint8)
            return Shadow(shadow.known & False, joined.expand(*call.out.shape, call.width), None, None, trait)
    if shadow.item is not None or not bool(drops.any()):
        made = joined_over(call, value, dims)
        return made.expand(call.out.shape)
    deps = None
    if shadow.deps is not None:
        kept = torch.where(drops.unsqueeze(-1), 0, shadow.deps)
        deps = any_over(kept, dims, keepdim=True).expand(*call.out.shape, call.width)
        deps = torch.where(drops.unsqueeze(-1), 0, deps)
    known = shadow.known.clone()
    for dim in dims:
        known = known.all(dim, keepdim=True)
    trait = torch.where(chosen & ~drops, zero, 0).to(torch.uint8)
    return Shadow(known.expand(call.out.shape) | drops | empty, deps, None, None, trait)


@rule("aten.cumsum", "aten.cumprod", "aten.cummax", "aten.cummin", "aten.logcumsumexp", "aten._cummax_helper")
def scan(call: Call) -> Any:
    """Each element joins those before it."""
    value = call["self"]
    shadow = call.settled(value)
    dim = call["dim"]
    if value.dim() == 0:
        return shadow.plain()
    known = shadow.known.to(torch.int8).cummin(dim).values.bool()
    deps = None if shadow.deps is None else running(shadow.deps, dim % value.dim())
    made = Shadow(known, deps)
    return made if isinstance(call.out, Tensor) else tuple(made for _ in call.out)


@rule(
    *("aten." + name for name in ("_fft_r2c", "_fft_c2c", "_fft_c2r")),
)
def fourier(call: Call) -> Shadow:
    """Every element of the transformed dims depends on all of them."""
    dims = dims_of(call["dim"], call["self"].dim())
    made = joined_over(call, call["self"], dims)
    return Shadow(made.known, made.deps).expand(call.out.shape)
