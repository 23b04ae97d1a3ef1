"""Does what was compiled let an output see more, or less, than one device does? Read off the ranks' own programs.

All ranks run forward under the analysis of :mod:`meshwright.compiler.causality`, and so does the step compiled for one
rank. What each logit and each loss of a token depends on, of tokens and of labels, must be the same: a mask that is cut
at the wrong place, a shard that is told another position, a label that is not the neighbour's makes it differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.compiler.causality.rank_findings import Difference, difference_finding, unread_finding
from meshwright.compiler.causality.readings import Points, first_node, points_of
from meshwright.compiler.causality.tokens import Numbering, given_values, numbered
from meshwright.compiler.causality.verdict import Verdict
from meshwright.compiler.causality.words import any_over
from meshwright.compiler.diagnostics import Diagnostic
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import StepProgram, TensorSpec
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.plan import Plan, Storage
from meshwright.miniature import Miniature, as_it_is, miniature_of, weights_of
from meshwright.one_device import groups_of
from meshwright.runtime.data import RandomSource
from meshwright.runtime.materialize import Weights
from meshwright.runtime.shadows import Found, read_forward
from meshwright.verification import whole_batch_of

TOKENS, LENGTH, RANKS = 512, 64, 16
"""Tokens of a batch, positions of a row, and ranks up to which a program is read as it is; of others the miniature."""


@dataclass(frozen=True)
class RankReading:
    """What the programs of all ranks let be seen."""

    verdict: Verdict
    alone: Verdict
    """That of the same step on one device, by the same analysis."""
    leaks: frozenset[str]
    ranks: int
    outputs: int
    """Positions whose logits or losses were read."""
    miniature: bool
    findings: tuple[Diagnostic, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all outputs see what they see on one device."""
        return not self.findings

    def headline(self) -> str:
        """The verdict beside that of one device."""
        leaks = f" ({', '.join(sorted(self.leaks))})" if self.leaks else ""
        ranks = f"{self.ranks} ranks{' of the miniature' if self.miniature else ''}"
        return f"{self.verdict}{leaks} on {ranks}, {self.alone} on one device; {self.outputs} outputs read"


