"""Which of a model's outputs are of tokens, and which position is whose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshwright.compiler.causality.feed import Feed, Layout
from meshwright.compiler.causality.fitting import no_output
from meshwright.compiler.causality.typed import split_dim

_FIELDS = ("logits", "last_hidden_state", "prediction_logits", "hidden_states", "sample")


@dataclass(frozen=True)
class TokenOutput:
    """A tensor of a value for each row and position. ``offset`` positions stand before the first token's."""

    name: str
    value: Tensor
    offset: int


def token_outputs(returned: Any, feed: Feed) -> list[TokenOutput]:
    """Those with the batch's rows and positions, in order; of a record with logits, these alone."""
    made = []
    for name, value in named_tensors(returned):
        if feed.layouts is not None:
            if name not in feed.layouts:
                continue
            value = arranged(value, feed, feed.layouts[name])
        offset = _offset(value, feed)
        if offset is not None:
            made.append(TokenOutput(name, value, offset))
    exact = [o for o in made if o.offset == 0 and o.value.shape[feed.time_dim] == feed.length]
    return exact or made


def required_outputs(returned: Any, feed: Feed) -> list[TokenOutput]:
    """The same; Unfit is raised where there is none."""
    made = token_outputs(returned, feed)
    if not made:
        shapes = [tuple(value.shape) for _, value in named_tensors(returned)]
        raise no_output(shapes, feed.rows, feed.length, feed.batch_dim, feed.time_dim)
    return made


def named_tensors(returned: Any) -> list[tuple[str, Tensor]]:
    """All tensors that a model returns; of a record with logits, these alone."""
    found: list[tuple[str, Tensor]] = []
    _collect(returned, "", found)
    return [(name or "output", value) for name, value in found]


def arranged(value: Tensor, feed: Feed, layout: Layout) -> Tensor:
    """A view of an output with its rows and positions where the input has them."""
    batch, time = layout.batch, layout.time
    if batch is not None and batch == time:
        sizes = (feed.rows, feed.length) if layout.row_major else (feed.length, feed.rows)
        if value.dim() <= batch or value.shape[batch] != feed.rows * feed.length:
            return value
        value = split_dim(value, batch, sizes)
        batch, time = (batch, batch + 1) if layout.row_major else (batch + 1, batch)
    if feed.batch_dim is None or batch is None:
        return value.movedim(time, feed.time_dim)
    return value.movedim((batch, time), (feed.batch_dim, feed.time_dim))


def layouts_of(met: list[tuple[int, int, dict[str, tuple[int, ...]]]], feed: Feed) -> dict[str, Layout]:
    """From the shapes of outputs in runs of several ``(rows, length)``: which dims follow rows and positions.

    A dim of heads may be as long as the input by chance, but not at two lengths. Outputs in the layout of the input go
    before others.
    """
    first = met[0][2]
    plain, other = {}, {}
    for name, shape in first.items():
        shapes = [s.get(name, ()) for _, _, s in met]
        if any(len(s) != len(shape) for s in shapes):
            continue
        dims = range(len(shape))
        if len(shape) > max(feed.time_dim, feed.batch_dim or 0) and _follows(met, name, feed):
            plain[name] = Layout(feed.batch_dim, feed.time_dim)
        times = [d for d in dims if all(s[name][d] == n for _, n, s in met)]
        batches = [d for d in dims if all(s[name][d] == r for r, _, s in met)]
        joint = [d for d in dims if all(s[name][d] == r * n for r, n, s in met)]
        if len(times) == 1 and (feed.batch_dim is None or len(batches) == 1):
            other[name] = Layout(None if feed.batch_dim is None else batches[0], times[0])
        elif len(joint) == 1 and feed.batch_dim is not None:
            other[name] = Layout(joint[0], joint[0], feed.batch_dim < feed.time_dim)
    return plain or other


def _follows(met: list[tuple[int, int, dict[str, tuple[int, ...]]]], name: str, feed: Feed) -> bool:
    if feed.batch_dim is not None and any(s[name][feed.batch_dim] != r for r, _, s in met):
        return False
    by_length = {n: s[name][feed.time_dim] for _, n, s in met}
    return len(set(by_length.values())) == len(by_length)


def _offset(value: Tensor, feed: Feed) -> int | None:
    if value.dim() <= max(feed.time_dim, feed.batch_dim or 0):
        return None
    if feed.batch_dim is not None and value.shape[feed.batch_dim] != feed.rows:
        return None
    length = value.shape[feed.time_dim]
    if length == feed.length:
        return 0
    near = abs(length - feed.length) <= max(2, feed.length // 2)
    return max(0, length - feed.length) if near and length > 1 and value.dim() > 2 else None


def _collect(value: Any, name: str, found: list[tuple[str, Tensor]]) -> None:
    if isinstance(value, Tensor):
        found.append((name, value))
        return
    fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    if isinstance(value, tuple | list):
        names = getattr(value, "_fields", None)
        for i, one in enumerate(value):
            _collect(one, names[i] if names else f"{name}[{i}]", found)
    elif isinstance(fields, Mapping):
        wanted = next((f for f in _FIELDS if isinstance(fields.get(f), Tensor)), None)
        if wanted is not None:
            found.append((wanted, fields[wanted]))
            return
        for key, one in fields.items():
            _collect(one, str(key), found)
