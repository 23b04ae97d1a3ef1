"""The inputs of a model: which are tokens, which are masks and positions, and like inputs of another size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.fitting import Exit, Unfit, refuse_values, resolved_dims, without_tokens

__all__ = ["Feed", "Leaf", "Role", "Unfit", "call_with", "read_feed"]


class Role(Enum):
    """What an input is to the question of who sees whom."""

    TOKENS = "tokens"
    """One token for each row and position: what must not be seen by others."""
    CONTEXT = "context"
    """Something of a row as a whole: an image, the source of a translation."""
    GIVEN = "given"
    """Masks, positions and segments: taken as they are."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of the inputs. ``path`` leads to it: ``(0,)``, ``("input_ids",)``, ``("images", 0)``."""

    path: tuple[Any, ...]
    name: str
    value: Tensor
    role: Role
    guessed: bool = False
    """Whether it is taken as given for holding nothing but zeros and ones."""


@dataclass(frozen=True)
class Layout:
    """Which dims of an output are its rows and positions; one dim for both if it goes through the positions of rows."""

    batch: int | None
    time: int
    row_major: bool = True
    """Of one dim for both: whether a row's positions follow one another."""


@dataclass(frozen=True)
class Feed:
    """All inputs in the user's form, of ``rows`` rows and ``length`` positions."""

    batch: Any
    leaves: tuple[Leaf, ...]
    rows: int
    length: int
    batch_dim: int | None
    time_dim: int
    segments: Tensor | None = None
    """``[rows, length]`` ids of the document of each position, or None."""
    segments_leaf: int | None = None
    layouts: Mapping[str, Layout] | None = None
    """The outputs that are looked at, by name; None for all that have the rows and positions where the input has."""

    def filled(self, values: list[Tensor]) -> Any:
        """The inputs in the user's form with other tensors."""
        return _filled(self.batch, {leaf.path: v for leaf, v in zip(self.leaves, values, strict=True)}, ())

    def asking_for(self, name: str) -> Feed:
        """The same, an input of this name taken for the tokens, and all others as given."""
        leaves = tuple(replace(x, role=Role.TOKENS if x.name == name else Role.GIVEN) for x in self.leaves)
        return replace(self, leaves=leaves)

    def with_values(self, values: list[Tensor], rows: int, length: int, segments: Tensor | None) -> Feed:
        leaves = tuple(replace(leaf, value=v) for leaf, v in zip(self.leaves, values, strict=True))
        return replace(self, batch=self.filled(values), leaves=leaves, rows=rows, length=length, segments=segments)


def call_with(function: Callable[..., Any], batch: Any) -> Any:
    """Call with a batch in the user's form: a tensor, positional arguments, or keyword arguments.

    Raises what the function raises; :class:`Exit` where it exits.
    """
    try:
        if isinstance(batch, Mapping):
            return function(**batch)
        return function(*batch) if isinstance(batch, tuple | list) else function(batch)
    except SystemExit as fault:
        raise Exit(f"it calls sys.exit({fault.code!r})") from fault


def read_feed(function: Any, batch: Any, batch_dim: int | None, time_dim: int, segments: Any) -> Feed:
    """Sort the inputs by their roles. Raises Unfit with the reason if none is of tokens."""
    found: list[tuple[tuple[Any, ...], Tensor]] = []
    _collect(batch, (), found)
    names = [_name(function, batch, path) for path, _ in found]
    refuse_values(names, [value for _, value in found], segments)
    found = [(path, value.cpu()) for path, value in found]
    own = next((i for i, n in enumerate(names) if isinstance(segments, str) and n == segments), None)
    if isinstance(segments, Tensor):
        own = next((i for i, (_, v) in enumerate(found) if v is segments), None)
    if isinstance(segments, str) and own is None:
        raise Unfit(f"there is no input '{segments}'; inputs are: {', '.join(names)}")
    main = _main(names, found, own, time_dim)
    if main is None:
        raise without_tokens(names, [value for _, value in found], own, time_dim)
    value = found[main][1]
    batch_dim, time_dim = resolved_dims(names[main], value, batch_dim, time_dim)
    rows = 1 if batch_dim is None else value.shape[batch_dim]
    length = value.shape[time_dim]
    decoder = any(n.startswith("decoder_") for n in names)
    ids = found[own][1] if own is not None else segments if isinstance(segments, Tensor) else None
    leaves = []
    for i, ((path, tensor), name) in enumerate(zip(found, names, strict=True)):
        role = _role(name, tensor, i == own, rows, length, batch_dim, time_dim, decoder)
        guessed = role is Role.TOKENS and i != main and _tells_no_token(tensor, time_dim)
        zeros_and_ones = guessed and bool(((tensor == 0) | (tensor == 1)).all())
        leaves.append(Leaf(path, name, tensor.detach(), Role.GIVEN if guessed else role, zeros_and_ones))
    ids = None if ids is None else ids.detach().cpu()
    if ids is not None and ids.dim() == 1:
        ids = ids.unsqueeze(0)
    if ids is not None and batch_dim == 1 and time_dim == 0:
        ids = ids.transpose(0, 1)
    if ids is not None and tuple(ids.shape) != (rows, length):
        raise Unfit(f"segments are {list(ids.shape)}, the tokens have {rows} rows of {length}")
    return Feed(batch, tuple(leaves), rows, length, batch_dim, time_dim, ids, own)


