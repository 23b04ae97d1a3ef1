"""Which op of one run is which of another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

import torch
from torch import Tensor

from meshwright.compiler.drift.step import Step


@dataclass(frozen=True)
class Pair:
    """The same op in two runs."""

    first: Step
    second: Step


@dataclass(frozen=True)
class Block:
    """Ops that one run has in place of those of another; one of the two may be empty."""

    first: tuple[Step, ...]
    second: tuple[Step, ...]


def align(first: list[Step], second: list[Step]) -> list[Pair | Block]:
    """Two runs side by side, in order: by module and op."""
    made: list[Pair | Block] = []
    for one in _aligned(first, second, lambda s: (s.module, s.name)):
        if isinstance(one, Block) and one.first and one.second:
            # what one run leaves to a module, and the other writes out
            made.extend(_aligned(list(one.first), list(one.second), lambda s: s.name))
        else:
            made.append(one)
    return made


def _aligned(first: list[Step], second: list[Step], name: Callable[[Step], Hashable]) -> Iterator[Pair | Block]:
    names = [[name(s) for s in steps] for steps in (first, second)]
    for tag, a, b, c, d in SequenceMatcher(None, names[0], names[1], autojunk=False).get_opcodes():
        if tag == "equal":
            yield from (Pair(x, y) for x, y in zip(first[a:b], second[c:d], strict=True))
        else:
            yield Block(tuple(first[a:b]), tuple(second[c:d]))


def pairs(aligned: Iterable[Pair | Block]) -> list[Pair]:
    """Those that both runs have."""
    return [one for one in aligned if isinstance(one, Pair)]


def apart(a: Tensor | None, b: Tensor | None) -> float | None:
    """The root mean square of the difference, relative to that of ``b``; None if they cannot be compared."""
    if a is None or b is None or a.shape != b.shape or not b.numel():
        return None
    if a.is_complex() or b.is_complex():
        a, b = torch.view_as_real(a.to(torch.complex128)), torch.view_as_real(b.to(torch.complex128))
    a, b = a.double(), b.double()
    fine = torch.isfinite(a) & torch.isfinite(b)
    if not torch.equal(torch.where(fine, 0.0, a), torch.where(fine, 0.0, b)) and not bool(
        (torch.isnan(a) == torch.isnan(b)).all()
    ):
        return float("inf")
    far = torch.where(fine, a - b, 0.0).square().mean().sqrt()
    size = torch.where(fine, b, 0.0).square().mean().sqrt()
    return float(far / size) if float(size) else float(far)
