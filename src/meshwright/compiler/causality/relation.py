"""One run with shadows at one size: which outputs may depend on which tokens, against what is allowed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
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

MOST_BITS = 1024
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
    pairs: dict[tuple[str, bool], Tensor] = field(default_factory=dict)
    """By kind and whether hard: ``[rows, positions, rows, positions]``, output first, where one is not allowed."""
    notes: Notes = field(default_factory=Notes)
    outputs: int = 0
    unknown: dict[str, Origin] = field(default_factory=dict)
    """Ops without a rule that an output depends on."""

    alive: list[Tensor] = field(default_factory=list)
    """Of each saturating op in order: the elements that did not stand on a plateau."""

    @property
    def flags(self) -> dict[str, Flag]:
        """The first dependency of each kind, a hard one if there is any."""
        made = {}
        for kind in KINDS:
            hard = (kind, True) in self.pairs
            if (kind, hard) in self.pairs:
                a, b, c, d = self.pairs[kind, hard].nonzero()[0].tolist()
                made[kind] = Flag(kind, (a, b), (c, d), hard)
        return made


@contextlib.contextmanager
def plainly(grad: bool = False) -> Iterator[None]:
    """Attention in its maths form, no fused layers, no compiled functions, gradients recorded or not."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")  # the user's own run tells them once; here are hundreds of runs
            for setting in (
                sdpa_kernel(SDPBackend.MATH),
                torch.backends.mkldnn.flags(enabled=False),
                torch.set_grad_enabled(grad),
                torch.compiler.set_stance("force_eager"),
            ):
                stack.enter_context(setting)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def relate(
    function: Callable[..., Any],
    feed: Feed,
    weights: frozenset[int],
    all_candidates: bool = True,
    *,
    grad: bool = False,
    dead: Sequence[Tensor] = (),
) -> Relation:
    """Run with shadows. ``weights`` are addresses of storages that are never known. Raises what the model raises, and
    Unfit where it returns nothing of tokens.

    ``dead`` says for each saturating op in order which of its elements are taken to depend on nothing.
    """
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
    interpreter.dead = dead
    with plainly(grad), Reading(interpreter), interpreter:
        returned = call_with(function, feed.filled(values))
    interpreter.notes.foreign = memory.foreign
    relation = Relation(feed.rows, feed.length, notes=interpreter.notes, alive=interpreter.alive)
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
    """Keep the dependencies that are not allowed."""
    half = words.shape[-1] // 2
    time = torch.arange(words.shape[1]) - offset
    valid = (time >= 0) & (time < feed.length)
    at = time[valid]
    own_row = torch.eye(feed.rows, dtype=torch.bool)
    for hard, plane in ((True, words[..., half:]), (False, words[..., :half])):
        seen = unpack(plane[:, valid])[..., : half * BITS] > 0  # [rows, positions, bits]
        sources = seen[:, :, bits.flatten()].reshape(feed.rows, -1, feed.rows, feed.length)
        context = seen[:, :, int(bits.max()) + 1 :][:, :, : feed.rows] & ~own_row[:, None, :]
        for kind in KINDS:
            found = sources & _forbidden(feed, bits, at, own_row, kind)
            if kind == "batch":
                found = found | context[..., None]
            if bool(found.any()):
                size = (feed.rows, feed.length, feed.rows, feed.length)
                relation.pairs.setdefault((kind, hard), torch.zeros(size, dtype=torch.bool))[:, at] |= found


def _forbidden(feed: Feed, bits: Tensor, at: Tensor, own_row: Tensor, kind: str) -> Tensor:
    """``[rows, positions, rows, length]``, or what spreads to it: what an output must not see."""
    if kind == "batch":
        return ~own_row[:, None, :, None]
    if kind == "future":
        apart = bits[:, None, :] > bits[:, at][:, :, None]
    elif feed.segments is None:
        apart = torch.zeros((feed.rows, at.numel(), feed.length), dtype=torch.bool)
    else:
        other = feed.segments[:, None, :] != feed.segments[:, at][:, :, None]
        apart = other & (bits[:, None, :] != bits[:, at][:, :, None])
    return own_row[:, None, :, None] & apart[:, :, None, :]
