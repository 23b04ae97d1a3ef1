"""What an update adds to ordinary ops: one total of many scalars, so that their sums are paid together."""

from __future__ import annotations

from meshwright.compiler.rules.rule import OpCall, Rule, rule


@rule("meshwright.total")
def total(call: OpCall) -> Rule:
    """The sum of scalars: jointly linear, so a sum that all of them owe is owed by the total."""
    count = len(call.operands)
    return Rule({}, ((),) * count, ((),), linear=(frozenset(range(count)),))
