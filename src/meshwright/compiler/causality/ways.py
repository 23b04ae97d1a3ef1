"""The ways in which a model computes: in float64 as it does in its own precision? while gradients are recorded too?

A model may take another path by dtype or by gradient mode (a fused kernel for half precision, checkpointing in
training). Runs on one path say nothing of the other, so paths are told by their ops and by what they compute.
Also seen here: numbers that come into a run from elsewhere (numpy, lists, another thread) and change with the tokens.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import tensors_in
from meshwright.compiler.causality.comparing import distances
from meshwright.compiler.causality.edits import Base, base_values
from meshwright.compiler.causality.feed import Feed
from meshwright.compiler.causality.places import user_place
from meshwright.compiler.causality.running import Ran, Subject
from meshwright.compiler.causality.state import first_change
from meshwright.compiler.causality.widening import NARROW
from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.graph.adapter import OpOverload, TorchDispatchMode, overload_name

_SILENT = ("aten._to_copy", "aten.detach", "aten.alias", "aten.lift_fresh", "aten.clone", "aten.view", "aten._unsafe")
"""Ops that differ between modes that compute the same."""

_APART = {torch.float32: 1e-2, torch.float16: 0.05, torch.bfloat16: 0.1}
"""How far outputs are apart that are not the same function rounded, of the largest element."""

_SMALL = 65_536
"""Elements up to which a tensor that comes from elsewhere is kept to be compared."""


@dataclass
class _Path(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it without types
    """The ops of a run, and the tensors that no op of it made."""

    subject: Subject
    known: set[int] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
    strangers: list[tuple[Origin, Tensor]] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    thread: Origin | None = None
    """Where a thread was begun."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without types

    def __hash__(self) -> int:
        return id(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in [*tensors_in(list(args)), *tensors_in(list((kwargs or {}).values()))]:
            address = value.untyped_storage().data_ptr()
            if address and address not in self.known and address not in self.subject.given:
                self.known.add(address)
                self.held.append(value)
                if value.numel() <= _SMALL:
                    self.strangers.append((user_place(), value.detach().clone()))
        made = func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload):
            name = overload_name(func)
            if not name.startswith(_SILENT):
                self.names.append(name)
        for out in tensors_in(made):
            self.known.add(out.untyped_storage().data_ptr())
            self.held.append(out)  # its address is not another's while the run lasts
        return made


@dataclass(frozen=True)
class Ways:
    """What was found of a model at one size."""

    by_dtype: bool = False
    """Whether float64 takes another path than the model's own precision."""
    by_grad: bool = False
    """Whether recorded gradients take another path."""
    leaves_grad: bool = False
    """Whether it does so only where inputs ask for gradients."""
    strangers: Origin | None = None
    """Where a thread begins, or a tensor is met that changes with the tokens and that no op has made."""
    lasting: str | None = None
    """What a call leaves behind that changes with the tokens or from call to call."""


def ways_of(subject: Subject, feed: Feed, vocabulary: dict[int, int]) -> Ways:
    """Run in each way once. A way that cannot be run is none."""
    values = base_values(feed, Base("random"), vocabulary, 3)
    wide, grad, leaves_grad = subject.wide, subject.grad, subject.leaves_grad
    subject.draw(0.0, 1.0, 0)
    try:
        plain = _walk(subject, feed, values, wide=False, grad=grad)
        if plain is None:
            return Ways()
        others = base_values(feed, Base("random"), vocabulary, 4)
        other = _walk(subject, feed, others, wide=False, grad=grad)
        lasting = _lasting(subject, feed, values, others)
        stranger = plain[1].thread
        if stranger is None and other is not None:
            stranger = _changed(plain[1].strangers, other[1].strangers)
        by_dtype = by_grad = leaves = False
        if wide and (walked := _walk(subject, feed, values, wide=True, grad=grad)) is not None:
            dtypes = {p.dtype for p in subject.parameters} & set(NARROW)
            by_dtype = _differ(plain, walked, max((_APART[d] for d in dtypes), default=1e-2))
        if not grad:
            by_grad, leaves = _by_grad(subject, feed, values, plain)
    finally:
        subject.wide, subject.grad, subject.leaves_grad = wide, grad, leaves_grad
    return Ways(by_dtype, by_grad, leaves, stranger, lasting)


def _lasting(subject: Subject, feed: Feed, values: list[Tensor], others: list[Tensor]) -> str | None:
    """A cache that is filled once with the same for all tokens is nothing that lasts."""
    subject.wide = False
    try:
        subject.run(feed, others)
        another = subject.contents()
        subject.run(feed, values)
        once = subject.contents()
        subject.going_on = True
        subject.run(feed, values)
        twice = subject.contents()
    except Exception:  # whatever the user's model raises
        return None
    finally:
        subject.going_on = False
    return first_change(once, another) or first_change(once, twice)


def _by_grad(subject: Subject, feed: Feed, values: list[Tensor], plain: tuple[Ran, _Path]) -> tuple[bool, bool]:
    for leaves in (False, True):
        subject.leaves_grad = leaves
        if leaves and not any(v.is_floating_point() for v in values):
            continue
        walked = _walk(subject, feed, values, wide=False, grad=True)
        if walked is not None and _differ(plain, walked, 1e-4):
            return True, leaves
    return False, False


def _walk(subject: Subject, feed: Feed, values: list[Tensor], *, wide: bool, grad: bool) -> tuple[Ran, _Path] | None:
    subject.wide, subject.grad = wide, grad
    subject.place(wide)
    known = {t.untyped_storage().data_ptr() for t in (*subject.parameters, *subject.buffers)}
    path = _Path(subject, known)
    try:
        with _threads(path):
            return subject.run(feed, values, path), path
    except Exception:  # whatever the user's model raises
        return None


@contextlib.contextmanager
def _threads(path: _Path) -> Iterator[None]:
    """Note where a thread is begun: what it computes is seen by no mode."""
    begin = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        path.thread = path.thread or user_place()
        begin(thread)

    threading.Thread.start = noted  # type: ignore[assignment,method-assign]  # for this run alone
    try:
        yield
    finally:
        threading.Thread.start = begin  # type: ignore[method-assign]  # as it was


def _differ(one: tuple[Ran, _Path], other: tuple[Ran, _Path], bound: float) -> bool:
    if one[1].names != other[1].names:
        return True
    for a, b in zip(one[0].outputs, other[0].outputs, strict=False):
        if a.shape != b.shape or float(distances(a, b).far.max() if a.numel() else 0.0) > bound:
            return True
    return False


def _changed(one: Sequence[tuple[Origin, Tensor]], other: Sequence[tuple[Origin, Tensor]]) -> Origin | None:
    """Where the first tensor from elsewhere differs that has the same place and shape in both runs."""
    for (place, a), (there, b) in zip(one, other, strict=False):
        if place != there or a.shape != b.shape:
            return None
        if not torch.equal(a, b) and not bool((a != a).any()):
            return place
    return None
