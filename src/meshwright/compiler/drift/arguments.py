"""What two runs give to the same op: numbers, constants, shapes that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.compiler.drift.aligning import apart
from meshwright.compiler.drift.step import Step
from meshwright.compiler.numerics.error_model import UNIT


@dataclass(frozen=True)
class Unlike:
    """Both sides of what differs in the arguments of an op. ``form``: in which dims it works, or to which shape; else
    it is a number or a table."""

    training: str
    evaluation: str
    form: bool = False


def unlike(first: Step, second: Step) -> Unlike | None:
    """Both sides of what differs in the arguments of an op; None if nothing does, or what was given does already."""
    shapes = [[o.shape for o in s.operands] for s in (first, second)]
    for i, (a, b) in enumerate(zip(*shapes, strict=False)):
        constant = i in first.constants and i in second.constants
        if a != b and not constant:
            return None
    # a variant of the op may tell what it is to do by other arguments
    numbers = [[n for n in s.numbers if not isinstance(n, str)] for s in (first, second)]
    if first.op == second.op and not _alike(numbers[0], numbers[1]):
        floats = [[n for n in side if isinstance(n, float)] for side in numbers]
        form = _alike(*floats)
        return Unlike(f"{first.op} with {_told(numbers[0])}", f"with {_told(numbers[1])}", form)
    for i in sorted(first.constants.keys() & second.constants.keys()):
        a, b = first.constants[i], second.constants[i]
        far = apart(a, b)
        if a.shape != b.shape or (far or 0.0) > _resolution(a, b):
            return Unlike(f"{first.op} with the constant {_shown(a, b)}", _shown(b, a))
    if len(first.results) == len(second.results) and not first.chosen:
        for one, other in zip(first.results, second.results, strict=True):
            if one.shape != other.shape:
                return Unlike(f"{first.op} to shape {list(one.shape)}", f"to shape {list(other.shape)}", True)
    return None


def _alike(a: Sequence[object], b: Sequence[object]) -> bool:
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


def listed(steps: tuple[Step, ...]) -> str:
    """Ops by name, of many the first."""
    names = [s.op for s in steps]
    return "no such op" if not names else ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
