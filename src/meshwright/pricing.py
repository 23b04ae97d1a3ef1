"""Prices candidates of the search: each becomes a plan, the plan a program of a rank, and that is simulated."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from meshwright.compiler.analysis.blocks import Folded, Unknown
from meshwright.compiler.analysis.stand_ins import stand_ins
from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.diagnostics import Diagnostic, DiagnosticWarning
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.facts import repeated_blocks
from meshwright.compiler.passes.known_graphs import KnownGraphs
from meshwright.compiler.passes.realise import Realiser
from meshwright.compiler.passes.treated import present
from meshwright.compiler.plan import Plan, Precision, Recompute, Save, pattern_expression
from meshwright.compiler.prediction import Execution, Prediction, between
from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.search.pins import Pins
from meshwright.compiler.summary import RankSummary
from meshwright.compiler.timeline import simulate

DEEPEST = 1
"""A folded step shows how weights are gathered so many blocks ahead."""


class Pricer:
    """Compiles folded programs and keeps their summaries, which are simulated anew for another cluster."""

    def __init__(
        self,
        folded: Folded,
        precision: Precision,
        cluster: Cluster,
        execution: Execution,
        pins: Pins | None = None,
    ) -> None:
        self._pins = pins
        self._precision = precision
        self._cluster = cluster
        self._execution = execution
        self._blocks = repeated_blocks(folded.blocks())
        self._folded = {1: folded}
        self._absent = {name for names in folded.absent.values() for name in names}
        self._realisers: dict[int, Realiser] = {}
        self._known = KnownGraphs()
        self.told: dict[Diagnostic, None] = {}
        """What the compiler has warned of."""
        self._summaries: dict[Candidate, RankSummary] = {}

    def price(self, candidate: Candidate, cluster: Cluster | None = None) -> Prediction:
        """See :class:`meshwright.compiler.search.prices.Prices`. Raises :class:`Unknown` for a step that was captured
        by its first layers, if none of them is treated as others are."""
        if candidate not in self._summaries:
            self._summaries[candidate] = self._summary(candidate)
        found = simulate(self._summaries[candidate], cluster or self._cluster, self._execution)
        if not self._absent or candidate.every == 1:
            return found
        # where few blocks stand for many, those that take turns come one after the other, which their messages show:
        # their time is between that of all blocks treated and that of none
        share = self._share(candidate)
        treated, plain = (
            self.price(replace(candidate, save=save, every=1), cluster) for save in (candidate.save, "all")
        )
        return between(found, treated, plain, share)

    def _share(self, candidate: Candidate) -> float:
        """The part of the blocks that recomputes."""
        counts = [len(names) for names in self._blocks.values()]
        return sum(-(-count // candidate.every) for count in counts) / sum(counts)

    def _whole(self) -> Folded:
        """The step as it was captured. Raises :class:`Unknown` if that was by its first layers."""
        folded = self._folded[1]
        if self._absent:
            raise Unknown("weights are gathered further ahead than the captured layers show")
        return replace(folded, program=folded.source or folded.program, repeats={}, groups=())

    def _summary(self, candidate: Candidate) -> RankSummary:
        every = candidate.every
        entries = [Recompute(pattern, candidate.save, every) for pattern in self._blocks]
        saves = treatments(self._blocks, entries)
        places: Mapping[str, Hashable] = turns(self._blocks, entries)
        if self._absent and every > 1:
            roles = stand_ins(self._folded[1].groups, self._absent, saves)
            places, saves = roles, {name: save for name, (save, _) in roles.items()}
        if every not in self._folded:
            self._folded[every] = self._folded[1].refold(places)
        folded = self._whole() if candidate.prefetch > DEEPEST else self._folded[every]
        if every not in self._realisers:
            self._realisers[every] = Realiser(folded.program, self._precision, self._blocks, pins=self._pins)
        return summary_of(folded, self._realisers[every].plan(candidate), saves, self._known, self.told)


def treatments(blocks: Mapping[str, list[str]], entries: Iterable[Recompute]) -> dict[str, Save]:
    """By repeated block: what it keeps for backward. The first entry that matches a block counts."""
    found: dict[str, Save] = {}
    for entry in entries:
        expression = pattern_expression(entry.pattern)
        names = [name for names in blocks.values() for name in names if expression.fullmatch(name)]
        for index, name in enumerate(name for name in names if name not in found):
            found[name] = entry.save if index % entry.every == 0 else "all"
    return found


def turns(blocks: Mapping[str, list[str]], entries: Iterable[Recompute]) -> dict[str, tuple[Save, int]]:
    """By repeated block: what it keeps, and its place in a period of ``every`` blocks; so that what is folded are whole
    periods, whose blocks take turns. Blocks beyond the last whole period stand for themselves."""
    found: dict[str, tuple[Save, int]] = {}
    for entry in entries:
        expression = pattern_expression(entry.pattern)
        for names in blocks.values():
            mine = [name for name in names if expression.fullmatch(name) and name not in found]
            whole = len(mine) // entry.every * entry.every if entry.every > 1 else len(mine)
            for index, name in enumerate(mine):
                save = entry.save if index % entry.every == 0 else "all"
                found[name] = (save, index % entry.every if index < whole else -1 - index)
    return found


def summary_of(
    folded: Folded,
    plan: Plan,
    saves: Mapping[str, Save],
    known: KnownGraphs | None = None,
    told: dict[Diagnostic, None] | None = None,
) -> RankSummary:
    """The summary of a folded step under a plan for the whole one.

    ``saves`` are the plan's :func:`treatments`, ``known`` what has been compiled before; the compiler's warnings are
    added to ``told``. The program is only priced; it is verified when it is compiled to run.

    Every k-th block of the whole step is not every k-th of the folded one: there, blocks are named one by one.
    """
    if any(entry.every > 1 for entry in plan.recompute):
        named = [Recompute(name, save) for name, save in saves.items() if save != "all"]
        plan = replace(plan, recompute=present(folded.program.micro, named))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = compile_step(folded.program, plan, verify=False, known=known)
    if told is not None:
        told |= {w.message.diagnostic: None for w in caught if isinstance(w.message, DiagnosticWarning)}
    return summarize(compiled, folded.repeats)
