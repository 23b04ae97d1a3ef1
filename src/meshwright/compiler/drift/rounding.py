"""What the rounding of ops costs, by the error model of ``compiler/numerics``."""

from __future__ import annotations

import math

from meshwright.compiler.drift.aligning import Block, Pair
from meshwright.compiler.drift.step import Step, Trace
from meshwright.compiler.numerics.accumulators import keeps_half
from meshwright.compiler.numerics.error_model import UNIT, Order, error_of_sum, one_rounding


def narrower(a: str, b: str) -> str:
    """The dtype of fewer digits."""
    return a if UNIT.get(a, 0.0) >= UNIT.get(b, 0.0) else b


def addends(step: Step) -> int:
    """How many elements of operands go into one of the result: 1 where nothing is joined."""
    made = max(1, math.prod(step.results[0].shape)) if step.results else 1
    name = step.name.partition(".")[2]
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return step.operands[-1].shape[-2]
    if "softmax" in name or "layer_norm" in name or "rms_norm" in name or name == "cumsum":
        return step.operands[0].shape[-1] if step.operands and step.operands[0].shape else 1
    if "attention" in name and len(step.operands) > 1:
        return step.operands[1].shape[-2]
    sizes = [math.prod(o.shape) for o in step.operands if o.floating]
    return max(1, sizes[0] // made) if len(sizes) == 1 else 1


def error_of_step(step: Step) -> float:
    """The rounding of an op's result, and of its partial sums in the dtype that they are kept in."""
    if step.dtype not in UNIT:
        return 0.0
    count = addends(step)
    halves = step.dtype in ("bf16", "f16")
    inner = step.dtype if not halves or keeps_half(step.op, step.dtype, "cpu") else "f32"
    # the kernels of this machine add in lanes and blocks, which is nearer to a tree
    order: Order = "ring" if halves and inner == step.dtype else "tree"
    return math.hypot(one_rounding(step.dtype), error_of_sum(inner, count, order=order))


def error_of_dtype(pair: Pair, training: Trace, evaluation: Trace) -> float:
    """What an op costs in the narrower of two dtypes, where the other one is exact beside it.

    Its result is rounded, unless the wider result is rounded as well before anything else uses it, and so is each
    operand that is cast for it.
    """
    low = narrower(pair.first.dtype, pair.second.dtype)
    narrow, wide = (pair.first, pair.second) if pair.first.dtype == low else (pair.second, pair.first)
    mine, other = (training, evaluation) if narrow is pair.first else (evaluation, training)
    if low not in UNIT:
        return 0.0
    casts = [s for s in (mine.steps[n] for n in narrow.sources) if s.cast and s.dtype == low]
    given = [s.operands[-1].dtype for s in casts if s.operands]
    rounded = [dtype for dtype in given if dtype != low and narrower(dtype, low) == low]
    users = other.users.get(wide.number, [])
    once = bool(users) and all(s.cast and s.dtype == low for s in users)
    result = error_of_step(narrow)
    if once:
        result = math.sqrt(max(0.0, result**2 - one_rounding(low) ** 2))
        result = 0.0 if result < one_rounding("f32") * 8 else result
    return math.hypot(result, one_rounding(low) * math.sqrt(len(rounded)))


def error_of_block(block: Block) -> float:
    """What two ways to compute the same are apart: all their roundings."""
    return math.sqrt(sum(error_of_step(s) ** 2 for s in (*block.first, *block.second)))
