"""The first op in which a forbidden difference stands at the position whose output shows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import tensors_in
from meshwright.compiler.causality.cases import Case
from meshwright.compiler.causality.places import user_place
from meshwright.compiler.causality.running import Subject
from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.graph.adapter import OpOverload, TorchDispatchMode, overload_name

_UNWRITTEN = ("aten.empty", "aten.new_empty")
"""Ops whose results are whatever stood in that memory, until another op writes to them."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it without types
    """Keeps what stands at one row and position after each op."""

    def __init__(self, case: Case) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without types
        self.case = case
        self.steps: list[tuple[str, Origin, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload) and not overload_name(func).startswith(_UNWRITTEN):
            for value in tensors_in(made)[:1]:
                kept = at_position(value, self.case)
                if kept is not None:
                    self.steps.append((overload_name(func), user_place(), kept))
        return made


def at_position(value: Tensor, case: Case) -> Tensor | None:
    """The part of a tensor that belongs to the position of a case, by the sizes of its dims; None if none does.

    Of two dims of the length the second is that of keys: what lies after the position is not yet masked there.
    """
    feed, (row, time) = case.feed, case.output
    shape = list(value.shape)
    if value.dtype == torch.bool or value.numel() > 4_000_000 or time < 0:
        return None
    dims = [d for d, size in enumerate(shape) if size == feed.length]
    joined = [d for d, size in enumerate(shape) if size == feed.rows * feed.length]
    if feed.batch_dim is not None and feed.rows > 1 and joined and not dims:
        return value.select(joined[0], row * feed.length + time).clone()
    if not dims:
        return None
    rows = next((d for d in range(len(shape)) if d not in dims and shape[d] == feed.rows), None)
    if rows is None and feed.rows > 1 and feed.batch_dim is not None:
        return None
    kept = value.select(dims[0], time)
    places = [d - 1 if d > dims[0] else d for d in dims[1:]]
    for d in places:
        kept = kept.narrow(d, 0, time + 1)
    if rows is not None:
        kept = kept.select(rows - 1 if rows > dims[0] else rows, row)
    return kept.clone()


def where_it_enters(subject: Subject, case: Case) -> tuple[str, Origin | None]:
    """The op and the user's line; an empty name if no op shows it, or there is no time to look."""
    if subject.clock.late:
        return "", None
    subject.draw(*case.weights)
    runs = []
    for values in (case.values_a, case.values_b):
        recorder = _Recorder(case)
        try:
            subject.run(case.feed, values, recorder)
        except Exception:  # whatever the user's model raises
            return "", None
        runs.append(recorder.steps)
    for (name, place, a), (other, _, b) in zip(*runs, strict=False):
        if name != other or a.shape != b.shape:
            return name, place
        wide_a, wide_b = _real(a), _real(b)
        size = float(wide_a.abs().nan_to_num(0, 0, 0).max()) if a.numel() else 0.0
        far = (wide_a - wide_b).abs().nan_to_num(0, 0, 0)
        if a.numel() and float(far.max()) > 1e-9 * max(size, 1e-30):
            return name, place
    return "", None


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value.resolve_conj()).double() if value.is_complex() else value.double()
