"""The train graph against the graph of evaluation: what differs between aligned ops, and which ops have no pair."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.drift.aligning import Block, Pair, align, apart
from meshwright.compiler.drift.difference import Difference, joined
from meshwright.compiler.drift.rounding import error_of_block, error_of_dtype, narrower
from meshwright.compiler.drift.step import Key, Step, Trace
from meshwright.compiler.drift.verdict import TOLERANCE
from meshwright.compiler.numerics.error_model import UNIT, one_rounding

REDUCTIONS = frozenset(
    "sum mean amax amin max min prod var var_mean std logsumexp _softmax _log_softmax softmax log_softmax cumsum "
    "linalg_vector_norm norm mm bmm addmm baddbmm native_layer_norm native_group_norm _fused_rms_norm topk sort".split()
)
"""Ops whose result is made of many elements."""


@dataclass(frozen=True)
class Modes:
    """The runs of both modes in the model's own dtypes, and in float64, whose values were kept."""

    training: Trace
    evaluation: Trace
    wide_training: dict[Key, Step]
    wide_evaluation: dict[Key, Step]

    def distance(self, pair: Pair) -> float | None:
        """How far the results of an op are apart in float64."""
        first, second = self.wide_training.get(pair.first.key), self.wide_evaluation.get(pair.second.key)
        return apart(first.value, second.value) if first and second else None


def differences(modes: Modes) -> tuple[list[Difference], list[str]]:
    """All of them in the order of the run, and what is told beside: what training draws by chance."""
    aligned = align(modes.training.computing(), modes.evaluation.computing())
    found: list[Difference] = []
    noise: list[str] = []
    region: list[Pair] = []
    for number, one in enumerate(aligned):
        if isinstance(one, Block):
            _block(modes, aligned, number, found, noise)
            continue
        if one.first.dtype != one.second.dtype and one.first.dtype and one.second.dtype:
            region.append(one)
        found.extend(_of_pair(modes, aligned, number, one))
    found = [*_of_dtypes(modes, region), *found]
    if not found:
        found.extend(_of_casts(modes))
    return joined(found), noise


def _of_pair(modes: Modes, aligned: list[Pair | Block], number: int, pair: Pair) -> list[Difference]:
    first, second = pair.first, pair.second
    flags = [[n for n in s.numbers if isinstance(n, bool)] for s in (first, second)]
    if "batch_norm" in first.name and (first.op != second.op or flags[0] != flags[1]):
        return [_structural(modes, aligned, number, "W0774", "the mean and variance of the batch", "running ones")]
    sides = _unlike(first, second)
    if sides is None:
        return []
    code = "E0772" if first.name.partition(".")[2] in REDUCTIONS else "E0773"
    return [_structural(modes, aligned, number, code, *sides)]


def _unlike(first: Step, second: Step) -> tuple[str, str] | None:
    """Both sides of what differs in the arguments of an op; None if nothing does, or what was given does already."""
    shapes = [[o.shape for o in s.operands] for s in (first, second)]
    for i, (a, b) in enumerate(zip(*shapes, strict=False)):
        constant = i in first.constants and i in second.constants
        if a != b and not constant:
            return None
    # a variant of the op may tell what it is to do by other arguments
    numbers = [[n for n in s.numbers if not isinstance(n, str)] for s in (first, second)]
    if first.op == second.op and not _alike(numbers[0], numbers[1]):
        return f"{first.op} with {_told(numbers[0])}", f"with {_told(numbers[1])}"
    for i in sorted(first.constants.keys() & second.constants.keys()):
        a, b = first.constants[i], second.constants[i]
        far = apart(a, b)
        if a.shape != b.shape or (far or 0.0) > _resolution(a, b):
            return f"{first.op} with the constant {_shown(a, b)}", _shown(b, a)
    if len(first.results) == len(second.results) and not first.chosen:
        for one, other in zip(first.results, second.results, strict=True):
            if one.shape != other.shape:
                return f"{first.op} to shape {list(one.shape)}", f"to shape {list(other.shape)}"
    return None


def _alike(a: list[object], b: list[object]) -> bool:
    return len(a) == len(b) and all(x == y or (x != x and y != y) for x, y in zip(a, b, strict=True))


