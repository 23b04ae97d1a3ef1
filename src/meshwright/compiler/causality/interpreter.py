"""Runs a model as it is and keeps, beside every value, its shadow: the dispatch mode that sees every op.

An op is seen below autograd. Views need nothing (``memory.py``); a write in place is done as the functional op and a
copy; an op with a rule has its rule; a pointwise op the general one; an op that torch writes in other ones is done
in these; any other depends on everything that it is given, and is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call, bind, tensors_in
from meshwright.compiler.causality.listings import Listings
from meshwright.compiler.causality.memory import Memory
from meshwright.compiler.causality.places import user_place
from meshwright.compiler.causality.plateaus import SATURATING, living
from meshwright.compiler.causality.registry import find_replacement, find_rule
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.causality.words import any_over, single
from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.graph.adapter import OpOverload, TorchDispatchMode, decomposed, overload_name, plain_form


@dataclass(frozen=True)
class Read:
    """A value of a tensor that the program itself looked at, and what it depends on."""

    place: Origin
    what: str


@dataclass
class Notes:
    """What a run met besides values."""

    assumptions: dict[str, Origin] = field(default_factory=dict)
    unknown: dict[str, Origin] = field(default_factory=dict)
    """Ops without a rule, by name."""
    reads: list[Read] = field(default_factory=list)
    chosen: bool = False
    """Whether rows were chosen by a computed mask."""
    steps: bool = False
    """Whether numbers that depend on tokens were rounded to whole ones, which are constant almost everywhere."""
    foreign: bool = False
    """Whether weights were met that no module holds, and which are not drawn anew therefore."""
    numbers: set[int] = field(default_factory=set)
    """Numbers that tokens are compared with."""
    rows: set[int] = field(default_factory=set)
    """Sizes of tables that are read by tokens."""
    spans: set[int] = field(default_factory=set)
    """Whole numbers that may be windows, chunks and the reach of convolutions."""


class Interpreter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it without types
    """A run with shadows. Read the result's shadow from ``memory`` afterwards."""

    supports_higher_order_operators = True

    def __init__(self, memory: Memory, all_candidates: bool = True, spare: range = range(0)) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without types
        self.memory = memory
        self.listings = Listings(memory.width)
        self.notes = Notes()
        self.spare = spare
        """Bits that stand for ops without a rule, in the order in which these are met."""
        self.all_candidates = all_candidates
        """Whether a computed mask is taken to choose every row that it could choose."""
        self.dead: Sequence[Tensor] = ()
        """Of each saturating op in order: the elements that are taken to depend on nothing."""
        self.alive: list[Tensor] = []
        """Of each saturating op in order: the elements that did not stand on a plateau."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return self._higher_order(func, args, kwargs)
        name = overload_name(func)
        written = written_by(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:  # another view of the same memory, by the same name
            return func(*args, **kwargs)
        if written:
            return self._write(func, name, args, kwargs, written)
        call = Call(self, func, name, args, kwargs, bind(func, args, kwargs))
        return self.run(call)

    def _higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op that is given functions: in its plain form, which is seen, or as one of which nothing is known."""
        parts = plain_form(func)
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        named = {str(i): a for i, a in enumerate(args)} | kwargs
        call = Call(self, func, str(func), args, kwargs, named)
        call.out = func(*args, **kwargs)
        self._everything(call, tensors_in(call.out))
        return call.out

    def run(self, call: Call) -> Any:
        """Do an op that writes nothing, and its shadow."""
        stand_in = find_replacement(call.name)
        if stand_in is not None:
            made = stand_in(call)
            if made is not NotImplemented:
                out, shadow = made
                self._keep(out, shadow)
                return out
        given = call.tensors()
        if is_view(call.func):
            made = call.func(*call.args, **call.kwargs)
            if all(_aliases(o, given) for o in tensors_in(made) if o.numel()):
                return made
            parts = decomposed(call.func)  # reshape() of what cannot be viewed so, and the like: a copy
            if parts is not None:
                with self:
                    return parts(*call.args, **call.kwargs)
        shadows = [call.shadow(t) for t in given]
        idle = all(s.deps is None and s.item is None for s in shadows)
        chosen = find_rule(call.name)
        if chosen is None and not idle and torch.Tag.pointwise in call.func.tags:
            chosen = find_rule("pointwise")
        if chosen is None and not idle:
            parts = decomposed(call.func)
            if parts is not None:
                with self:
                    made = parts(*call.args, **call.kwargs)
                if made is not NotImplemented:
                    return made
        call.out = call.func(*call.args, **call.kwargs)
        outs = tensors_in(call.out)
        if outs and given and all(_aliases(o, given) for o in outs):
            return call.out  # contiguous() of what is contiguous, and the like
        if chosen is not None:
            shadow = chosen(call)
            self._keep(call.out, self._saturated(call, shadow))
        elif idle:
            known = all(bool(s.known.all()) for s in shadows) and not _random(call.func)
            for out in outs:
                self.memory.write(out, constant(out.shape, known))
        else:
            self._everything(call, outs)
        return call.out

    def _saturated(self, call: Call, shadow: Any) -> Any:
        """The shadow of a saturating op, without what is said to be dead; of any other as it is."""
        name = call.name.split(".")[1]
        if not isinstance(shadow, Shadow) or shadow.deps is None or not isinstance(call.get("self"), Tensor):
            return shadow
        if name in ("maximum", "minimum") and shadow.item is None:
            return self._larger(call, shadow, 1 if name == "maximum" else -1)
        if name not in SATURATING:
            return shadow
        number = len(self.alive)
        self.alive.append(living(name, call.arguments).expand(shadow.shape))
        if number >= len(self.dead) or self.dead[number].shape != shadow.shape:
            return shadow
        return shadow.with_deps(torch.where(self.dead[number].unsqueeze(-1), 0, shadow.deps))

    def _larger(self, call: Call, shadow: Shadow, sign: int) -> Shadow:
        """Of the larger of two, or the smaller: an operand that is never it is dead."""
        number, deps = len(self.alive), None
        pair = (call["self"], call["other"])
        for k, (one, other) in enumerate((pair, pair[::-1])):
            self.alive.append((sign * (one - other) >= 0).expand(shadow.shape))
            words = call.words(call.shadow(one).expand(shadow.shape))
            if number + k < len(self.dead) and self.dead[number + k].shape == shadow.shape:
                words = torch.where(self.dead[number + k].unsqueeze(-1), 0, words)
            deps = words if deps is None else deps | words
        return shadow.with_deps(deps) if number < len(self.dead) else shadow

    def _everything(self, call: Call, outs: list[Tensor]) -> None:
        """An op of which nothing is known: each element of its results depends on all that it was given."""
        self.notes.unknown.setdefault(call.name, user_place())
        number = list(self.notes.unknown).index(call.name)
        union = torch.zeros(self.memory.width, dtype=torch.int64)
        for value in call.tensors():
            shadow = call.settled(value)
            if shadow.deps is not None:
                union = union | any_over(shadow.deps.reshape(-1, self.memory.width), (0,))
        if self.spare:
            union = union | single(self.spare[min(number, len(self.spare) - 1)], self.memory.width)
        union[self.memory.width // 2 :] = 0
        for out in outs:
            deps = union.expand(*out.shape, self.memory.width)
            self.memory.write(out, Shadow(constant(out.shape, False).known, deps))

    def _keep(self, out: Any, shadow: Any) -> None:
        if isinstance(out, Tensor):
            self.memory.write(out, shadow)
        elif isinstance(shadow, list | tuple):
            for one, its in zip(out, shadow, strict=True):
                if isinstance(one, Tensor):
                    self.memory.write(one, its)

    def _write(self, func: Any, name: str, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        """An op that writes: its functional form, then a copy into what it writes."""
        replaced = find_replacement(name)
        bound = bind(func, args, kwargs)
        if replaced is not None:
            made = replaced(Call(self, func, name, args, kwargs, bound))
            if made is not NotImplemented:
                return made
        pure = functional(func)
        if pure is None:
            return self._write_unknown(func, name, args, kwargs, written)
        names = {a.name for a in pure._schema.arguments}
        keywords = {k: v for k, v in bound.items() if k in names}
        made = self.run(Call(self, pure, overload_name(pure), (), keywords, bind(pure, (), keywords)))
        results = tensors_in(made)
        if func._schema.name.endswith("_") or len(results) > len(written):
            results = results[-len(written) :] if len(results) != len(written) else results
        for target, value in zip(written, results, strict=True):
            shadow = self.memory.read(value)
            if target.shape != value.shape:
                target.resize_(value.shape)
            target.copy_(value)
            self.memory.write(target, shadow)
        return written[0] if len(written) == 1 else tuple(written)

    def _write_unknown(self, func: Any, name: str, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        call = Call(self, func, name, args, kwargs, bind(func, args, kwargs))
        shadows = [call.shadow(t) for t in call.tensors()]
        out = func(*args, **kwargs)
        if all(s.deps is None and s.item is None for s in shadows):
            known = all(bool(s.known.all()) for s in shadows) and not _random(func)
            for target in written:
                self.memory.write(target, constant(target.shape, known))
        else:
            self._everything(call, written)
        return out


def functional(func: Any) -> Any:
    """The overload that returns what ``func`` writes: ``add_.Tensor`` -> ``add.Tensor``; None if there is none."""
    space, _, base = func._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), base.removesuffix("_"), None)
    if packet is None:
        return None
    overloads = packet.overloads()
    own = func._schema.overload_name or "default"
    wanted = {a.name for a in func._schema.arguments if not (a.is_out or (a.alias_info and base[-1:] != "_"))}
    tried = [own, own.removesuffix("_out").removesuffix("out") or "default", *overloads]
    for one in tried:
        if one not in overloads:
            continue
        found = getattr(packet, one)
        names = {a.name for a in found._schema.arguments}
        if not found._schema.is_mutable and names == wanted and _kinds(found, names) == _kinds(func, names):
            return found
    return None


def _kinds(func: Any, names: set[str]) -> list[str]:
    return [str(a.type) for a in func._schema.arguments if a.name in names]


def is_view(func: Any) -> bool:
    """Whether what the op returns is memory that it was given."""
    return any(r.alias_info is not None for r in func._schema.returns)


def _aliases(out: Tensor, given: list[Tensor]) -> bool:
    address = out.untyped_storage().data_ptr()
    return address != 0 and any(address == t.untyped_storage().data_ptr() for t in given)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an op writes into."""
    if not func._schema.is_mutable:
        return []
    found: list[Tensor] = []
    bound = None
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            bound = bound or bind(func, args, kwargs)
            found.extend(tensors_in(bound.get(argument.name)))
    return found


def _random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags
