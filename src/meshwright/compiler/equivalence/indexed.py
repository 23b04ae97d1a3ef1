"""Ops whose values depend on where an element stands in the whole tensor (dropout): is a shard told the right place?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.compiler.equivalence.layout import Layout, Mismatch
from meshwright.compiler.equivalence.written import Place, Written
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.rules.rule import OpCall

Part = tuple[int, Mapping[str, int], int]
"""A stretch of positions: the true size, by axis how far a step goes, and the local length."""


def same_elements(call: OpCall, made: Written, x: Layout, mesh: Mesh) -> None:
    """``(x, seed, p, site, sizes, offsets)``: Raises Mismatch unless it draws for exactly the shard's elements."""
    if made.name != call.name:
        raise Mismatch(f"{made.name} is called", made.name, call.name)
    for what, is_, must in zip(("probability", "site"), made.args[2:4], call.args[2:4], strict=True):
        if is_ != must:
            raise Mismatch(f"dropout has another {what}", str(is_), str(must))
    sizes: tuple[Any, ...]
    offsets: tuple[Any, ...]
    sizes, offsets = (a if isinstance(a, tuple) else () for a in made.args[4:6])
    right = _merged([(s.size, dict(zip(s.axes, s.chunks(mesh), strict=True)), s.local(mesh)) for s in x.segments])
    lengths: Sequence[Any] = offsets[len(sizes) :] or x.shape
    if not sizes:
        sizes, offsets = x.shape, (0,) * len(x.shape)
        lengths = x.shape
    found = _merged([(int(n), _steps(o), int(k)) for n, o, k in zip(sizes, offsets, lengths, strict=False)])
    if found != right or len(lengths) != len(sizes):
        message = "the mask of dropout is drawn for other elements than those of the shard"
        raise Mismatch(message, _told(found), _told(right))


def _steps(offset: Any) -> dict[str, int]:
    return dict(offset.strides) if isinstance(offset, Place) else {"": offset} if offset else {}


def _merged(parts: Sequence[Part]) -> list[Part]:
    found: list[Part] = []
    for size, steps, length in parts:
        if size == 1 and not steps:
            continue
        if found and not steps and size == length:
            major, before, count = found[-1]
            found[-1] = (major * size, {a: n * size for a, n in before.items()}, count * size)
        elif found and found[-1][2] == 1:
            major, before, _ = found[-1]
            found[-1] = (major * size, {a: n * size for a, n in before.items()} | dict(steps), length)
        else:
            found.append((size, dict(steps), length))
    return found


def _told(parts: Sequence[Part]) -> str:
    def one(part: Part) -> str:
        where = " + ".join(f"{axis} * {step}" for axis, step in part[1].items()) or "0"
        return f"{part[2]} of {part[0]} from {where}"

    return ", ".join(map(one, parts)) or "the whole tensor"
