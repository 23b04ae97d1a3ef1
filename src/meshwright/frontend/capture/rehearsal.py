"""One forward pass on fake tensors without a trace: which ops every layer of a list runs, and on what.

It costs a small part of a capture, and tells whether layers do the same: a layer's record names tensors by where
they come from (its own weights, its own results, what it is given), never by position in the model.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compiler.graph.adapter import TorchDispatchMode, exporting
from meshwright.compiler.graph.fake import fake_mode, fake_tensor
from meshwright.frontend.capture.attributes import Plainly, buffers_written
from meshwright.frontend.capture.batch import Call, Step, replace
from meshwright.frontend.capture.stand_in import cast, stand_ins


@dataclass
class Record:
    """What one layer did. ``given`` says of what it read from outside how that was made."""

    ops: list[Hashable] = field(default_factory=list)
    given: list[Hashable] = field(default_factory=list)


@dataclass(frozen=True)
class Made:
    """Of a value that a layer of a list made: the list, and which of the layer's values it is."""

    layers: str
    op: int
    result: int


@dataclass
class Rehearsal:
    """What a forward pass did."""

    layers: dict[str, Record] = field(default_factory=dict)
    """By path of a layer its record, in the order of the calls."""
    repeated: set[str] = field(default_factory=set)
    """Layers that were called more than once."""
    reads: set[tuple[str, str]] = field(default_factory=set)
    """A layer, and another one of its list that reads a value of it; "" if something outside of the list does."""
    log: list[tuple[Hashable, tuple[str, ...]]] = field(default_factory=list)
    """Every op, and the layers that it stands in."""

    def outside(self, lists: Collection[str]) -> Counter[Hashable]:
        """The ops outside of the layers of some lists."""
        return Counter(op for op, within in self.log if not any(list_of(layer) in lists for layer in within))


def list_of(layer: str) -> str:
    """The path of the list that a layer is in."""
    return layer.rpartition(".")[0]


def rehearse(
    step: Step, call: Call, found: Mapping[str, Tensor], compute: torch.dtype | None, layers: Mapping[str, nn.Module]
) -> Rehearsal:
    """Run the step forward. ``layers``: the modules to be recorded, by path. Raises whatever the model raises."""
    fakes = {name: fake_tensor(t.shape, cast(t.dtype, compute)) for name, t in found.items()}
    given = replace(call, fakes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stand_ins(step, compute))
        recorder = _Recorder({id(t): name for name, t in fakes.items()})
        recorder.weights(step, layers)
        for path, module in layers.items():
            for handle in recorder.hooks(path, module):
                stack.callback(handle.remove)
        for context in (torch.no_grad(), fake_mode(), exporting(), buffers_written(), Plainly(), recorder):
            stack.enter_context(context)
        step(*given.args, **given.kwargs)
    return recorder.found


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it without types
    def __init__(self, made: Mapping[int, Hashable]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.found = Rehearsal()
        self._how: dict[int, Hashable] = dict(made)
        """By tensor: how it was made. Within layers that does not depend on which layer of the list it was."""
        self._maker: dict[int, tuple[str, ...]] = {}
        self._alive: list[Any] = []  # so that no number of a tensor is used twice
        self._own: dict[str, dict[int, str]] = {}
        self._open: list[tuple[str, Record, dict[int, Hashable]]] = []

    def weights(self, step: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        """Remember what parameters and buffers are called, in the model and in each layer."""
        for name, tensor in (*step.named_parameters(), *step.named_buffers()):
            self._how.setdefault(id(tensor), name)
        for path, module in layers.items():
            tensors = (*module.named_parameters(), *module.named_buffers())
            self._own[path] = {id(tensor): name for name, tensor in tensors}

    def hooks(self, path: str, module: nn.Module) -> Iterator[Any]:
        def begin(*_: Any) -> None:
            if path in self.found.layers:
                self.found.repeated.add(path)
            record = self.found.layers.setdefault(path, Record())
            own: dict[int, Hashable] = {i: ("own", name) for i, name in self._own[path].items()}
            self._open.append((path, record, own))

        def end(*_: Any) -> None:
            self._open.pop()

        yield module.register_forward_pre_hook(begin)
        yield module.register_forward_hook(end)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = (args, tuple(kwargs.items()))
        self._alive.append((given, result))
        within = tuple(path for path, _, _ in self._open)
        self._read(given, within)
        self.found.log.append(((func, self._named(given, _type), _types(result)), within))
        how: Hashable = hash((str(func), self._named(given, self._made)))
        for n, tensor in enumerate(_tensors(result)):
            if id(tensor) not in self._how:
                path, record = self._open[-1][:2] if self._open else ("", Record())
                self._how[id(tensor)] = Made(list_of(path), len(record.ops), n) if path else (how, n)
                self._maker[id(tensor)] = within
        for _, record, local in self._open:
            self._record(record, local, func, given, result)
        return result

    def _read(self, given: Any, within: tuple[str, ...]) -> None:
        for tensor in _tensors(given):
            for layer in self._maker.get(id(tensor), ()):
                if layer not in within:
                    beside = next((other for other in within if list_of(other) == list_of(layer)), "")
                    self.found.reads.add((layer, beside))

    def _record(self, record: Record, local: dict[int, Hashable], func: Any, given: Any, result: Any) -> None:
        def named(tensor: Tensor) -> Hashable:
            if id(tensor) not in local:
                local[id(tensor)] = ("given", len(record.given))
                record.given.append(self._made(tensor))
            return local[id(tensor)], _type(tensor)

        what = self._named(given, named)
        for n, tensor in enumerate(_tensors(result)):
            local.setdefault(id(tensor), ("made", len(record.ops), n))
        record.ops.append((func, what, _types(result)))

    def _made(self, tensor: Tensor) -> Hashable:
        return self._how.get(id(tensor), ("unknown", _type(tensor)))

    def _named(self, value: Any, name: Any) -> Hashable:
        if isinstance(value, Tensor):
            found: Hashable = name(value)
            return found
        if isinstance(value, (list, tuple)):
            return tuple([self._named(v, name) for v in value])
        if isinstance(value, (bool, int, float)):
            return type(value), repr(value)
        return value if isinstance(value, Hashable) else repr(value)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _type(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.dtype


def _types(value: Any) -> Hashable:
    return tuple(_type(t) for t in _tensors(value))
