"""Prices candidates of the search: each becomes a plan, the plan a program of a rank, and that is simulated."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from meshwright.compiler.analysis.blocks import Folded, Unknown
from meshwright.compiler.analysis.stand_ins import stand_ins
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.diagnostics import Diagnostic
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.facts import repeated_blocks
from meshwright.compiler.passes.known_graphs import KnownGraphs
from meshwright.compiler.passes.realise import Realiser
from meshwright.compiler.plan import PIPE, Precision, Recompute, Save
from meshwright.compiler.prediction import Execution, Prediction, between
from meshwright.compiler.schedules import catalogue
from meshwright.compiler.schedules.request import Request
from meshwright.compiler.search.candidate import SAVES, Candidate
from meshwright.compiler.search.pins import Pins
from meshwright.compiler.summary import RankSummary, StagedSummary
from meshwright.compiler.timeline import simulate
from meshwright.compiler.timeline.cuts import Depth
from meshwright.compiler.timeline.planned import SEARCHED, Pipelined, Way, pipelined, repriced
from meshwright.compiler.timeline.stage import StagePricer
from meshwright.summaries import DEEPEST, depth_of, staged_summary_of, summary_of, treatments, turns, untied

USUAL = "1f1b"
"""The schedule of a pipeline for which none is said."""


class Pricer:
    """Compiles folded programs and keeps their summaries, which are simulated anew for another cluster."""

    def __init__(
        self,
        folded: Folded,
        precision: Precision,
        cluster: Cluster,
        execution: Execution,
        pins: Pins | None = None,
        reserve: int = 0,
    ) -> None:
        """``reserve``: bytes of each device that stay free, for what is chosen by the memory there is."""
        self._pins = pins
        self._reserve = reserve
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
        self._staged: dict[tuple[Candidate, bool], tuple[StagedSummary, Depth]] = {}
        self._pricers: dict[tuple[Candidate, bool, Cluster], StagePricer] = {}
        self._untied: dict[int, StepProgram] = {}
        self._pipelines: dict[tuple[Candidate, Cluster], Pipelined] = {}

    def price(self, candidate: Candidate, cluster: Cluster | None = None) -> Prediction:
        """See :class:`meshwright.compiler.search.prices.Prices`. Raises :class:`Unknown` for a step that was captured
        by its first layers, if none of them is treated as others are."""
        if candidate.pipe > 1:
            return self.pipelined(candidate, cluster).prediction
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

    def pipelined(self, candidate: Candidate, cluster: Cluster | None = None) -> Pipelined:
        """Where a candidate with a pipe axis is cut, and what is predicted of it.

        Whatever its stages and schedule are, what is compiled is the program of a rank that had them all.
        """
        where = cluster or self._cluster
        key = (candidate, where)
        if key not in self._pipelines:
            schedule = candidate.schedule or USUAL
            saves = self._levels(candidate)
            apart = (
                schedule == SEARCHED
                or catalogue.make(schedule, Request(candidate.pipe, 2 * candidate.pipe, candidate.virtual)).apart
            )
            pricers, depth = self._stages(candidate.inner, saves, apart, where)
            mesh = Mesh(((PIPE, candidate.pipe), *pricers[0].summary.mesh.axes))
            way = Way(mesh, schedule, candidate.virtual, room=where.device.memory - self._reserve)
            found = pipelined(pricers, depth, way)
            if schedule == SEARCHED and "W" not in found.pipeline.table:
                pricers, _ = self._stages(candidate.inner, saves, False, where)
                found = repriced(pricers, depth, way, found)
            self._pipelines[key] = found
        return self._pipelines[key]

    def _levels(self, candidate: Candidate) -> list[Save]:
        """What stages may keep, the most first."""
        if not candidate.by_stage:
            return [candidate.save]
        saves = list(SAVES)
        return saves[: saves.index(candidate.save) + 1]

    def recomputed(self, candidate: Candidate) -> tuple[Recompute, ...] | None:
        """What each block of a pipeline recomputes, if that is chosen stage by stage."""
        if not candidate.by_stage:
            return None
        found = self.pipelined(candidate)
        _, depth = self._staged_summary(replace(candidate.inner, save=self._levels(candidate)[0]), True)
        starts = depth.starts(found.pipeline.first_blocks)
        saves = [self._levels(candidate)[level] for level in found.levels]
        own = [saves[sum(start <= i for start in starts) - 1] for i in range(len(depth.names))]
        if len(set(own)) == 1:
            return tuple(Recompute(pattern, own[0]) for pattern in self._blocks) if own[0] != "all" else ()
        return tuple(Recompute(name, save) for name, save in zip(depth.names, own, strict=True) if save != "all")

    def _stages(
        self, inner: Candidate, saves: Sequence[Save], apart: bool, cluster: Cluster
    ) -> tuple[list[StagePricer], Depth]:
        """Pricers of stages of a candidate without a pipe axis, one for each way to recompute; and the depth."""
        found = []
        for save in saves:
            one = replace(inner, save=save)
            key = (one, apart, cluster)
            if key not in self._pricers:
                self._pricers[key] = StagePricer(self._staged_summary(one, apart)[0], cluster, self._execution)
            found.append(self._pricers[key])
        return found, self._staged_summary(replace(inner, save=saves[0]), apart)[1]

    def _staged_summary(self, inner: Candidate, apart: bool) -> tuple[StagedSummary, Depth]:
        key = (inner, apart)
        if key not in self._staged:
            folded, saves = self._folding(inner)
            plan = self._realiser(inner.every, folded).plan(inner)
            tied = self._untied.setdefault(id(folded.program), untied(folded.program))
            summary = staged_summary_of(folded, plan, saves, apart, self._known, self.told, tied)
            self._staged[key] = summary, depth_of(folded, summary)
        return self._staged[key]

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
        folded, saves = self._folding(candidate)
        return summary_of(
            folded, self._realiser(candidate.every, folded).plan(candidate), saves, self._known, self.told
        )

    def _realiser(self, every: int, folded: Folded) -> Realiser:
        if every not in self._realisers:
            self._realisers[every] = Realiser(folded.program, self._precision, self._blocks, pins=self._pins)
        return self._realisers[every]

    def _folding(self, candidate: Candidate) -> tuple[Folded, Mapping[str, Save]]:
        """The step folded for a candidate, and by block what it keeps."""
        every = candidate.every
        entries = [Recompute(pattern, candidate.save, every) for pattern in self._blocks]
        saves = treatments(self._blocks, entries)
        places: Mapping[str, Hashable] = turns(self._blocks, entries)
        if self._absent and every > 1:
            roles = stand_ins(self._folded[1].groups, self._absent, saves)
            places, saves = roles, {name: save for name, (save, _) in roles.items()}
        if every not in self._folded:
            self._folded[every] = self._folded[1].refold(places)
        return (self._whole() if candidate.prefetch > DEEPEST else self._folded[every]), saves
