"""Reads a run op by op: intervals of positions by the op rules, masks as comparisons of positions."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.compiler.causality.call import bind, tensors_in
from meshwright.compiler.causality.interpreter import functional, is_view, written_by
from meshwright.compiler.causality.registry import find_replacement
from meshwright.compiler.causality.second.composing import LOW, Carrier, compose
from meshwright.compiler.causality.second.masks import (
    Line,
    compared,
    evaluate,
    line_of,
    masked,
    operand_values,
    triangle,
)
from meshwright.compiler.causality.second.seen import Along, Band, Seen, blank
from meshwright.compiler.graph.adapter import OpOverload, TorchDispatchMode, decomposed, overload_name
from meshwright.compiler.graph.calls import describe
from meshwright.compiler.rules import rule_of
from meshwright.compiler.rules.rule import Rule

_FILLED = (
    *("ones", "zeros", "full", "scalar_tensor", "new_ones", "new_zeros", "new_full"),
    *("ones_like", "zeros_like", "full_like", "fill", "zero", "lift_fresh_copy"),
)


READ = "the model reads values that depend on tokens"
_READ = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim")
"""What makes numbers or shapes of values."""
_INDEXING = ("index", "index_put", "_unsafe_index", "_unsafe_index_put")
_CHOOSING = (
    *("eq", "ne", "lt", "le", "gt", "ge", "isin", "where", "sign"),
    *("floor", "round", "sub", "rsub", "topk", "sort"),
)
"""By way of these, less may be depended on than they are given: what they choose among, what cancels out."""


_SOFTMAX = ("_softmax", "_safe_softmax")
_LOWEST = -1e3
"""From where on numbers are taken to be meant to mask."""


class Reader(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it without types
    """A run that is read. ``weights``: addresses of storages that hold weights, which mask nothing."""

    def __init__(self, weights: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without types
        self.weights = weights
        self.stopped = ""
        """Why nothing can be said, if so."""
        self.finite = False
        """Whether a mask of finite numbers was relied on, which masks nothing in a row that is masked entirely."""
        self.others = False
        """Whether there are such masks that nothing is known of."""
        self._known: Any = WeakTensorKeyDictionary()
        self._written: dict[int, int] = {}
        self._telling: set[int] = set()
        """Storages that hold something of tokens."""

    def seen(self, value: Tensor) -> Seen:
        """What is known of a tensor."""
        found = self._known.get(value)
        if found is None:
            if _address(value) in self._telling:
                self.stopped = self.stopped or "memory is read by way of a tensor that no op has made"
            return blank(value.shape)
        made, epoch = found
        if epoch != self._written.get(_address(value), 0):
            self.stopped = self.stopped or "a tensor was written by way of another view of it"
        result: Seen = made
        return result

    def know(self, value: Tensor, seen: Seen) -> None:
        """Set what is known of a tensor."""
        address = _address(value)
        self._known[value] = (seen, self._written.get(address, 0))
        if seen.depends and address not in self._telling:
            self._telling.add(address)
            weakref.finalize(value.untyped_storage(), self._telling.discard, address)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            self.stopped = self.stopped or f"no rule for {func}"
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
        seen = self.seen(made) if isinstance(made, Tensor) else blank(target.shape)
        out = func(*args, **kwargs)
        self._written[_address(target)] = self._written.get(_address(target), 0) + 1
        self.know(target, seen)
        return out

    def _unwritten(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = tensors_in([*args, *kwargs.values()])
        if any(self.seen(t).depends for t in given):
            self.stopped = self.stopped or f"{overload_name(func)} writes into a part of a tensor"
        for one in written_by(func, args, kwargs):
            self._written[_address(one)] = self._written.get(_address(one), 0) + 1
            self.know(one, blank(one.shape))

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = overload_name(func)
        bound = bind(func, args, kwargs)
        if name == "aten.cat.default" and any(t.shape == (0,) for t in bound["tensors"]):
            full = [t for t in bound["tensors"] if t.shape != (0,)]  # what cat passes over, whatever its dims are
            if full:
                return self._call(func, (full, bound["dim"]), {})
        given = tensors_in(list(bound.values()))
        seens = [self.seen(t) for t in given]
        base = name.split(".")[1]
        chosen = [s for t, s in zip(given, seens, strict=True) if t.dtype in (torch.bool, torch.uint8)]
        if any(s.depends for s in (seens if base in _READ else chosen if base in _INDEXING else ())):
            self.stopped = self.stopped or READ
        if base == "native_dropout" or ("batch_norm" in base and bound.get("training") is False):
            out = func(*args, **kwargs)
            self.know(tensors_in(out)[0], replace(seens[0], band=None, line=None))
            return out
        probe = func(*args, **kwargs)
        rule = self._rule(func, args, kwargs, probe)
        told = any(s.depends or s.band is not None or s.line is not None for s in seens)
        if rule is None and told:
            parts = decomposed(func)
            if parts is not None and find_replacement(name) is None:
                with self:
                    made = parts(*args, **kwargs)
                if made is not NotImplemented:
                    return made
        outs = tensors_in(probe)
        if base in ("view_as_complex", "view_as_real"):
            self.know(probe, _paired(seens[0], base.endswith("complex")))
            return probe
        if rule is None or len(rule.operands) != len(given):
            self._unknown(name, seens, outs)
            return probe
        results = [(number, one) for number, one in enumerate(compose(rule, seens, name)) if one is not None]
        if len(results) != len(outs):
            self._unknown(name, seens, outs)
            return probe
        for out, (number, one) in zip(outs, results, strict=True):
            self._keep(func, base, bound, rule, given, seens, out, one, number)
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
                self.know(out, Seen(blank(out.shape).dims, anywhere, anywhere, exact=False))

    def _keep(
        self,
        func: Any,
        base: str,
        bound: dict[str, Any],
        rule: Rule,
        given: list[Tensor],
        seens: list[Seen],
        out: Tensor,
        made: Seen,
        number: int,
    ) -> None:
        """What an op's result sees, with what is known of its values."""
        if math.prod(n for dim in made.dims for n in dim) != out.numel():
            made = Seen(blank(out.shape).dims, made.time, made.row, False)
        carrier = Carrier(rule, seens, made, number, steady=base in _SOFTMAX)
        numbers = {k: i for i, k in enumerate(n for n, v in bound.items() for _ in tensors_in(v))}
        band: Band | None = None
        line: Line | None = None
        if base == "arange" and bound.get("step", 1) == 1 and not out.is_floating_point():
            line = ({0: 1} if out.numel() > 1 else {}, float(bound.get("start", 0)))
        elif base in _FILLED and not any(s.depends for s in seens) and out.numel():
            first = out.flatten()[0]
            line = ({}, float(first)) if bool((out == first).all()) else None
        elif base in ("tril", "triu"):
            band = triangle(base == "tril", bound["diagonal"], seens[0], made)
        elif torch.Tag.pointwise in func.tags or base in ("_to_copy", "clone", "copy"):
            band, line = self._values(func, base, bound, carrier, numbers)
        elif base in _SOFTMAX:
            band = self._softmaxed(carrier.band(0))
            made = replace(made, exact=made.exact and (carrier.band(0) is None or band is not None))
        elif base == "cumsum" and seens[0].constant == 1 and len(made.parts()[bound["dim"]]) == 1:
            line = ({made.parts()[bound["dim"]][0]: 1}, 1.0)
        elif len(given) == 1 and (is_view(func) or base == "_unsafe_view") and given[0].dtype == out.dtype:
            band, line = carrier.band(0), carrier.line(0)
        lost = band is None and any(s.band is not None for s in seens)
        if (self._may_mask(given, seens) or base in _CHOOSING or lost) and made.depends:
            made = replace(made, exact=False)
        self.know(out, Seen(made.dims, made.time, made.row, made.exact, band, line))

    def _softmaxed(self, band: Band | None) -> Band | None:
        """What is masked is zero, in rows of which something is left."""
        found = band.filled(lambda value: value <= LOW) if band is not None else None
        if found is None or not found.low <= 0 <= found.high:
            return None
        self.finite = self.finite or found.outside != -math.inf
        return replace(found, inside=None, outside=0.0)

    def _values(
        self, func: Any, base: str, bound: dict[str, Any], carrier: Carrier, numbers: dict[str, int]
    ) -> tuple[Any, Line | None]:
        names = [n for n, v in bound.items() if isinstance(v, Tensor | bool | int | float) and n not in ("alpha",)]
        if bound.get("alpha", 1) != 1:
            return None, None
        if base in ("_to_copy", "clone", "copy"):
            source = numbers.get("src", 0)
            return carrier.band(source), carrier.line(source)
        lines = [carrier.line(numbers[n]) if isinstance(bound[n], Tensor) else ({}, float(bound[n])) for n in names]
        if len(names) == 2:
            band = compared(base, lines[0], lines[1])
            if band is not None:
                return band, None
        given = operand_values(carrier, numbers, bound, names)
        low = any(isinstance(v, float) and -math.inf < v <= _LOWEST for v in given)
        sure = any(isinstance(v, Band) and None not in (v.inside, v.outside) for v in given)
        if low and base in ("where", "masked_fill", "mul", "div") and not sure and None in given:
            self.others = True
        made = masked(base, evaluate(func, bound, names), given)
        if base == "exp" and made is not None and isinstance(given[0], Band):
            made = self._softmaxed(given[0]) or made.valued(lambda value: None)
        return made, line_of(base, lines)

    def _may_mask(self, given: list[Tensor], seens: list[Seen]) -> bool:
        """Whether an operand may be a mask of which nothing is known."""
        return any(
            not s.depends and s.band is None and s.line is None and t.dim() > 1 and _address(t) not in self.weights
            for t, s in zip(given, seens, strict=True)
        )


def _paired(seen: Seen, joins: bool) -> Seen:
    """The last dim, of two, into complex numbers, or the other way."""
    plain = replace(seen, band=None, line=None)
    last = seen.parts()[-1] if seen.dims else []
    if joins and any(part in along.spans for part in last for along in (seen.time, seen.row)):
        anywhere = Along(anywhere=True)
        return Seen(seen.dims[:-1], anywhere, anywhere, False)
    return replace(plain, dims=seen.dims[:-1] if joins else (*seen.dims, (2,)))


def _address(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
