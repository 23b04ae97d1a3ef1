"""Which of a model's outputs are of tokens, and which position is whose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshwright.compiler.causality.feed import Feed

_FIELDS = ("logits", "last_hidden_state", "prediction_logits", "hidden_states", "sample")


@dataclass(frozen=True)
class TokenOutput:
    """A tensor of a value for each row and position. ``offset`` positions stand before the first token's."""

    name: str
    value: Tensor
    offset: int


def token_outputs(returned: Any, feed: Feed) -> list[TokenOutput]:
    """Those with the batch's rows and positions, in order; of a record with logits, these alone."""
    found: list[tuple[str, Tensor]] = []
    _collect(returned, "", found)
    made = []
    for name, value in found:
        offset = _offset(value, feed)
        if offset is not None and (feed.watched is None or (name or "output") in feed.watched):
            made.append(TokenOutput(name or "output", value, offset))
    exact = [o for o in made if o.offset == 0 and o.value.shape[feed.time_dim] == feed.length]
    return exact or made


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
