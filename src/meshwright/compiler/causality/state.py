"""What a model keeps beside weights and buffers: counters, caches, lists, generators. Put back before every run.

A run that finds what the run before it left answers for other tokens too, so two runs would differ for no fault of
the model. Reached are the attributes of modules and of the objects that they hold, what a function closes over, and
the containers, tensors and generators that the code of either names in its own file.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compiler.graph.adapter import times_written

_DEEPEST = 8
_MOST_ITEMS = 10_000
"""Items of a container beyond which it is taken for data."""

_MOST_ELEMENTS = 10_000_000
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, Enum, type)


@dataclass
class State:
    """Everything reached, with what it held when :func:`state_of` looked."""

    objects: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = field(default_factory=list)
    lists: list[tuple[list[Any], list[Any]]] = field(default_factory=list)
    sets: list[tuple[set[Any], set[Any]]] = field(default_factory=list)
    tensors: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    generators: list[tuple[Any, Any]] = field(default_factory=list)

    def restore(self) -> None:
        """Everything as it was; what was not changed is not touched."""
        for held, kept in self.objects:
            _as_it_was(vars(held), kept)
        for now, was in self.dicts:
            _as_it_was(now, was)
        for items, before in self.lists:
            if len(items) != len(before) or any(a is not b for a, b in zip(items, before, strict=True)):
                items[:] = before
        for members, old in self.sets:
            if members != old:
                members.clear()
                members.update(old)
        for place, (tensor, content, version) in enumerate(self.tensors):
            if times_written(tensor) != version or tensor.dtype != content.dtype or tensor.shape != content.shape:
                tensor.data = content.clone()
                self.tensors[place] = (tensor, content, times_written(tensor))
        for generator, content in self.generators:
            _set_state(generator, content)


def _as_it_was(now: dict[Any, Any], was: dict[Any, Any]) -> None:
    if len(now) == len(was) and all(now.get(k, _GONE) is v for k, v in was.items()):
        return
    for key in [k for k in now if k not in was]:
        del now[key]
    for key, value in was.items():
        if now.get(key, _GONE) is not value:
            now[key] = value


_GONE = object()


def state_of(function: Any, known: set[int]) -> State:
    """The state that a model or function can reach. ``known`` are ids of weights and buffers, kept elsewhere."""
    made = State()
    for _, value in _reached(function, known):
        if isinstance(value, Tensor):
            if value.numel() <= _MOST_ELEMENTS and not value.is_meta:
                made.tensors.append((value, value.detach().clone(), times_written(value)))
        elif (content := _get_state(value)) is not None:
            made.generators.append((value, content))
        elif isinstance(value, dict):
            made.dicts.append((value, dict(value)))
        elif isinstance(value, list):
            made.lists.append((value, list(value)))
        elif isinstance(value, set):
            made.sets.append((value, set(value)))
        elif _is_object(value):
            made.objects.append((value, dict(vars(value))))
    return made


def contents(function: Any, known: set[int]) -> dict[str, Any]:
    """By the names that lead to them: numbers, strings and tensors that a model or function can reach."""
    made: dict[str, Any] = {}
    for path, value in _reached(function, known):
        if isinstance(value, Tensor):
            made[path] = value.detach().clone() if value.numel() <= _MOST_ELEMENTS else None
        for name, one in _inside(value):
            if isinstance(one, str | bytes | int | float | bool):
                made[f"{path}.{name}"] = one
    return made


def first_change(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The name of the first thing that is not the same in both."""
    for path in [*one, *other]:
        a, b = one.get(path, _GONE), other.get(path, _GONE)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.nan_to_num(), b.nan_to_num()):
                return path
        elif type(a) is not type(b) or a != b:
            return path
    return None


def _reached(function: Any, known: set[int]) -> Iterator[tuple[str, Any]]:
    """Everything that holds state, with the names that lead to it."""
    seen = set(known)
    waiting: list[tuple[str, Any, int]] = [(type(function).__name__, function, 0)]
    for path, value, depth in waiting:
        if isinstance(value, _PLAIN) or id(value) in seen or depth > _DEEPEST:
            continue
        seen.add(id(value))
        yield path, value
        for name, one in _inside(value):
            deeper = 0 if isinstance(one, nn.Module) or isinstance(value, nn.Module) else 1
            waiting.append((f"{path}.{name}", one, depth + deeper))


def _inside(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Tensor | set) or _get_state(value) is not None:
        return []
    if isinstance(value, dict):
        return [(str(k), v) for k, v in value.items()] if len(value) <= _MOST_ITEMS else []
    if isinstance(value, list | tuple):
        return [(str(k), v) for k, v in enumerate(value)] if len(value) <= _MOST_ITEMS else []
    if isinstance(value, partial):
        held = {"func": value.func, "args": value.args, "keywords": value.keywords}
        return list(held.items())
    if inspect.ismethod(value):
        return [("self", value.__self__), ("function", value.__func__)]
    if inspect.isfunction(value):
        return [(str(k), v) for k, v in enumerate(_named(value))]
    if not _is_object(value):
        return []
    own = getattr(type(value), "forward" if isinstance(value, nn.Module) else "__call__", None)
    return [*vars(value).items(), ("forward", own if inspect.isfunction(own) else None)]


def _is_object(value: Any) -> bool:
    try:
        plain = isinstance(vars(value), dict) and not isinstance(value, types.ModuleType)
    except Exception:  # of a proxy of the user's, which may do anything when it is looked at
        plain = False
    if not plain:
        return False
    return isinstance(value, nn.Module) or not str(type(value).__module__).startswith(("torch.", "builtins", "typing"))


def _named(function: types.FunctionType) -> Iterator[Any]:
    """What a function closes over, and the containers, tensors and generators that it names."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a cell that nothing was put into yet
            yield cell.cell_contents
    if (function.__module__ or "").startswith(("torch.", "transformers.")):
        return
    for name in function.__code__.co_names:
        found = function.__globals__.get(name)
        neighbour = inspect.isfunction(found) and found.__module__ == function.__module__
        if neighbour or isinstance(found, dict | list | set | Tensor) or _get_state(found) is not None:
            yield found


def _get_state(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return value.get_state()
    return None


def _set_state(generator: Any, content: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(content)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = content
    else:
        generator.set_state(content)


@contextlib.contextmanager
def chance(seed: int) -> Iterator[None]:
    """The dice of torch, ``random`` and numpy begin at a seed, and go on afterwards where they were."""
    numpy = sys.modules.get("numpy")
    python = random.getstate()
    ours = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=[]):
        _seed_torch(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(ours)


def _seed_torch(seed: int) -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it without types
        torch.manual_seed(seed)
    else:  # torch.manual_seed would write down the stack of its caller each time, for when CUDA begins
        torch.default_generator.manual_seed(seed)