_MAIN = ("decoder_input_ids", "input_ids", "inputs_embeds", "decoder_inputs_embeds", "ids", "tokens", "idx", "x")


def _main(names: list[str], found: list[tuple[Any, Tensor]], own: int | None, time_dim: int) -> int | None:
    able = [i for i, (_, v) in enumerate(found) if v.dim() > time_dim and i != own and not _is_given(names[i], v)]
    for wanted in _MAIN:
        for i in able:
            if names[i] == wanted:
                return i
    return able[0] if able else None


def _is_given(name: str, value: Tensor) -> bool:
    lower = name.lower()
    return value.dtype == torch.bool or "mask" in lower or "position" in lower or "segment" in lower or "seg_" in lower


def _tells_no_token(value: Tensor, time_dim: int) -> bool:
    """Whether an input beside the tokens is a mask of zeros and ones, or counts positions."""
    if value.dim() > 2 or value.is_complex() or not value.numel():
        return False
    return bool(((value == 0) | (value == 1)).all()) or _counts(value, time_dim)


def _counts(value: Tensor, time_dim: int) -> bool:
    """Whether an input counts positions from zero, maybe of several documents."""
    steps = value.diff(dim=time_dim)
    first = value.select(time_dim, 0)
    counts = bool(((steps == 1) | (value.narrow(time_dim, 1, steps.shape[time_dim]) == 0)).all())
    return counts and bool((first == 0).all()) and not value.is_floating_point()


def _role(
    name: str,
    value: Tensor,
    segments: bool,
    rows: int,
    length: int,
    batch_dim: int | None,
    time_dim: int,
    decoder: bool,
) -> Role:
    if segments or _is_given(name, value):
        return Role.GIVEN
    of_rows = batch_dim is not None and value.dim() > batch_dim and value.shape[batch_dim] == rows
    of_time = value.dim() > time_dim and value.shape[time_dim] == length
    if decoder and not name.startswith("decoder_") and name != "labels":
        return Role.CONTEXT if of_rows else Role.GIVEN
    if of_time and (of_rows or batch_dim is None):
        return Role.TOKENS
    return Role.CONTEXT if of_rows and value.dim() > 0 else Role.GIVEN


def _name(function: Any, batch: Any, path: tuple[Any, ...]) -> str:
    head = path[0] if path else 0
    if isinstance(head, int):
        try:
            target = function.forward if isinstance(function, torch.nn.Module) else function
            names = [
                p.name
                for p in inspect.signature(target).parameters.values()
                if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            ]
            head = names[head] if head < len(names) else head
        except (TypeError, ValueError):
            pass
    return ".".join(str(p) for p in (head, *path[1:]))


def _collect(value: Any, path: tuple[Any, ...], found: list[tuple[tuple[Any, ...], Tensor]]) -> None:
    if isinstance(value, Tensor):
        found.append((path, value))
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _collect(one, (*path, key), found)
    elif isinstance(value, tuple | list):
        for i, one in enumerate(value):
            _collect(one, (*path, i), found)


def _filled(value: Any, by_path: dict[tuple[Any, ...], Tensor], path: tuple[Any, ...]) -> Any:
    if isinstance(value, Tensor):
        return by_path[path]
    if isinstance(value, Mapping):
        return {key: _filled(one, by_path, (*path, key)) for key, one in value.items()}
    if isinstance(value, tuple | list):
        made = [_filled(one, by_path, (*path, i)) for i, one in enumerate(value)]
        return tuple(made) if isinstance(value, tuple) else made
    return value
