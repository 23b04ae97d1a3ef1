"""``einsum``: every contraction of two tensors, so that sharding needs one rule for all of them.

``sum_of_squares``: of all elements, for the gradient norm, without the squares in memory.
``total``: the sum of many scalars, so that sums owed by each of them are paid in one message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compiler.graph.ops.library import differentiate, register


@lru_cache(maxsize=4096)
def parse(equation: str) -> tuple[str, str, str]:
    """``"bti,oi->bto"`` -> ``("bti", "oi", "bto")``. Raises ValueError when it is not of that form."""
    left, arrow, out = equation.partition("->")
    a, comma, b = left.partition(",")
    if not (arrow and comma) or not all(t == "" or t.isalpha() for t in (a, b, out)):
        raise ValueError(f"einsum: {equation!r} is not of the form 'ab,bc->ac'")
    if any(len(set(t)) != len(t) for t in (a, b, out)):
        raise ValueError(f"einsum: {equation!r} repeats a letter within one tensor")
    if not set(out) <= set(a) | set(b):
        raise ValueError(f"einsum: {equation!r} has a letter in the result that no operand has")
    return a, b, out


def sizes(equation: str, x: Tensor, y: Tensor) -> dict[str, int]:
    """The size of each letter. Raises ValueError where the operands disagree."""
    a, b, _ = parse(equation)
    if len(a) != x.dim() or len(b) != y.dim():
        raise ValueError(f"einsum: {equation!r} does not fit shapes {tuple(x.shape)} and {tuple(y.shape)}")
    found: dict[str, int] = dict(zip(a, x.shape, strict=True))
    for letter, size in zip(b, y.shape, strict=True):
        if found.setdefault(letter, size) != size:
            raise ValueError(f"einsum: {equation!r} does not fit shapes {tuple(x.shape)} and {tuple(y.shape)}")
    return found


@lru_cache(maxsize=4096)
def kernel_form(equation: str) -> str:
    """Which fast kernel computes the equation: ``linear``, ``matmul``, ``outer`` or ``general``."""
    a, b, out = parse(equation)
    if a and len(b) == 2 and a[-1] == b[1] and b[0] not in a and out == a[:-1] + b[0]:
        return "linear"  # bti,oi->bto
    if a and len(b) == 2 and a[-1] == b[0] and b[1] not in a and out == a[:-1] + b[1]:
        return "matmul"  # bti,io->bto
    shared = len(a) - 1
    if shared > 0 and len(b) == len(a) and a[:shared] == b[:shared] and len(out) == 2:
        if a[-1] != b[-1] and out == a[-1] + b[-1]:
            return "outer"  # bto,bti->oi, the gradient of a linear layer's weight
        if a[-1] != b[-1] and out == b[-1] + a[-1]:
            return "outer_swapped"
    if len(a) == len(b) == len(out) >= 3 and a[:-2] == b[:-2] == out[:-2]:
        batch = len(a) - 2
        if a[batch] == out[batch] and b[batch + 1] == out[batch + 1] and a[batch + 1] == b[batch]:
            return "matmul"  # bhts,bhsc->bhtc
    return "general"


def _linear(equation: str, x: Tensor, y: Tensor) -> Tensor:
    return F.linear(x, y)


def _matmul(equation: str, x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x, y)


def _outer(equation: str, x: Tensor, y: Tensor) -> Tensor:
    return torch.mm(*_matrices(x, y))


def _outer_swapped(equation: str, x: Tensor, y: Tensor) -> Tensor:
    return torch.mm(*_matrices(y, x))


def _matrices(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.reshape(-1, x.shape[-1]).t(), y.reshape(-1, y.shape[-1])


def _general(equation: str, x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum(equation, x, y).contiguous()


_FORMS: dict[str, Callable[[str, Tensor, Tensor], Tensor]] = {
    "linear": _linear,
    "matmul": _matmul,
    "outer": _outer,
    "outer_swapped": _outer_swapped,
    "general": _general,
}


def written(equation: str) -> Callable[[str, Tensor, Tensor], Tensor]:
    """The function that computes the equation, of operands that are known to fit: what the op does, without its
    dispatch and checks, which cost as much as a small product."""
    return _FORMS[kernel_form(equation)]


def is_outer(equation: str) -> bool:
    """Whether the equation is that of a weight's gradient, a product of two matrices."""
    return kernel_form(equation) in ("outer", "outer_swapped")


