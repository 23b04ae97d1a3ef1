"""The logical values of a step, numbered: equal numbers mean equal values, whatever computes them.

A term is an input of the step, the result of an op on terms, or a sum of terms. Sums are kept flat and without order,
for the program of a rank may add in another order than the step for one device. Views and casts between floats are no
terms: a term is its elements in row-major order, over the reals.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from meshwright.compiler.graph.program import Value
from meshwright.compiler.rules.dims import is_float
from meshwright.compiler.rules.rule import OpCall, Rule, TensorType

MOST = 8
"""Terms up to which an op that is linear in a sum is taken term by term."""


@dataclass(frozen=True)
class Known:
    """One call of the step for one device, and the terms of what it returns."""

    call: OpCall
    rule: Rule
    results: tuple[int | None, ...]
    node: fx.Node
    reads: tuple[int, ...]
    """The terms of its operands."""


@dataclass
class Terms:
    """All terms, and by their operands the calls that the step for one device makes."""

    names: list[str] = field(default_factory=list)
    """By term: what it is called in messages."""
    calls: dict[tuple[int, ...], list[Known]] = field(default_factory=dict)
    real: set[int] = field(default_factory=set)
    """Terms whose elements are floats."""
    made_by: dict[int, fx.Node] = field(default_factory=dict)
    """By term: the first node of the step for one device that gives it."""
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _sums: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _seen: set[Hashable] = field(default_factory=set)

    def leaf(self, value: Value) -> int:
        """An input of the step."""
        return self._number(("input", value), f"{value.kind} '{value.name}'")

    def result(self, call: OpCall, operands: Sequence[int], index: int, name: str) -> int:
        """What an op gives."""
        return self._number((call.name, _arguments(call), tuple(operands), index), name)

    def sum(self, terms: Sequence[int], name: str = "") -> int:
        """The sum of terms, each as often as it is given."""
        flat = sorted(member for term in terms for member in self.members(term))
        if len(flat) == 1:
            return flat[0]
        found = self._number(("sum", *flat), name or " + ".join(self.names[t] for t in flat[:3]))
        self._sums[found] = tuple(flat)
        return found

    def members(self, term: int) -> tuple[int, ...]:
        """The terms of a sum; of any other term itself."""
        return self._sums.get(term, (term,))

    def is_real(self, term: int) -> bool:
        """Whether a term's elements are floats."""
        return term in self.real or (term in self._sums and all(t in self.real for t in self._sums[term]))

    def learn(self, call: OpCall, rule: Rule, operands: tuple[int, ...], node: fx.Node) -> tuple[int | None, ...]:
        """Note down a call of the step for one device; the terms of its results."""
        results = tuple(
            None if r is None else self.result(call, operands, i, node.name) for i, r in enumerate(call.results)
        )
        if len(results) == 1 and distributes(rule, operands) and 1 < len(self.members(operands[0])) <= MOST:
            parts = [self.learn(call, rule, (t,), node)[0] for t in self.members(operands[0])]
            results = (self.sum([t for t in parts if t is not None], node.name),)
        key = (call.name, _arguments(call), operands, results, tuple(t.shape for t in call.operands))
        if key not in self._seen:
            self._seen.add(key)
            self.calls.setdefault(operands, []).append(Known(call, rule, results, node, operands))
        for term, type_ in zip(results, call.results, strict=True):
            if term is not None and type_ is not None:
                self.made_by.setdefault(term, node)
                if is_float(type_.dtype):
                    self.real.add(term)
        return results

    def _number(self, key: Hashable, name: str) -> int:
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.names)
            self.names.append(name)
        return found


def distributes(rule: Rule, operands: Sequence[int]) -> bool:
    """Whether an op of a sum is the sum of the op of its terms."""
    return len(operands) == 1 and frozenset({0}) in rule.linear


def _arguments(call: OpCall) -> Hashable:
    """What makes two calls of an op on equal operands the same: numbers by their value, be it written 0 or 0.0; in
    which float it is computed makes no difference over the reals."""

    def frozen(value: Any) -> Hashable:
        if isinstance(value, TensorType):
            return value.shape, "float" if is_float(value.dtype) else value.dtype
        if isinstance(value, (list, tuple)):
            return tuple([frozen(v) for v in value])
        return (value,) if isinstance(value, bool) else value

    return frozen(call.args), tuple([(k, frozen(v)) for k, v in call.kwargs.items()])
