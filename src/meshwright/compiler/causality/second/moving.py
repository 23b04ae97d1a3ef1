"""Ops that cut a dim, pad it or join several, told for the whole dim.

Their rules take such a dim apart into pieces that may be cut between ranks; where its positions are one part, what is
read is the same interval of it for all of its indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshwright.compiler.causality.second.seen import Seen
from meshwright.compiler.rules.rule import Dims, Rule


def whole_dims(rule: Rule, operands: Sequence[Seen], result: int) -> Rule:
    """The rule for one of its results, with a factor for each dim that is moved and of which no operand has parts."""
    moves = {operand: by for (operand, into), by in rule.moves.items() if into == result}
    dims = {dim for by in moves.values() for dim in by}
    dims -= {dim for dim in dims if any(len(seen.dims[dim]) > 1 for seen in operands)}
    made = rule.results[result]
    if not dims or made is None:
        return rule
    sizes, relations, aligned = dict(rule.sizes), dict(rule.relations), dict(rule.aligned)

    def whole(old: Dims, of: str) -> Dims:
        found = list(old)
        for dim in dims:
            name, size = f"whole {dim} of {of}", math.prod(rule.sizes[f] for f in old[dim])
            sizes[name] = size
            found[dim] = (name,) if size > 1 else ()
        return tuple(found)

    into = whole(made, "the result")
    given = [whole(old, f"operand {number}") for number, old in enumerate(rule.operands)]
    for operand, by in moves.items():
        for dim in dims & by.keys():
            factor = f"whole {dim} of operand {operand}"
            relations[factor] = f"[{by[dim]},{by[dim]}]"
            aligned[factor] = f"whole {dim} of the result"
    results = tuple(into if number == result else old for number, old in enumerate(rule.results))
    return replace(
        rule, sizes=sizes, operands=tuple(given), results=results, relations=relations, aligned=aligned, local=None
    )
