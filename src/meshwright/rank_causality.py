"""Does what was compiled let an output see more, or less, than one device does? Read off the ranks' own programs.

All ranks run forward under the analysis of :mod:`meshwright.compiler.causality`, and so does the step compiled for one
rank. What each logit and each loss of a token depends on, of tokens and of labels, must be the same: a mask that is cut
at the wrong place, a shard that is told another position, a label that is not the neighbour's makes it differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from meshwright.compiler.causality.findings import contradictions
from meshwright.compiler.causality.rank_findings import stopped_finding
from meshwright.compiler.causality.rank_reading import RankReading
from meshwright.compiler.causality.ranks import Side, differences, not_known, sets_of, verdict_of
from meshwright.compiler.causality.readings import Points, points_of
from meshwright.compiler.causality.second.opinion import Opinion
from meshwright.compiler.causality.tokens import Numbering, given_values, numbered
from meshwright.compiler.causality.verdict import Verdict
from meshwright.compiler.diagnostics import InternalError, MeshwrightError
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
from meshwright.runtime.intervals import read_intervals
from meshwright.runtime.materialize import Weights
from meshwright.runtime.shadows import Found, read_forward
from meshwright.verification import whole_batch_of

TOKENS, LENGTH, RANKS = 512, 64, 16
"""Tokens of a batch, positions of a row, and ranks up to which a program is read as it is; of others the miniature."""


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
    batch = _batch(small, program)
    here, numbers = _alone(program, compiled.plan, batch, length, weights)
    points = here.points
    try:
        ranks = _side(compiled, points.within(compiled), numbers, batch, weights)
    except (MeshwrightError, InternalError) as fault:  # a program that was changed may stop anywhere
        stopped = (stopped_finding(str(fault)),)
        own, count = verdict_of(here, numbers)[0], compiled.mesh.ranks
        return RankReading(Verdict.UNKNOWN, own, frozenset(), count, 0, miniature, stopped, small.notes)
    verdict, leaks = verdict_of(ranks, numbers)
    second = _second(compiled, ranks.points, numbers, batch, weights)
    return RankReading(
        verdict,
        verdict_of(here, numbers)[0],
        leaks,
        compiled.mesh.ranks,
        sum(sets_of(here.of(name)[0], numbers).shape[:2].numel() for name in points.verdict_names),
        miniature,
        # where groups stand for the batch, less of it is seen
        not_known(here, ranks, numbers)
        + differences(here, ranks, numbers, less=groups_of(compiled.plan) == 1)
        + contradictions(leaks, second, " of the ranks"),
        small.notes,
        second,
    )


def _second(
    compiled: Compiled, points: Points, numbers: Numbering, batch: Mapping[str, Tensor], real: Weights | None
) -> Opinion:
    """The same program, read by intervals."""
    roots = [name for name in points.verdict_names if name]
    try:
        return read_intervals(compiled, _weights(compiled.program, real), batch, numbers, roots)
    except (MeshwrightError, InternalError) as fault:  # a program that was changed may stop anywhere
        first = next(iter(str(fault).splitlines()), "")
        return Opinion("not shown", reason=f"the ranks' program could not be read: {first}")


def leaks_alone(program: StepProgram, plan: Plan, weights: Weights | None) -> frozenset[str]:
    """What leaks on one device, by the analysis with which ranks are read: of a step as it is or, if it is large, of
    its miniature under a plan. Raises MeshwrightError for a plan that does not fit the step."""
    length = _length(program)
    if length is None:
        return frozenset()
    small = as_it_is(program, plan)
    if program.batch_size * length > TOKENS or length > LENGTH:
        small, weights = miniature_of(program, plan), _parts(weights, program)
        length = _length(small.program)
        assert length is not None
    here, numbers = _alone(small.program, small.plan, _batch(small, small.program), length, weights)
    return verdict_of(here, numbers)[1]


def _alone(
    program: StepProgram, plan: Plan, batch: Mapping[str, Tensor], length: int, weights: Weights | None
) -> tuple[Side, Numbering]:
    alone = one_rank(program, plan)
    points = points_of(alone, program.batch_size, length)
    targets = frozenset() if points.logits else frozenset(n for n in batch if _is_target(n))
    numbers = numbered(batch, program.batch_dims, program.batch_size, length, targets)
    return _side(alone, points, numbers, batch, weights), numbers


def _side(
    compiled: Compiled, points: Points, numbers: Numbering, batch: Mapping[str, Tensor], weights: Weights | None
) -> Side:
    found = _run(compiled, points, numbers, batch, weights)
    return Side(compiled, points, found.whole, found.notes.unknown)


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


def _run(
    compiled: Compiled, points: Points, numbers: Numbering, batch: Mapping[str, Tensor], real: Weights | None
) -> Found:
    """What all that leads to the points depends on."""
    program = compiled.program
    shadows = {
        name: numbers.shadow(name, batch[name], program.batch_dims[name] or 0)
        for name in (*numbers.names, *numbers.whole)
    }
    weights = _weights(program, real)
    return read_forward(compiled, weights, batch, shadows, numbers.free, points.names(), real is not None)


def _weights(program: StepProgram, real: Weights | None) -> Weights:
    """The values of buffers, if they are known; of weights any will do."""

    def weights(name: str, spec: TensorSpec) -> Tensor:
        return weights_of(name, spec) if real is None or name not in program.buffers else real(name, spec)

    return weights


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
