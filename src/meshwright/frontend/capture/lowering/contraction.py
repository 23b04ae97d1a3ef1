"""Every contraction becomes ``meshwright.einsum``; what else the op does (bias, scaling) is added around it."""

from __future__ import annotations

import string
from typing import Any

import torch
from torch import Tensor

from meshwright.frontend.capture.lowering.site import Site, lowers

aten = torch.ops.aten


def contract(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """The product of two tensors summed over the letters that the result lacks."""
    made: Tensor = torch.ops.meshwright.einsum(equation, a, b)
    return made


@lowers(aten.linear.default)
def linear(site: Site, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    kept = string.ascii_lowercase[: x.dim() - 1]
    if weight.dim() == 1:
        made = contract(f"{kept}z,z->{kept}", x, weight)
    else:
        made = contract(f"{kept}z,yz->{kept}y", x, weight)
    return made if bias is None else made + bias


@lowers(aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def matmul(site: Site | None, a: Tensor, b: Tensor) -> Tensor:
    row = "x" if a.dim() > 1 else ""
    column = "y" if b.dim() > 1 else ""
    batch_a = list(a.shape[:-2]) if row else []
    batch_b = list(b.shape[:-2]) if column else []
    rank = max(len(batch_a), len(batch_b))
    letters = string.ascii_lowercase[:rank]
    a, letters_a = _without_broadcast(a, batch_a, letters, _aligned(batch_b, rank))
    b, letters_b = _without_broadcast(b, batch_b, letters, _aligned(batch_a, rank))
    return contract(f"{letters_a}{row}z,{letters_b}z{column}->{letters}{row}{column}", a, b)


def _aligned(sizes: list[int], rank: int) -> list[int]:
    return [1] * (rank - len(sizes)) + sizes


def _without_broadcast(x: Tensor, sizes: list[int], letters: str, other: list[int]) -> tuple[Tensor, str]:
    """``x`` without those batch dims of size 1 that the other operand widens, and its batch letters."""
    first = len(letters) - len(sizes)
    kept = ""
    for at in reversed(range(len(sizes))):
        if sizes[at] == 1 and other[first + at] != 1:
            x = x.squeeze(at)
        else:
            kept = letters[first + at] + kept
    return x, kept


def _scaled(x: Tensor, factor: Any) -> Tensor:
    return x if factor == 1 else x * factor


@lowers(aten.addmm.default, aten.addmv.default, aten.baddbmm.default)
def addmm(site: Site | None, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    made = _scaled(matmul(site, a, b), alpha)
    return made if beta == 0 else made + _scaled(bias, beta)


@lowers(aten.einsum.default)
def einsum(site: Site, equation: str, operands: list[Tensor], *, path: Any = None) -> Tensor:
    inputs, out = _explicit(equation, operands)
    parts = [_diagonal(x, letters) for x, letters in zip(operands, inputs, strict=True)]
    x, letters = parts[0]
    for at in range(1, len(parts)):
        later = "".join(p[1] for p in parts[at + 1 :]) + out
        y, other = parts[at]
        x, letters = _pair(x, letters, y, other, later)
    gone = [at for at, letter in enumerate(letters) if letter not in out]
    if gone:
        x = x.sum(gone)
        letters = "".join(letter for letter in letters if letter in out)
    order = [letters.index(letter) for letter in out]
    return x if order == list(range(len(order))) else x.permute(order)


def _explicit(equation: str, operands: list[Tensor]) -> tuple[list[str], str]:
    """The operands' letters and the result's, the ellipsis spelled out and an implied result made explicit."""
    equation = equation.replace(" ", "")
    left, arrow, out = equation.partition("->")
    inputs = left.split(",")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    widest = max((x.dim() - len(i) + 3 for x, i in zip(operands, inputs, strict=True) if "..." in i), default=0)
    dots = "".join(free[:widest])
    if not arrow:
        once = sorted(c for c in set(left) - {",", "."} if left.count(c) == 1)
        out = ("..." if "..." in left else "") + "".join(once)
    full = []
    for x, letters in zip(operands, inputs, strict=True):
        count = x.dim() - len(letters) + 3 if "..." in letters else 0
        full.append(letters.replace("...", dots[widest - count :]))
    return full, out.replace("...", dots)


def _diagonal(x: Tensor, letters: str) -> tuple[Tensor, str]:
    for letter in letters:
        while letters.count(letter) > 1:
            first = letters.index(letter)
            second = letters.index(letter, first + 1)
            x = x.diagonal(dim1=first, dim2=second)
            letters = letters[:first] + letters[first + 1 : second] + letters[second + 1 :] + letter
    return x, letters


def _pair(x: Tensor, a: str, y: Tensor, b: str, later: str) -> tuple[Tensor, str]:
    """The contraction of two tensors, summing what neither the result nor a later operand needs."""
    sizes: dict[str, int] = {}
    for letters, tensor in ((a, x), (b, y)):
        for letter, size in zip(letters, tensor.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    x, a = _narrowed(x, a, b, sizes, later)
    y, b = _narrowed(y, b, a, sizes, later)
    out = "".join(dict.fromkeys(letter for letter in a + b if letter in later))
    return contract(f"{a},{b}->{out}", x, y), out


def _narrowed(x: Tensor, mine: str, other: str, sizes: dict[str, int], later: str) -> tuple[Tensor, str]:
    """Without dims of size 1 that the other operand widens, and with letters that nothing else has summed."""
    for letter in mine:
        at = mine.index(letter)
        if letter in other and x.shape[at] == 1 and sizes[letter] != 1:
            x, mine = x.squeeze(at), mine.replace(letter, "")
        elif letter not in other and letter not in later:
            x, mine = x.sum(at), mine.replace(letter, "")
    return x, mine


@lowers(aten.conv1d.default, aten.conv2d.default)
def patches(
    site: Site,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """A convolution whose windows do not overlap is a product over patches; others stay convolutions."""
    rank = weight.dim() - 2
    kernel = list(weight.shape[2:])
    plain = (
        _spread(stride, rank) == kernel
        and padding != "same"
        and _spread(0 if padding == "valid" else padding, rank) == [0] * rank
        and groups == 1
        and x.dim() == weight.dim()
        and all(size % k == 0 for size, k in zip(x.shape[2:], kernel, strict=True))
        and all(d == 1 or k == 1 for d, k in zip(_spread(dilation, rank), kernel, strict=True))
    )
    if not plain:
        convolution = torch.nn.functional.conv1d if rank == 1 else torch.nn.functional.conv2d
        return convolution(x, weight, bias, stride, padding, dilation, groups)
    sizes = list(x.shape[:2])
    for size, k in zip(x.shape[2:], kernel, strict=True):
        sizes += [size // k, k]
    places, inner = "uv"[:rank], "xy"[:rank]
    laid = "".join(p + i for p, i in zip(places, inner, strict=True))
    made = contract(f"bc{laid},oc{inner}->bo{places}", x.reshape(sizes), weight)
    return made if bias is None else made + bias.view(-1, *[1] * rank)


def _spread(value: Any, rank: int) -> list[int]:
    found = [value] if isinstance(value, int) else list(value)
    return found * rank if len(found) == 1 else found
