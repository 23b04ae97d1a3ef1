"""The train graph against the graph of evaluation: what differs between aligned ops, and which ops have no pair."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.drift.aligning import Block, Pair, align, apart
from meshwright.compiler.drift.arguments import listed, unlike
from meshwright.compiler.drift.chance import Noise, noise_of
from meshwright.compiler.drift.difference import Difference, joined
from meshwright.compiler.drift.rejoining import after
from meshwright.compiler.drift.rounding import error_of_block, error_of_dtype, error_of_step, narrower
from meshwright.compiler.drift.step import Key, Step, Trace
from meshwright.compiler.drift.verdict import TOLERANCE
from meshwright.compiler.numerics.error_model import UNIT, one_rounding

REDUCTIONS = frozenset(
    "sum mean amax amin max min prod var var_mean std logsumexp _softmax _log_softmax softmax log_softmax cumsum "
    "linalg_vector_norm norm mm bmm addmm baddbmm native_layer_norm native_group_norm _fused_rms_norm".split()
)
"""Ops whose result is made of many elements."""


@dataclass(frozen=True)
class Modes:
    """The runs of both modes in the model's own dtypes, and in float64, whose values were kept."""

    training: Trace
    evaluation: Trace
    wide_training: dict[Key, Step]
    wide_evaluation: dict[Key, Step]
    end: float
    """How far the outputs are apart in float64."""

    def distance(self, pair: Pair) -> float | None:
        """How far the results of an op are apart in float64."""
        first, second = self.wide_training.get(pair.first.key), self.wide_evaluation.get(pair.second.key)
        return apart(first.value, second.value) if first and second else None


def differences(modes: Modes) -> tuple[list[Difference], list[str], list[Noise]]:
    """All of them in the order of the run, and what is told beside: what training draws by chance."""
    aligned = align(modes.training.computing(), modes.evaluation.computing())
    found: list[Difference] = []
    noise: list[str] = []
    drawn: set[int] = set()
    noises: list[Noise] = []
    region: list[Pair] = []
    for number, one in enumerate(aligned):
        if isinstance(one, Block):
            chance = _by_chance(one, drawn)
            if chance is not None:
                noises.extend(filter(None, [noise_of(one, modes.training, aligned, drawn)]))
                noise.append(f"what training draws by chance at {chance.place.file}:{chance.place.line}")
            else:
                _block(modes, aligned, number, found)
            continue
        if one.first.dtype != one.second.dtype and one.first.dtype and one.second.dtype:
            region.append(one)
        found.extend(_of_pair(modes, aligned, number, one))
    found = [*_of_dtypes(modes, region), *found]
    if not found:
        found.extend(_of_casts(modes))
    return joined(found), noise, noises


def _of_pair(modes: Modes, aligned: list[Pair | Block], number: int, pair: Pair) -> list[Difference]:
    first, second = pair.first, pair.second
    flags = [[n for n in s.numbers if isinstance(n, bool)] for s in (first, second)]
    if "batch_norm" in first.name and (first.op != second.op or flags[0] != flags[1]):
        return [_structural(modes, aligned, number, "W0774", "the mean and variance of the batch", "running ones")]
    sides = unlike(first, second)
    if sides is None:
        return []
    code = "E0772" if _is_reduction(first) and sides.form else "E0773"
    return [_structural(modes, aligned, number, code, sides.training, sides.evaluation)]


def _of_dtypes(modes: Modes, region: list[Pair]) -> list[Difference]:
    made = []
    for pair in region:
        error = error_of_dtype(pair, modes.training, modes.evaluation)
        operands = [", ".join(o.dtype for o in s.operands) for s in (pair.first, pair.second)]
        low = narrower(pair.first.dtype, pair.second.dtype)
        made.append(
            Difference(
                "E0770",
                pair.second.place,
                pair.second.module,
                f"{pair.first.op} of {operands[0]} to {pair.first.dtype}",
                f"of {operands[1]} to {pair.second.dtype}",
                ((pair.second.key, error),),
                f"rounded to {low}" if error else f"rounded to {low} once either way",
            )
        )
    return made


def _of_casts(modes: Modes) -> list[Difference]:
    """Casts to fewer digits that one of the runs alone has, where nothing else differs."""
    narrowing = []
    for trace in (modes.training, modes.evaluation):
        live = [s for s in trace.steps if s.cast and s.active and s.number in trace.live]
        narrowing.append([s for s in live if s.dtype and narrower(s.dtype, s.operands[-1].dtype) == s.dtype])
    sides = [[(s.place.file, s.place.line, s.dtype) for s in steps] for steps in narrowing]
    made = []
    for which, steps in enumerate(narrowing):
        for step, own in zip(steps, sides[which], strict=True):
            if own in sides[1 - which] or step.dtype == step.operands[-1].dtype:
                continue
            trace = modes.evaluation if which else modes.training
            ends = [s for s in trace.computing() if s.number in step.sources][-1:]
            told = f"rounded to {step.dtype}"
            error = one_rounding(step.dtype) if step.dtype in UNIT else 0.0
            at = tuple((s.key, error) for s in ends)
            both = ("not rounded", told) if which else (told, "not rounded")
            made.append(Difference("E0770", step.place, ends[0].module if ends else "", *both, at, told))
    return made


