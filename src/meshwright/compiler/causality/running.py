"""Runs a model on real values for comparison: in float64, with weights of its own or drawn anew, nothing kept."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.compiler.causality.feed import Feed, Role, call_with
from meshwright.compiler.causality.interpreter import is_view
from meshwright.compiler.causality.outputs import token_outputs
from meshwright.compiler.causality.reading import READS
from meshwright.compiler.causality.relation import plainly
from meshwright.compiler.graph.adapter import OpOverload, TorchDispatchMode, times_written

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_MOST_WEIGHTS = 300_000_000
"""Elements beyond which weights are neither copied nor drawn anew."""


class Widen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it without types
    """Computes in float64 what asks for less: every operand, and every dtype that an op is given."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or is_view(func) or func._schema.is_mutable:
            return func(*args, **kwargs)
        args, kwargs = tuple(_widened(a) for a in args), {k: _widened(v) for k, v in kwargs.items()}
        if func is torch.ops.aten._grouped_mm.default and args[0].dim() == 2:
            return grouped_product(args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"])
        return func(*args, **kwargs)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """``_grouped_mm`` in any dtype: rows up to each end times the weights of their group."""
    made = rows.new_zeros(rows.shape[0], weights.shape[-1])
    start = 0
    for group, end in enumerate(ends.tolist()):
        made[start:end] = rows[start:end] @ weights[group]
        start = end
    return made


def _with_digits(value: Tensor) -> Tensor:
    """In float64, with digits beyond those of float32: sums of such numbers would be exact otherwise."""
    line = torch.arange(value.shape[-1] if value.dim() else 1, dtype=torch.float64)
    return value.double() * (1 + 1e-9 * torch.cos(line if value.dim() else line[0]))


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.dtype == torch.complex64:
            return value.to(torch.complex128)
        return value.double() if value.dtype in _NARROW else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else torch.complex128 if value == torch.complex64 else value
    if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
        return [_widened(v) for v in value]
    return value


class _Noting(TorchFunctionMode):
    """Keeps what the user's code reads off tensors."""

    def __init__(self, read: list[str]) -> None:
        super().__init__()
        self.read = read

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if function in READS:
            self.read.append(str(made))
        return made


@dataclass(frozen=True)
class Ran:
    """The token outputs of a run as float64, and what the code read."""

    outputs: tuple[Tensor, ...]
    offsets: tuple[int, ...]
    read: tuple[str, ...]


@dataclass
class Subject:
    """The model under test. Its modules are a copy, or get their own tensors back (:meth:`restored`)."""

    function: Callable[..., Any]
    modules: list[nn.Module]
    parameters: list[nn.Parameter] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)
    """The tensors of the parameters as given; empty where there are too many to copy."""
    buffers: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    wide: bool = True
    """Whether runs are in float64."""
    writes: bool = False
    """Whether a run changes weights."""
    _drawn: list[Tensor] = field(default_factory=list)
    _asked: tuple[float, float, int] | None = None
    _placed: bool | None = None
    _written: list[int] = field(default_factory=list)

    def addresses(self) -> frozenset[int]:
        """The storages of the weights."""
        return frozenset(p.untyped_storage().data_ptr() for p in self.parameters if p.numel())

    def draw(self, scale: float, gain: float, seed: int) -> None:
        """The user's own weights plus noise of ``scale`` of their spread, matrices then times ``gain``."""
        asked = (scale, gain, seed if scale else 0)
        if self._drawn and asked == self._asked:
            return
        self._asked = asked
        drawing = torch.Generator().manual_seed(seed)
        self._drawn = []
        for own in self.own:
            made = own
            if scale and own.is_floating_point() and own.numel():
                noise = torch.randn(own.shape, generator=drawing, dtype=torch.float32).to(own.dtype)
                made = own + scale * _spread(own) * noise
            self._drawn.append(made * gain if gain != 1 and own.dim() > 1 else made)
        self._placed = None

    def place(self, wide: bool) -> None:
        """Put the weights drawn last into the model, in float64 or as they are, and the buffers as they were given."""
        if self._placed is not wide or self.writes:
            for parameter, drawn in zip(self.parameters, self._drawn, strict=False):
                parameter.data = _with_digits(drawn) if wide and drawn.dtype in _NARROW else drawn.clone()
            self._placed = wide
            self._written = [times_written(p) for p in self.parameters]
        for buffer, kept in zip(self.buffers, self.kept, strict=True):
            made = kept.clone()
            buffer.data = _widened(made) if wide else made

    def notice_writes(self) -> None:
        """See, after a run, whether it changed any weight."""
        now = [times_written(p) for p in self.parameters]
        self.writes = self.writes or now != self._written

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Afterwards weights and buffers are the tensors that they were."""
        held = [b.data for b in self.buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, own in zip(self.parameters, self.own, strict=False):
                    parameter.data = own
                for buffer, tensor, kept in zip(self.buffers, held, self.kept, strict=True):
                    buffer.data = tensor
                    buffer.copy_(kept)

    def run(self, feed: Feed, values: list[Tensor], *around: contextlib.AbstractContextManager[Any]) -> Ran:
        """One run. Raises what the model raises."""
        read: list[str] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.manual_seed(0)
            stack.enter_context(plainly())
            self.place(self.wide)
            values = [v.clone() for v in values]
            if self.wide:
                default = torch.get_default_dtype()
                stack.callback(torch.set_default_dtype, default)
                torch.set_default_dtype(torch.float64)
                values = [
                    _with_digits(v) if leaf.role is Role.TOKENS and v.dtype in _NARROW else _widened(v)
                    for leaf, v in zip(feed.leaves, values, strict=True)
                ]
                stack.enter_context(Widen())  # type: ignore[no-untyped-call]  # torch leaves it without types
            for one in around:
                stack.enter_context(one)
            stack.enter_context(_Noting(read))
            returned = call_with(self.function, feed.filled(values))
        found = token_outputs(returned, feed)
        outputs = tuple(_as_rows(o.value.detach(), feed) for o in found)
        return Ran(outputs, tuple(o.offset for o in found), tuple(read))


def _as_rows(value: Tensor, feed: Feed) -> Tensor:
    """``[rows, positions, features]`` float64."""
    value = torch.view_as_real(value) if value.is_complex() else value
    value = value.double()
    if feed.batch_dim is None:
        value = value.movedim(feed.time_dim, 0).unsqueeze(0)
    else:
        value = value.movedim((feed.batch_dim, feed.time_dim), (0, 1))
    return value.reshape(value.shape[0], value.shape[1], -1)


def _spread(own: Tensor) -> float:
    wide = own.detach().double()
    spread = float(wide.std()) if own.numel() > 1 else 0.0
    mean = float(wide.mean().abs())
    if spread > 1e-6 * max(1.0, mean):
        return spread
    if mean > 0:
        return 0.3 * mean
    return float(own.shape[-1]) ** -0.5 if own.dim() > 1 else 0.3


def subject_of(model: Callable[..., Any]) -> Subject:
    """A model or a function, with what modules it holds."""
    function = model
    if isinstance(model, nn.Module):
        small = sum(p.numel() for p in model.parameters()) <= _MOST_WEIGHTS
        if small:
            with contextlib.suppress(Exception):  # what cannot be copied is put back afterwards
                function = copy.deepcopy(model)
    modules = [function] if isinstance(function, nn.Module) else list(_modules_in(function, 0, set()))
    made = Subject(function, modules)
    seen: set[int] = set()
    for module in modules:
        for parameter in module.parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                made.parameters.append(parameter)
        for buffer in module.buffers():
            if id(buffer) not in seen:
                seen.add(id(buffer))
                made.buffers.append(buffer)
                made.kept.append(buffer.detach().clone())
    if sum(p.numel() for p in made.parameters) <= _MOST_WEIGHTS:
        made.own = [p.data for p in made.parameters]
    return made


def _modules_in(value: Any, depth: int, seen: set[int]) -> Iterator[nn.Module]:
    """Modules that a function can reach: what it closes over, is bound to, or names."""
    if depth > 3 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield value
        return
    inner: list[Any] = []
    if isinstance(value, partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif inspect.ismethod(value):
        inner = [value.__self__, value.__func__]
    elif inspect.isfunction(value):
        found = inspect.getclosurevars(value) if depth == 0 else None
        inner = [*found.nonlocals.values(), *found.globals.values()] if found else []
        if depth:
            inner = [c.cell_contents for c in value.__closure__ or () if _filled(c)]
    elif isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    elif hasattr(value, "__dict__") and not inspect.isclass(value) and not inspect.ismodule(value):
        inner = list(vars(value).values())
    for one in inner:
        yield from _modules_in(one, depth + 1, seen)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
