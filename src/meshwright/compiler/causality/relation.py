"""One run with shadows at one size: which outputs may depend on which tokens, against what is allowed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.feed import Feed, Role, call_with
from meshwright.compiler.causality.interpreter import Interpreter, Notes
from meshwright.compiler.causality.memory import Memory
from meshwright.compiler.causality.outputs import required_outputs
from meshwright.compiler.causality.reading import Reading
from meshwright.compiler.causality.shadow import Shadow
from meshwright.compiler.causality.words import BITS, any_over, members, single, unpack, width_of
from meshwright.compiler.diagnostics import Origin

KINDS = ("future", "batch", "document")
MOST_UNKNOWN = 20
"""Ops without a rule that are told apart."""

MOST_BITS = 352
"""Beyond this many tokens, neighbours share a bit."""


@dataclass(frozen=True)
class Flag:
    """A dependency that is not allowed: position ``(row, time)`` on position ``(row, time)``."""

    kind: str
    output: tuple[int, int]
    source: tuple[int, int]
    hard: bool


@dataclass
class Relation:
    """What one run found."""

    rows: int
    length: int
    flags: dict[str, Flag] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    outputs: int = 0
    unknown: dict[str, Origin] = field(default_factory=dict)
    """Ops without a rule that an output depends on."""


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Attention in its maths form, no fused layers, no compiled functions."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")  # the user's own run tells them once; here are hundreds of runs
            for setting in (
                sdpa_kernel(SDPBackend.MATH),
                torch.backends.mkldnn.flags(enabled=False),
                torch.no_grad(),
                torch.compiler.set_stance("force_eager"),
            ):
                stack.enter_context(setting)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def relate(function: Callable[..., Any], feed: Feed, weights: frozenset[int], all_candidates: bool = True) -> Relation:
    """Run with shadows. ``weights`` are addresses of storages that are never known. Raises what the model raises, and
    Unfit where it returns nothing of tokens."""
    bits = _bits(feed)
    free = int(bits.max()) + 1 + feed.rows
    width = width_of(free + MOST_UNKNOWN)
    memory = Memory(width, weights)
    values = [leaf.value.clone() for leaf in feed.leaves]
    for leaf, value in zip(feed.leaves, values, strict=True):
        if leaf.role is Role.GIVEN:
            continue
        words = _words(feed, leaf.role, value, bits, width)
        memory.write(value, Shadow(torch.zeros(value.shape, dtype=torch.bool), words))
    interpreter = Interpreter(memory, all_candidates, range(free, free + MOST_UNKNOWN))
    with plainly(), Reading(interpreter), interpreter:
        returned = call_with(function, feed.filled(values))
    interpreter.notes.foreign = memory.foreign
    relation = Relation(feed.rows, feed.length, notes=interpreter.notes)
    for output in required_outputs(returned, feed):
        shadow = interpreter.listings.settle(memory.read(output.value), output.value)
        relation.outputs += 1
        if shadow.deps is not None:
            _flag(relation, feed, bits, _by_position(shadow.deps, feed), output.offset)
            met = members(any_over(shadow.deps.reshape(-1, width), (0,))[: width // 2])
            for name, bit in zip(interpreter.notes.unknown, range(free, free + MOST_UNKNOWN), strict=False):
                if bit in met:
                    relation.unknown[name] = interpreter.notes.unknown[name]
    return relation


def _bits(feed: Feed) -> Tensor:
    """The bit of each token, ``[rows, length]``."""
    grain = -(-feed.rows * feed.length // MOST_BITS)
    groups = -(-feed.length // grain)
    return torch.arange(feed.rows)[:, None] * groups + torch.arange(feed.length)[None] // grain


def _words(feed: Feed, role: Role, value: Tensor, bits: Tensor, width: int) -> Tensor:
    if role is Role.CONTEXT:
        assert feed.batch_dim is not None
        first = int(bits.max()) + 1
        table = torch.stack([single(first + row, width) for row in range(feed.rows)])
        shape = [feed.rows if d == feed.batch_dim else 1 for d in range(value.dim())]
        return table.reshape(*shape, width).expand(*value.shape, width)
    table = torch.stack([single(int(b), width) for b in bits.flatten()]).reshape(feed.rows, feed.length, width)
    if feed.batch_dim is None:
        table = table[0]
    elif feed.batch_dim > feed.time_dim:
        table = table.transpose(0, 1)
    shape = [s if d in (feed.batch_dim, feed.time_dim) else 1 for d, s in enumerate(value.shape)]
    return table.reshape(*shape, width).expand(*value.shape, width)


def _by_position(deps: Tensor, feed: Feed) -> Tensor:
    """``[rows, positions, words]``: the union over all else."""
    if feed.batch_dim is None:
        deps, dims = deps.unsqueeze(0), (0, feed.time_dim + 1)
    else:
        dims = (feed.batch_dim, feed.time_dim)
    rest = [d for d in range(deps.dim() - 1) if d not in dims]
    joined = any_over(deps, rest)
    return joined if dims[0] < dims[1] else joined.transpose(0, 1)


def _flag(relation: Relation, feed: Feed, bits: Tensor, words: Tensor, offset: int) -> None:
    """Keep one dependency of each kind that is not allowed, a hard one if there is any."""
    half = words.shape[-1] // 2
    for hard, plane in ((True, words[..., half:]), (False, words[..., :half])):
        seen = unpack(plane)[..., : half * BITS] > 0  # [rows, positions, bits]
        positions = seen.shape[1]
        time = torch.arange(positions) - offset
        valid = (time >= 0) & (time < feed.length)
        for kind in KINDS:
            known = relation.flags.get(kind)
            if known is not None and (known.hard or not hard):
                continue
            for row in range(feed.rows):
                found = _first(feed, bits, seen[row], time, valid, row, kind)
                if found is not None:
                    relation.flags[kind] = Flag(kind, (row, found[0]), found[1], hard)
                    break


def _first(
    feed: Feed, bits: Tensor, seen: Tensor, time: Tensor, valid: Tensor, row: int, kind: str
) -> tuple[int, tuple[int, int]] | None:
    sources = seen[:, bits.flatten()].reshape(-1, feed.rows, feed.length)  # [positions, rows, length]
    if kind == "batch":
        forbidden = torch.arange(feed.rows)[None, :, None] != row
        context = seen[:, int(bits.max()) + 1 :][:, : feed.rows].clone()
        context[:, row] = False
        if bool((context & valid[:, None]).any()):
            place = (context & valid[:, None]).nonzero()[0]
            return int(time[place[0]]), (int(place[1]), 0)
    else:
        mine = (torch.arange(feed.rows) == row)[None, :, None]
        at = time.clamp(0, feed.length - 1)
        if kind == "future":
            later = bits[row][None, :] > bits[row][at][:, None]
            forbidden = mine & later[:, None, :]
        elif feed.segments is None:
            return None
        else:
            other = feed.segments[row][None, :] != feed.segments[row][at][:, None]
            apart = bits[row][None, :] != bits[row][at][:, None]
            forbidden = mine & (other & apart)[:, None, :]
    found = (sources & forbidden & valid[:, None, None]).nonzero()
    if not found.shape[0]:
        return None
    place = found[0]
    return int(time[place[0]]), (int(place[1]), int(place[2]))
