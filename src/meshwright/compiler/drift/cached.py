"""How a model is given a cache and gives it back, and the pieces of a batch that it is then fed with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compiler.causality.call import tensors_in
from meshwright.compiler.causality.feed import Feed, Leaf, Role, Unfit

NAMES = (
    "past_key_values",
    "past_key_value",
    "cache_params",
    "kv_cache",
    "layer_past",
    "past",
    "cache",
    "state",
    "states",
)
"""What the argument for a cache is called."""


@dataclass(frozen=True)
class Caching:
    """The argument for the cache, and whether ``use_cache`` asks for one."""

    name: str
    asks: bool

    def found_in(self, returned: Any) -> Any:
        """The cache in what a model returned; None if there is none."""
        if isinstance(returned, Mapping):
            return returned.get(self.name, returned.get(f"present{self.name.removeprefix('past')}"))
        if hasattr(returned, self.name):
            return getattr(returned, self.name)
        if isinstance(returned, tuple | list) and len(returned) > 1:
            return returned[1]
        return None


def caching_of(function: Callable[..., Any]) -> Caching | None:
    """How a model takes a cache; None if it does not."""
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        names = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None
    found = next((n for n in NAMES if n in names), None)
    return Caching(found, "use_cache" in names) if found else None


def as_keywords(function: Callable[..., Any], feed: Feed, values: list[Tensor], start: int, end: int) -> dict[str, Any]:
    """The inputs for the positions from ``start`` to ``end``, by name. Raises Unfit if they cannot be cut."""
    made: dict[str, Any] = {}
    for leaf, value in zip(feed.leaves, values, strict=True):
        if len(leaf.path) > 1:
            raise Unfit(f"'{leaf.name}' is within another input")
        if leaf.name == "labels":
            continue
        made[leaf.name] = _cut(leaf, value, feed, start, end) if of_tokens(leaf, feed) else value
    if isinstance(feed.batch, Mapping):
        rest = {k: v for k, v in feed.batch.items() if not tensors_in(v) and k not in ("labels", "use_cache")}
        made.update(rest)
    if any(not name.isidentifier() for name in made):
        raise Unfit("the inputs have no names")
    return made


def of_tokens(leaf: Leaf, feed: Feed) -> bool:
    """Whether an input goes with the positions of the tokens: not what the encoder before a decoder reads."""
    decoder = any(one.name.startswith("decoder_") for one in feed.leaves)
    return leaf.role is not Role.CONTEXT and (not decoder or leaf.name.startswith("decoder_"))


def _cut(leaf: Leaf, value: Tensor, feed: Feed, start: int, end: int) -> Tensor:
    dim = feed.time_dim
    if leaf.role is Role.GIVEN and value.dim() > 2:
        raise Unfit(f"'{leaf.name}' has more than two dims")
    if value.dim() <= dim or value.shape[dim] != feed.length:
        return value
    if "mask" in leaf.name.lower():
        return value.narrow(dim, 0, end)
    return value.narrow(dim, start, end - start)


def visible(feed: Feed) -> Tensor:
    """``[rows, length]``: the positions that a mask of zeros and ones does not leave out."""
    seen = torch.ones(feed.rows, feed.length, dtype=torch.bool)
    for leaf in feed.leaves:
        if "mask" in leaf.name.lower() and tuple(leaf.value.shape) == (feed.rows, feed.length):
            seen &= leaf.value != 0
    return seen