def _by_chance(block: Block, drawn: set[int]) -> Step | None:
    """The op of training that draws, or is given what was drawn, where evaluation has none in its place."""
    if block.second:
        return None
    found = next((s for s in block.first if s.random or s.sources & drawn), None)
    if found is not None:
        drawn.update(s.number for s in block.first)
    return found


def _block(modes: Modes, aligned: list[Pair | Block], number: int, found: list[Difference]) -> None:
    block = aligned[number]
    assert isinstance(block, Block)
    ours, theirs = modes.training.fixed(), modes.evaluation.fixed()
    extra = [s for s in block.first if (s.name, s.place.file, s.place.line) not in theirs]
    extra += [s for s in block.second if (s.name, s.place.file, s.place.line) not in ours]
    if not extra:
        return  # the other run has them as well, of constants: running statistics
    around = _around(modes, aligned, number)
    before, behind = around.before, around.after
    told = (listed(block.first), listed(block.second))
    if any(s.random for s in block.second):
        told = (told[0], f"{told[1]}, which draws by chance")
    place, module = _place(block)
    if not (block.first and block.second) and before == behind == 0 and not any(s.random for s in block.second):
        found.append(Difference("W0785", place, module, *told, ()))
        return
    same = behind <= max(TOLERANCE, 2 * before) or around.joined <= TOLERANCE
    near = [block] if behind <= TOLERANCE else [one for one in aligned if isinstance(one, Block)]
    sums = any(_is_reduction(s) or "attention" in s.name for b in near for s in (*b.first, *b.second))
    key = _key_after(aligned, number, block)
    if same:
        error = error_of_block(block)
        code = "E0772" if sums else "E0771"
        why = "the same in float64; by rounding"
    else:
        error = math.sqrt(max(0.0, behind**2 - before**2))
        code, why = "E0771", "measured in float64"
    if any(s.number in modes.training.statistics and _is_reduction(s) for s in block.first):
        code = "W0774"
    at = ((key, error),) if key else ()
    found.append(Difference(code, place, module, *told, at, why))


def _structural(
    modes: Modes, aligned: list[Pair | Block], number: int, code: str, training: str, evaluation: str
) -> Difference:
    """A difference that is none of rounding: its error is what it makes at the op in float64."""
    pair = aligned[number]
    assert isinstance(pair, Pair)
    around = _around(modes, aligned, number)
    why = "measured in float64"
    # a mask or an index cannot be disturbed: the first number that comes of it can
    later = ((p, modes.distance(p)) for p in aligned[number:] if isinstance(p, Pair) and p.second.dtype)
    carrier = next(((p, far) for p, far in later if far), None)
    at = ((carrier[0].second.key, math.sqrt(max(0.0, carrier[1] ** 2 - around.before**2))),) if carrier else ()
    if around.joined <= TOLERANCE:
        at, why = ((pair.second.key, error_of_step(pair.second)),), "the same in float64; by rounding"
    return Difference(code, pair.second.place, pair.second.module, training, evaluation, at, why)


@dataclass(frozen=True)
class _Around:
    """How far apart the runs are about an entry, at the nearest ops that can be compared."""

    before: float
    after: float
    """At the first op that it leads to."""
    joined: float
    """Where they are nearest, of the ops that all goes through which the entry leads to."""


def _around(modes: Modes, aligned: list[Pair | Block], number: int) -> _Around:
    back = (modes.distance(p) for p in reversed(aligned[:number]) if isinstance(p, Pair))
    led, through = after(aligned, number, modes.training, modes.evaluation)
    on = (modes.distance(p) for p in led)
    joined = [d for d in (modes.distance(p) for p in through) if d is not None]
    return _Around(
        next((d for d in back if d is not None), 0.0),
        next((d for d in on if d is not None), modes.end),
        min([*joined, modes.end]),
    )


def _key_after(aligned: list[Pair | Block], number: int, block: Block | None) -> Key | None:
    """The op of the evaluation whose result carries a difference: the last of its own, or else the next."""
    if block is not None and block.second:
        return block.second[-1].key
    return next((p.second.key for p in aligned[number + 1 :] if isinstance(p, Pair)), None)


def _is_reduction(step: Step) -> bool:
    return step.name.partition(".")[2] in REDUCTIONS


def _place(block: Block) -> tuple[Origin, str]:
    step = (block.second or block.first)[0]
    return step.place, step.module
