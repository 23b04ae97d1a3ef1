"""What is known of an operand's values, brought to the parts of a result in which its elements stay as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.compiler.causality.second.composing import Key, Named, finest, keyed, named_by
from meshwright.compiler.causality.second.seen import Band, Seen
from meshwright.compiler.rules.rule import Rule


@dataclass(frozen=True)
class Carrier:
    """Brings what is known of an operand's values to the parts of a result, where elements stay as they are."""

    rule: Rule
    operands: Sequence[Seen]
    result: Seen
    at: int = 0
    """Which result."""
    steady: bool = False
    """Whether an op that joins all of a dim still gives each of its elements a result at its index."""

    def band(self, number: int) -> Band | None:
        """The mask of an operand."""
        band = self.operands[number].band
        found = keyed(band, self._named(number).key_of)
        if band is None or found is None:
            return None
        query, key = (self._into(k) for k in found[:2])
        if query is None or key is None:
            return None
        by = query[1] - key[1]  # by how much a slice moves one index against the other
        return replace(band, query=query[0], key=key[0], low=band.low + by, high=band.high + by)

    def line(self, number: int) -> tuple[Mapping[int, int], float] | None:
        """The line of an operand, where a slice may move it."""
        line = self.operands[number].line
        if line is None:
            return None
        factors, constant = {}, line[1]
        key_of = self._named(number).key_of
        for part, times in line[0].items():
            into = self._into(key_of[part]) if part in key_of else None
            if into is None:
                return None
            factors[into[0]] = times
            constant += times * into[1]
        return factors, constant

    def _named(self, number: int) -> Named:
        sizes = finest(self.rule, self.operands)
        return named_by(self.operands[number], self.rule.operands[number], self.rule, sizes)

    def _into(self, key: Key) -> tuple[int, int] | None:
        """The part of the result, and by how much its indices are moved."""
        factor, j = key
        relation, target = self.rule.relations.get(factor, "pointwise"), self.rule.aligned.get(factor, factor)
        part = self._parts().get((target, j))
        if part is None or (relation == "pointwise" and target != factor):
            return None
        if relation == "pointwise" or (self.steady and relation == "all" and target == factor):
            return part, 0
        low, comma, high = relation.strip("[]").partition(",")
        return (part, int(low)) if comma and low == high else None

    def _parts(self) -> dict[Key, int]:
        dims = self.rule.results[self.at]
        sizes = finest(self.rule, self.operands)
        found: dict[Key, int] = {}
        for numbers, factors in zip(self.result.parts(), dims or (), strict=True):
            keys = [(f, j) for f in factors for j, n in enumerate(sizes.get(f, (self.rule.sizes[f],))) if n > 1]
            found.update(zip(keys, numbers, strict=True))
        return found
