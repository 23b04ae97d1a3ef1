"""Reads a run op by op: intervals of positions by the op rules, masks as comparisons of positions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import bind, tensors_in
from meshwright.compiler.causality.interpreter import functional, is_view, written_by
from meshwright.compiler.causality.registry import find_replacement
from meshwright.compiler.causality.second.composing import compose
from meshwright.compiler.causality.second.knowledge import Knowledge
from meshwright.compiler.causality.second.moving import whole_dims
from meshwright.compiler.causality.second.seen import Along, Seen, blank
from meshwright.compiler.causality.second.values import Made
from meshwright.compiler.graph.adapter import OpOverload, TorchDispatchMode, decomposed, overload_name
from meshwright.compiler.graph.calls import describe
from meshwright.compiler.rules import rule_of
from meshwright.compiler.rules.rule import Rule

READ = "the model reads values that depend on tokens"
_READ = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim")
"""What makes numbers or shapes of values."""
_INDEXING = ("index", "index_put", "_unsafe_index", "_unsafe_index_put")
_MOVING = ("cat", "stack", "clone", "copy", "_to_copy", "_unsafe_view")
"""What leaves weights weights, beside views."""


class Reader(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it without types
    """A run that is read."""

    def __init__(self, knowledge: Knowledge) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without types
        self.knowledge = knowledge

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            self.knowledge.stop(f"no rule for {func}")
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        return self._call(func, args, kwargs)

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op that writes into all of a tensor, which no other is a view of."""
        target = args[0] if args and isinstance(args[0], Tensor) else None
        pure = functional(func)
        whole = target is not None and target.numel() * target.itemsize == target.untyped_storage().nbytes()
        if target is None or pure is None or not whole or len(tensors_in(list(bind(func, args, kwargs).values()))) < 1:
            self._unwritten(func, args, kwargs)
            return func(*args, **kwargs)
        bound = bind(func, args, kwargs)
        names = {a.name for a in pure._schema.arguments}
        made = self._call(pure, (), {k: v for k, v in bound.items() if k in names})
        seen = self.knowledge.seen(made) if isinstance(made, Tensor) else blank(target.shape)
        out = func(*args, **kwargs)
        self.knowledge.wrote(target, seen)
        return out

    def _unwritten(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = tensors_in([*args, *kwargs.values()])
        if any(self.knowledge.seen(t).depends for t in given):
            self.knowledge.stop(f"{overload_name(func)} writes into a part of a tensor")
        for one in written_by(func, args, kwargs):
            self.knowledge.wrote(one, blank(one.shape))

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = overload_name(func)
        bound = bind(func, args, kwargs)
        if name == "aten.cat.default" and any(t.shape == (0,) for t in bound["tensors"]):
            full = [t for t in bound["tensors"] if t.shape != (0,)]  # what cat passes over, whatever its dims are
            if full:
                return self._call(func, (full, bound["dim"]), {})
        given = tensors_in(list(bound.values()))
        seens = [self.knowledge.seen(t) for t in given]
        base = name.split(".")[1]
        chosen = [s for t, s in zip(given, seens, strict=True) if t.dtype in (torch.bool, torch.uint8)]
        if any(s.depends for s in (seens if base in _READ else chosen if base in _INDEXING else ())):
            self.knowledge.stop(READ)
        if base == "native_dropout" or ("batch_norm" in base and bound.get("training") is False):
            out = func(*args, **kwargs)
            self.knowledge.know(tensors_in(out)[0], replace(seens[0], band=None, line=None))
            return out
        probe = func(*args, **kwargs)
        rule = self._rule(func, args, kwargs, probe)
        tells = any(s.depends or s.band is not None or s.line is not None for s in seens)
        if rule is None and tells:
            parts = decomposed(func)
            if parts is not None and find_replacement(name) is None:
                with self:
                    made = parts(*args, **kwargs)
                if made is not NotImplemented:
                    return made
        outs = tensors_in(probe)
        if outs and not any(out.numel() for out in outs):
            for out in outs:
                self.knowledge.know(out, blank(out.shape))
            return probe
        if base in ("view_as_complex", "view_as_real"):
            self.knowledge.know(probe, _paired(seens[0], base.endswith("complex")))
            return probe
        if rule is None or len(rule.operands) != len(given):
            self._unknown(name, seens, outs)
            return probe
        if base == "attention":
            seens = [_bias(s) if t.dtype == torch.bool else s for t, s in zip(given, seens, strict=True)]
        results = [(number, one) for number, one in enumerate(compose(rule, seens, name)) if one is not None]
        if len(results) != len(outs):
            self._unknown(name, seens, outs)
            return probe
        for out, (number, one) in zip(outs, results, strict=True):
            if math.prod(n for dim in one.dims for n in dim) != out.numel():
                one = Seen(blank(out.shape).dims, one.time, one.row, False)
            told = whole_dims(rule, seens, number)
            made = Made(self.knowledge, func, base, bound, told, given, seens, out, one, number)
            self.knowledge.know(out, made.seen())
        if (is_view(func) or base in _MOVING) and self.knowledge.are_weights(given):
            for out in outs:
                self.knowledge.moved_weight(out)
        return probe

    def _rule(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Rule | None:
        try:
            return rule_of(describe(func, args, kwargs, out))
        except (ValueError, KeyError, IndexError, AttributeError, TypeError):
            return None  # a call that the rule was not written for

    def _unknown(self, name: str, seens: list[Seen], outs: list[Tensor]) -> None:
        if any(s.depends for s in seens):
            for out in outs:
                anywhere = Along(anywhere=True)
                self.knowledge.know(out, Seen(blank(out.shape).dims, anywhere, anywhere, exact=False))


def _bias(seen: Seen) -> Seen:
    """A mask of what is seen, as what is added to scores."""
    band = seen.band.valued(lambda value: None if value is None else 0.0 if value else -math.inf) if seen.band else None
    return replace(seen, band=band)


def _paired(seen: Seen, joins: bool) -> Seen:
    """The last dim, of two, into complex numbers, or the other way."""
    plain = replace(seen, band=None, line=None)
    last = seen.parts()[-1] if seen.dims else []
    if joins and any(part in along.spans for part in last for along in (seen.time, seen.row)):
        anywhere = Along(anywhere=True)
        return Seen(seen.dims[:-1], anywhere, anywhere, False)
    return replace(plain, dims=seen.dims[:-1] if joins else (*seen.dims, (2,)))
