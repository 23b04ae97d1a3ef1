"""Writes the program of a rank: graphs that run, and messages to ranks of other stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.compiler.analysis.graph_steps import Steps
from meshwright.compiler.plan import PIPE
from meshwright.compiler.schedules.instructions import Collective, Compute, Exchange, Instruction, Transfer, Wait


class RankWriter:
    """Of all ranks with one ``pipe`` coordinate, which do the same; peers and groups are ``pipe`` coordinates."""

    def __init__(self, pipe: int, pipes: int) -> None:
        self.pipe = pipe
        self.program: list[Instruction] = []
        self._own, self._all = (pipe,), tuple(range(pipes))

    def run(self, steps: Steps, name: str, needs: Sequence[str] = (), gives: Sequence[str] = ()) -> None:
        """Run something whose first step needs the values of other instructions, and that makes values for others.
        ``name`` tells it from all other runs."""
        write = self.program.append
        first = tuple(needs)
        for step in steps.steps:
            value = f"{name}/{step.value}" if step.value else name
            if not step.signature:
                write(Wait(value))
                continue
            read = tuple([f"{name}/{other}" for other in step.needs]) if step.needs else ()
            write(Compute(f"{name}, up to {step.value}" if step.value else f"make {name}", (*first, *read), (value,)))
            group = self._all if PIPE in step.axes else self._own
            write(Collective(group, step.signature, value, step.axes))
            first = ()
        read = tuple([f"{name}/{other}" if other else name for other in steps.last])
        write(Compute(name, (*first, *read), tuple(gives)))

    def exchange(self, transfers: Iterable[Transfer], needs: Sequence[str] = ()) -> tuple[str, ...]:
        """Send what is made of ``needs``, receive at once, and wait for both; the values that have come."""
        made = tuple(sorted(transfers, key=lambda t: not t.sends))
        if not made:
            return ()
        leaving = tuple(t.value for t in made if t.sends)
        if leaving:
            self.program.append(Compute(f"make {', '.join(leaving)}", tuple(needs), leaving))
        self.program.append(Exchange(made))
        self.program += [Wait(t.value) for t in made]
        return tuple(t.value for t in made if not t.sends)