def factors(equation: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of such an equation, the two matrices whose product it is, of operands that are known to fit."""
    return _matrices(x, y) if kernel_form(equation) == "outer" else _matrices(y, x)


def _einsum(equation: str, x: Tensor, y: Tensor) -> Tensor:
    sizes(equation, x, y)
    return written(equation)(equation, x, y)


def _einsum_fake(equation: str, x: Tensor, y: Tensor) -> Tensor:
    found = sizes(equation, x, y)
    if x.dtype != y.dtype:
        raise ValueError(f"einsum: dtypes {x.dtype} and {y.dtype} differ")
    return x.new_empty([found[letter] for letter in parse(equation)[2]])


def gradient_equation(equation: str, operand: int) -> str:
    """The equation of an operand's gradient from ``(grad, other)``; the operand's letters that are
    in neither are left out, for the gradient is the same along them.

    For the second operand the order is ``(grad, x)`` as well.
    """
    a, b, out = parse(equation)
    mine, other = (a, b) if operand == 0 else (b, a)
    kept = "".join(letter for letter in mine if letter in out or letter in other)
    return f"{out},{other}->{kept}"


def _einsum_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    equation, x, y = inputs
    ctx.equation = equation
    ctx.shapes = (x.shape, y.shape)
    # each operand is needed for the gradient of the other only
    ctx.save_for_backward(x if y.requires_grad else None, y if x.requires_grad else None)


def _spread(grad: Tensor, mine: str, kept: str, shape: torch.Size) -> Tensor:
    """The gradient along the letters that the operand alone has: the same everywhere."""
    for at, letter in enumerate(mine):
        if letter not in kept:
            grad = grad.unsqueeze(at)
    return grad.expand(shape)


def _einsum_backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
    x, y = ctx.saved_tensors
    a, b, _ = parse(ctx.equation)
    grads: list[Tensor | None] = [None, None]
    for operand, (other, mine) in enumerate(((y, a), (x, b))):
        if not ctx.needs_input_grad[operand + 1]:
            continue
        equation = gradient_equation(ctx.equation, operand)
        found = torch.ops.meshwright.einsum(_weight_gradient_order(equation), *_ordered(equation, grad, other))
        kept = parse(equation)[2]
        grads[operand] = found if kept == mine else _spread(found, mine, kept, ctx.shapes[operand])
    return None, grads[0], grads[1]


def _weight_gradient_order(equation: str) -> str:
    """The same contraction with its operands in the order that has a fast kernel, if only one has."""
    a, b, out = parse(equation)
    swapped = f"{b},{a}->{out}"
    return swapped if kernel_form(equation) == "general" and kernel_form(swapped) != "general" else equation


def _ordered(equation: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x, y) if _weight_gradient_order(equation) == equation else (y, x)


register("einsum(str equation, Tensor a, Tensor b) -> Tensor", _einsum, _einsum_fake)
differentiate("einsum", _einsum_backward, _einsum_setup)


def _total(scalars: list[Tensor]) -> Tensor:
    wide = torch.float64 if any(s.dtype == torch.float64 for s in scalars) else torch.float32
    return torch.stack([s.to(wide) for s in scalars]).sum()


def _total_fake(scalars: list[Tensor]) -> Tensor:
    wide = torch.float64 if any(s.dtype == torch.float64 for s in scalars) else torch.float32
    return scalars[0].new_empty([], dtype=wide)


register("total(Tensor[] scalars) -> Tensor", _total, _total_fake)


def _sum_of_squares(x: Tensor) -> Tensor:
    flat = x.reshape(-1)  # a view where the memory allows it; one pass, no squares in memory
    return torch.dot(flat, flat)


register("sum_of_squares(Tensor x) -> Tensor", _sum_of_squares, lambda x: x.new_empty([]))
