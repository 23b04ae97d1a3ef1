"""The relation checker: does the program of the ranks compute what the step for one device computes?

Every value of the compiled program, as it is after all passes, is related anew to a value of the step for one device:
which one it is, which axes cut it, over which axes sums are owed, microbatches among them. Taken as given are the rules
of ops, what collectives do, how inputs are stored, and nothing that the partitioner has written down.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.compiler.equivalence.border import Border
from meshwright.compiler.equivalence.findings import OUTPUT, UNDECIDED, Finding
from meshwright.compiler.equivalence.layout import Layout
from meshwright.compiler.equivalence.order import check_order
from meshwright.compiler.equivalence.related import Held, Related
from meshwright.compiler.equivalence.single import Meaning, meaning_of
from meshwright.compiler.equivalence.stages import Piece, in_order, micro_pieces, update_pieces
from meshwright.compiler.equivalence.walk import Walk
from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram
from meshwright.compiler.graph.program import Value
from meshwright.compiler.mesh import MICRO, Mesh
from meshwright.compiler.plan import PIPE, Plan

ANOTHER_STEP = "groups of the batch were declared to stand for the whole, which makes it another step"


@dataclass(frozen=True)
class Relations:
    """What the checker has found. ``values``: how many values of the ranks' program were related."""

    findings: tuple[Finding, ...]
    values: int
    forms: int
    """Calls that differ: what comes again, as repeated blocks do, is decided once."""
    apart: str = ""
    """Why there are no relations to find: the ranks are meant to compute another step. It is no fault."""

    @property
    def proved(self) -> bool:
        """Whether the program was proved equivalent."""
        return not self.findings and not self.apart

    @property
    def undecided(self) -> bool:
        """Whether nothing wrong was found, but something could not be told."""
        return bool(self.findings) and all(f.code == UNDECIDED for f in self.findings)


def comparable(plan: Plan) -> bool:
    """Whether a plan keeps the meaning of the captured step."""
    return all(entry.meaning == "global" for entry in plan.separability)


def check_relations(compiled: Compiled, meaning: Meaning | None = None) -> Relations:
    """Relate all values of a compiled program. ``meaning`` is that of its step, if it is known already.

    Where groups of the batch were declared to stand for the whole, the ranks are meant to compute another step than the
    captured one: no values are related then, and numbers alone decide (``verification.py``).
    """
    if not comparable(compiled.plan):
        return Relations(
            (), 0, 0, "groups of the batch were declared to stand for the whole, which makes it another step"
        )
    return _Check(compiled, meaning or meaning_of(compiled.program)).run()


@dataclass
class _Check:
    compiled: Compiled
    meaning: Meaning
    findings: list[Finding] = field(default_factory=list)
    values: int = 0
    fits: dict[Hashable, Any] = field(default_factory=dict)
    made: dict[Value, list[str]] = field(default_factory=dict)

    def run(self) -> Relations:
        plan = self.compiled.plan
        devices = Mesh(tuple(a for a in plan.mesh.axes if a[0] != PIPE))
        micro = devices.with_micro(plan.microbatches)
        border = Border(self.compiled, self.meaning)
        prologue = self._walk(Piece("prologue", self.compiled.prologue), devices, border, {})
        totals = self._graphs(micro_pieces(self.compiled), micro, border, prologue)
        border.check_shared(totals)
        gradients = {v: _paid_over_micro(h) for v, h in totals.items() if v.kind == "gradient"}
        self._graphs(update_pieces(self.compiled), devices, border, gradients)
        border.missing(self.made)
        self._take(border)
        if isinstance(self.compiled, PipelineProgram):
            self.findings += check_order(self.compiled)
        return Relations(tuple(self.findings), self.values, len(self.fits))

    def _graphs(
        self, pieces: list[Piece], mesh: Mesh, border: Border, handed: Mapping[Value, Held]
    ) -> dict[Value, Held]:
        """All pieces of a graph, each behind those that make what it reads. Returns what leaves the graph."""
        results: dict[Value, Held] = {}
        made: dict[tuple[Hashable, str], Held] = {}
        ordered, stuck = in_order(pieces)
        for piece in stuck:
            message = "the pieces of this graph wait for each other's values"
            self.findings.append(Finding(OUTPUT, piece.name, "", message))
        for piece in ordered:
            given = dict(handed)
            for name, origin in piece.takes.items():
                if (origin, name) in made:
                    given[Value("value", name)] = made[origin, name]
            for value, held in self._walk(piece, mesh, border, given).items():
                if value.kind == "value":
                    made[piece.place, value.name] = held
                else:
                    results[value] = held
        return results

    def _take(self, border: Border) -> None:
        """What was found at the borders of a graph, behind what was found within it."""
        self.findings += border.findings
        border.findings.clear()

    def _walk(self, piece: Piece, mesh: Mesh, border: Border, handed: Mapping[Value, Held]) -> dict[Value, Held]:
        local = piece.graph
        walk = Walk(local, piece.name, mesh, self.meaning, self.fits)
        inputs = border.inputs(local, piece.name, mesh, handed)
        border.holds(piece.holds, local, piece.name)
        found = walk.run(inputs)
        self.values += len(walk.env)
        self.findings += walk.findings
        border.check(local, piece.name, mesh, found)
        border.stores(walk, piece.name)
        self._take(border)
        for value in found:
            if value.kind != "value":
                self.made.setdefault(value, []).append(piece.name)
        return found


def _paid_over_micro(held: Held) -> Held:
    """A gradient once the runtime has added up the microbatches."""
    if not isinstance(held, Related):
        return held
    lies: Layout = held.layout
    return Related(held.term, replace(lies, owed=frozenset(p for p in lies.owed if p[0] != MICRO)))