def read_ranks(compiled: Compiled, weights: Weights | None = None) -> RankReading | None:
    """Read a compiled step, or its miniature if it is large. ``weights``: the first values of buffers, which a mask may
    be one of; without them nothing is known of these. None: no tensor of the batch has positions."""
    program, plan = compiled.program, compiled.plan
    length = _length(program)
    if length is None:
        return None
    if program.batch_size * length <= TOKENS and length <= LENGTH and compiled.mesh.ranks <= RANKS:
        return read_small(compiled, as_it_is(program, plan), weights, miniature=False)
    small = miniature_of(program, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = compile_plan(small.program, small.plan, verify=False)
    return read_small(made, small, _parts(weights, program), miniature=True)


def read_small(compiled: Compiled, small: Miniature, weights: Weights | None, *, miniature: bool) -> RankReading | None:
    """Read a compiled step of a few tokens as it is."""
    program = compiled.program
    length = _length(program)
    if length is None:
        return None
    alone = one_rank(program, compiled.plan)
    points = points_of(alone, program.batch_size, length)
    batch = _batch(small, program)
    targets = frozenset() if points.logits else frozenset(n for n in batch if _is_target(n))
    numbers = numbered(batch, program.batch_dims, program.batch_size, length, targets)
    reading = _Reading(alone, compiled, points, numbers, batch, program, weights)
    return reading.judged(miniature, small.notes)


def one_rank(program: StepProgram, plan: Plan) -> RankProgram:
    """The step compiled for one rank, whose nodes have the names that they have for many."""
    alone = replace(
        plan,
        mesh=Mesh((("replica", 1),)),
        batch=("replica",),
        microbatches=1,
        storage=Storage(),
        sequence=(),
        parameters=(),
        offload=(),
        prefetch=0,
        pipeline=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_step(program, alone, verify=False)


@dataclass(frozen=True)
class _Reading:
    alone: RankProgram
    compiled: Compiled
    points: Points
    numbers: Numbering
    batch: Mapping[str, Tensor]
    program: StepProgram
    weights: Weights | None

    def judged(self, miniature: bool, notes: tuple[str, ...]) -> RankReading:
        there = self.points.within(self.compiled)
        found = (self._run(self.alone, self.points.names()), self._run(self.compiled, there.names()))
        verdicts = [self._verdict(f, p.verdict_names) for f, p in zip(found, (self.points, there), strict=True)]
        findings = tuple(self._differences(found, there))
        outputs = sum(self._positions(found[0].whole(name)[0]).shape[:2].numel() for name in self.points.verdict_names)
        (alone, _), (verdict, leaks) = verdicts
        return RankReading(verdict, alone, leaks, self.compiled.mesh.ranks, outputs, miniature, findings, notes)

    def _run(self, compiled: Compiled, names: frozenset[str] | None) -> Found:
        numbers = self.numbers
        shadows = {
            name: numbers.shadow(name, self.batch[name], self.program.batch_dims[name] or 0)
            for name in (*numbers.names, *numbers.whole)
        }
        real = self.weights

        def weights(name: str, spec: TensorSpec) -> Tensor:
            return weights_of(name, spec) if real is None or name not in self.program.buffers else real(name, spec)

        return read_forward(compiled, weights, self.batch, shadows, numbers.free, names, real is not None)

    def _verdict(self, found: Found, names: tuple[str, ...]) -> tuple[Verdict, frozenset[str]]:
        leaks: set[str] = set()
        soft = unknown = False
        for name in names:
            for copy in found.whole(name):
                sets = self._positions(copy)
                unknown = unknown or bool(self.numbers.seen(sets)[..., list(self.numbers.free)].any())
                for hard in (True, False):
                    kinds = self._kinds(self.numbers.seen(sets, soft=not hard))
                    leaks |= kinds if hard else set()
                    soft = soft or bool(kinds)
        verdict = Verdict.LEAK if leaks else Verdict.UNKNOWN if unknown or not names else Verdict.CAUSAL
        return Verdict.ASSUMPTION if verdict is Verdict.CAUSAL and soft else verdict, frozenset(leaks)

    def _kinds(self, seen: Tensor) -> set[str]:
        """Of ``[rows, positions, bits]``: the kinds of what must not be seen and is."""
        made = set()
        for row in range(seen.shape[0]):
            if bool((seen[row] & self.numbers.forbidden("batch", row, 0)).any()):
                made.add("batch")
            for time in range(seen.shape[1]) if row in self.numbers.told else ():
                if bool((seen[row, time] & self.numbers.forbidden("future", row, time)).any()):
                    made.add("future")
        return made

    def _positions(self, sets: Tensor) -> Tensor:
        """``[rows, positions, words]`` of the sets of a value that has a dim of each, or one of both."""
        rows = self.numbers.rows
        if sets.shape[0] != rows or sets.dim() < 3:
            sets = sets.reshape(rows, sets.shape[0] // rows, *sets.shape[1:])
        return any_over(sets, range(2, sets.dim() - 1))

    def _differences(self, found: tuple[Found, Found], there: Points) -> list[Diagnostic]:
        """What outputs see of tokens and labels that they do not see on one device, or no longer; one of each kind."""
        weaker = groups_of(self.compiled.plan) > 1  # where groups stand for the batch, less of it is seen
        made: dict[str, Diagnostic] = {}
        for name, other in self.points.pairs(there):
            (whole, *_), copies = found[0].whole(name), found[1].whole(other) if other else []
            if not copies or any(c.numel() != whole.numel() for c in copies):
                made.setdefault("unread", unread_finding(name))
                continue
            for copy in copies:
                copy = copy.reshape(whole.shape)
                for kind, sets in (("more", copy & ~whole), ("less", whole & ~copy)):
                    if kind in made or (kind == "less" and weaker) or not bool(sets.any()):
                        continue
                    made[kind] = self._told(kind, sets, there)
        return list(made.values())

    def _told(self, kind: str, sets: Tensor, there: Points) -> Diagnostic:
        """One difference, with the first node in which there is one."""
        seen = self.numbers.seen(self._positions(sets))
        row, time, bit = seen.nonzero()[0].tolist()
        later = next((k for k in ("future", "batch") if self.numbers.forbidden(k, row, time)[bit]), "")
        first = first_node(
            self.alone,
            self.compiled,
            self._run(self.alone, None).whole,
            self._run(self.compiled, None).whole,
            there,
            less=kind == "less",
        )
        return difference_finding(Difference(kind, row, time, self.numbers.named(bit), later, first))


def _length(program: StepProgram) -> int | None:
    """Positions of a row: the second dim of token ids, or of vectors."""
    found = [
        spec.shape[dim + 1]
        for name, spec in sorted(program.batch.items(), key=lambda item: _is_target(item[0]))
        if (dim := program.batch_dims.get(name)) is not None
        and len(spec.shape) == dim + (3 if spec.dtype.is_floating_point else 2)
        and given_values(name, torch.empty(spec.shape, dtype=spec.dtype, device="meta"), dim + 1) is None
    ]
    return found[0] if found else None


def _is_target(name: str) -> bool:
    return "label" in name.lower() or "target" in name.lower()


def _batch(small: Miniature, program: StepProgram) -> dict[str, Tensor]:
    """A batch; of what is no tokens all positions count, from 0, in one document."""
    made = whole_batch_of(RandomSource(program, seed=0, high=dict(small.high)), program, 0)
    for name, value in made.items():
        given = given_values(name, value, (program.batch_dims.get(name) or 0) + 1)
        made[name] = value if given is None else given
    return made


def _parts(weights: Weights | None, program: StepProgram) -> Weights | None:
    """Of buffers, which are smaller in a miniature, the beginning in every dim."""
    if weights is None:
        return None
    real = weights

    def first(name: str, spec: TensorSpec) -> Tensor:
        whole = real(name, program.buffers[name])
        return whole[tuple(slice(n) for n in spec.shape)]

    return first