def _resolution(a: Tensor, b: Tensor) -> float:
    """What two constants may be apart by their own rounding."""
    units = [
        UNIT["bf16"] if t.dtype == torch.bfloat16 else UNIT["f16"] if t.dtype == torch.float16 else 0 for t in (a, b)
    ]
    return 4 * max(*units, UNIT["f32"])


def _told(numbers: list[object]) -> str:
    return ", ".join(f"{n:g}" if isinstance(n, float) else str(n) for n in numbers) or "no numbers"


def _shown(value: Tensor, other: Tensor) -> str:
    """A constant: its shape, and elements from the first that differs."""
    flat = value.flatten()
    start = 0
    if value.shape == other.shape and value.dtype == other.dtype:
        unlike = (value != other).flatten().nonzero()
        start = int(unlike[0]) if unlike.numel() else 0
    shown = [f"{float(v):g}" if value.is_floating_point() else str(int(v)) for v in flat[start : start + 4]]
    return f"{list(value.shape)} {' '.join(shown)}" + (" ..." if flat.numel() > start + 4 else "")


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


def _block(modes: Modes, aligned: list[Pair | Block], number: int, found: list[Difference], noise: list[str]) -> None:
    block = aligned[number]
    assert isinstance(block, Block)
    if any(s.random for s in block.first) and not block.second:
        place = next(s.place for s in block.first if s.random)
        noise.append(f"what training draws by chance at {place.file}:{place.line}")
        return
    before, after = _around(modes, aligned, number)
    told = (_ops(block.first), _ops(block.second))
    if any(s.random for s in block.second):
        told = (told[0], f"{told[1]}, which draws by chance")
    place, module = _place(block)
    same = after is not None and after <= max(TOLERANCE, 2 * before)
    sums = any(s.name.partition(".")[2] in REDUCTIONS or "attention" in s.name for s in (*block.first, *block.second))
    key = _key_after(aligned, number, block)
    if same:
        error = error_of_block(block)
        code = "E0772" if sums else "E0771"
        why = "the same in float64; by rounding"
    else:
        error = math.sqrt(max(0.0, (after or 0.0) ** 2 - before**2))
        code, why = "E0771", "measured in float64"
    at = ((key, error),) if key else ()
    found.append(Difference(code, place, module, *told, at, why))


def _structural(
    modes: Modes, aligned: list[Pair | Block], number: int, code: str, training: str, evaluation: str
) -> Difference:
    """A difference that is none of rounding: its error is what it makes at the op in float64."""
    pair = aligned[number]
    assert isinstance(pair, Pair)
    before, _ = _around(modes, aligned, number)
    # a mask or an index cannot be disturbed: the first number that comes of it can
    later = ((p, modes.distance(p)) for p in aligned[number:] if isinstance(p, Pair) and p.second.dtype)
    carrier = next(((p, far) for p, far in later if far), None)
    at = ((carrier[0].second.key, math.sqrt(max(0.0, carrier[1] ** 2 - before**2))),) if carrier else ()
    why = "measured in float64"
    return Difference(code, pair.second.place, pair.second.module, training, evaluation, at, why)


def _around(modes: Modes, aligned: list[Pair | Block], number: int) -> tuple[float, float | None]:
    """How far apart the runs are before an entry and after it, at the nearest ops that can be compared."""
    back = (modes.distance(p) for p in reversed(aligned[:number]) if isinstance(p, Pair))
    on = (modes.distance(p) for p in aligned[number + 1 :] if isinstance(p, Pair))
    return next((d for d in back if d is not None), 0.0), next((d for d in on if d is not None), None)


def _key_after(aligned: list[Pair | Block], number: int, block: Block | None) -> Key | None:
    """The op of the evaluation whose result carries a difference: the last of its own, or else the next."""
    if block is not None and block.second:
        return block.second[-1].key
    return next((p.second.key for p in aligned[number + 1 :] if isinstance(p, Pair)), None)


def _place(block: Block) -> tuple[Origin, str]:
    step = (block.second or block.first)[0]
    return step.place, step.module


def _ops(steps: tuple[Step, ...]) -> str:
    names = [s.op for s in steps]
    return "no such op" if not names else ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
