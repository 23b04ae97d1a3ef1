"""Runs a model on real values for comparison: in float64, with weights of its own or drawn anew, nothing kept."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.compiler.causality.clock import Clock
from meshwright.compiler.causality.feed import Feed, Role, call_with
from meshwright.compiler.causality.fitting import Unfit
from meshwright.compiler.causality.outputs import token_outputs
from meshwright.compiler.causality.places import user_place
from meshwright.compiler.causality.reaching import modules_in
from meshwright.compiler.causality.reading import READS
from meshwright.compiler.causality.relation import plainly
from meshwright.compiler.causality.state import State, chance, contents, state_of
from meshwright.compiler.causality.widening import NARROW, Widen, widened, with_digits
from meshwright.compiler.graph.adapter import times_written

_MOST_WEIGHTS = 300_000_000
"""Elements beyond which weights are neither copied nor drawn anew."""


class _Noting(TorchFunctionMode):
    """Keeps what the user's code reads off tensors, and which way it went: every function with the shape it made."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[str, int, str]] = []
        self.way = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if function in READS:
            place = user_place()
            self.read.append((place.file, place.line, str(made) if isinstance(made, bool) else ""))
        elif isinstance(made, Tensor):
            self.way = hash((self.way, getattr(function, "__name__", ""), made.shape))
        return made


@dataclass(frozen=True)
class Ran:
    """The token outputs of a run as float64, and what the code read."""

    outputs: tuple[Tensor, ...]
    offsets: tuple[int, ...]
    read: tuple[tuple[str, int, str], ...]
    """File, line, and the truth that was read; an empty string for what is not true or false."""
    way: int
    """A hash of the ops in order with the shapes that they made."""


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
    clock: Clock = field(default_factory=Clock)
    wide: bool = True
    """Whether runs are in float64."""
    writes: bool = False
    """Whether a run changes weights."""
    grad: bool = False
    """Whether runs record gradients."""
    leaves_grad: bool = False
    """Whether inputs of numbers ask for gradients, where runs record them."""
    seed: int = 0
    """Where the dice begin."""
    nudged: int = 0
    """In which pattern weights are off by a rounding, which shows how far roundings are carried; 0 for none."""
    state: State = field(default_factory=State)
    going_on: bool = False
    """Whether a run finds what the run before it left, rather than the state as given."""
    given: frozenset[int] = frozenset()
    """Addresses of the inputs of the run under way."""
    _drawn: list[Tensor] = field(default_factory=list)
    _asked: tuple[float, float, int] | None = None
    _placed: bool | None = None
    _written: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def after_calls(self, feed: Feed, values: list[Tensor], calls: int) -> Iterator[None]:
        """Runs inside find the state that a number of calls leave. Raises what the model raises."""
        given = self.state
        try:
            self.run(feed, values)
            self.going_on = True
            for _ in range(calls - 1):
                self.run(feed, values)
            self.state = state_of(self.function, {id(t) for t in (*self.parameters, *self.buffers)})
            self.going_on = False
            yield
        finally:
            self.going_on, self.state = False, given

    def contents(self) -> dict[str, Any]:
        """What the model holds now beside weights and buffers."""
        return contents(self.function, {id(t) for t in (*self.parameters, *self.buffers)})

    def addresses(self) -> frozenset[int]:
        """The storages of the weights."""
        return frozenset(p.untyped_storage().data_ptr() for p in self.parameters if p.numel())

    def draw(self, scale: float, gain: float, seed: int) -> None:
        """The user's own weights plus noise of ``scale`` of their spread, matrices then times ``gain``."""
        self.seed = seed
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
        """Put the weights drawn last into the model, in float64 or as they are, and all else as it was given."""
        if not self.going_on:
            self.state.restore()
        if self._placed is not wide or self.writes:
            for parameter, drawn in zip(self.parameters, self._drawn, strict=False):
                made = with_digits(drawn) if wide and drawn.dtype in NARROW else drawn.clone()
                parameter.data = _off_by_roundings(made, self.nudged) if self.nudged else made
            self._placed = wide
            self._written = [times_written(p) for p in self.parameters]
        for buffer, kept in zip(self.buffers, self.kept, strict=True):
            made = kept.clone()
            buffer.data = widened(made) if wide else made

    @contextlib.contextmanager
    def off_by_roundings(self, pattern: int) -> Iterator[None]:
        """Runs inside are with weights that are each off by a rounding."""
        self.nudged, self._placed = pattern, None
        try:
            yield
        finally:
            self.nudged, self._placed = 0, None

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
            self.state.restore()
            with torch.no_grad():
                for parameter, own in zip(self.parameters, self.own, strict=False):
                    parameter.data = own
                for buffer, tensor, kept in zip(self.buffers, held, self.kept, strict=True):
                    buffer.data = tensor
                    buffer.copy_(kept)

    @contextlib.contextmanager
    def prepared(self, feed: Feed, values: list[Tensor], wide: bool) -> Iterator[list[Tensor]]:
        """The weights drawn last in place, all else as it was given. Yields the values as the model gets them."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(chance(self.seed))
            stack.enter_context(plainly(self.grad))
            self.place(wide)
            values = [v.clone() for v in values]
            if wide:
                default = torch.get_default_dtype()
                stack.callback(torch.set_default_dtype, default)
                torch.set_default_dtype(torch.float64)
                values = [
                    with_digits(v) if leaf.role is Role.TOKENS and v.dtype in NARROW else widened(v)
                    for leaf, v in zip(feed.leaves, values, strict=True)
                ]
            if self.grad and self.leaves_grad:
                values = asking(values)
            self.given = frozenset(v.untyped_storage().data_ptr() for v in values)
            if wide:
                stack.enter_context(Widen())  # type: ignore[no-untyped-call]  # torch leaves it without types
            yield values

    def run(self, feed: Feed, values: list[Tensor], *around: contextlib.AbstractContextManager[Any]) -> Ran:
        """One run. Raises what the model raises."""
        noting = _Noting()
        found = token_outputs(self.call(feed, values, *around, noting), feed)
        outputs = tuple(_as_rows(o.value.detach(), feed) for o in found)
        return Ran(outputs, tuple(o.offset for o in found), tuple(noting.read), noting.way)

    def call(self, feed: Feed, values: list[Tensor], *around: contextlib.AbstractContextManager[Any]) -> Any:
        """What the model returns. Raises what the model raises, and TimeIsUp if it is too late for a run."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.clock.run(f"the model, on {feed.rows} rows of {feed.length}", least=True))
            values = stack.enter_context(self.prepared(feed, values, self.wide))
            for one in around:
                stack.enter_context(one)
            return call_with(self.function, feed.filled(values))


def _as_rows(value: Tensor, feed: Feed) -> Tensor:
    """``[rows, positions, features]`` float64."""
    value = torch.view_as_real(value) if value.is_complex() else value
    value = value.double()
    if feed.batch_dim is None:
        value = value.movedim(feed.time_dim, 0).unsqueeze(0)
    else:
        value = value.movedim((feed.batch_dim, feed.time_dim), (0, 1))
    return value.reshape(value.shape[0], value.shape[1], -1)


def asking(values: list[Tensor]) -> list[Tensor]:
    """Inputs of numbers as tensors that ask for gradients; not leaves, so that they may be written."""
    return [v.requires_grad_().clone() if v.is_floating_point() else v for v in values]


def _off_by_roundings(value: Tensor, pattern: int) -> Tensor:
    """Each element times one plus or minus a rounding of float64."""
    if value.dtype != torch.float64:
        return value
    line = torch.arange(value.numel(), dtype=torch.float64).reshape(value.shape)
    return value * (1 + 4e-16 * torch.cos((2 + pattern) * line))


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
    """A model or a function, with what modules it holds. Raises Unfit where it cannot be called or has no weights."""
    if not callable(model):
        raise Unfit(f"the model is of type {type(model).__name__}, which cannot be called", "give an nn.Module")
    function = model
    if isinstance(model, nn.Module):
        small = sum(p.numel() for p in model.parameters()) <= _MOST_WEIGHTS
        if small:
            with contextlib.suppress(Exception):  # what cannot be copied is put back afterwards
                function = copy.deepcopy(model).cpu()
    modules = [function] if isinstance(function, nn.Module) else list(modules_in(function, 0, set()))
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
    if any(tensor.is_meta for tensor in (*made.parameters, *made.buffers)):
        action = "give it weights: model.to_empty(device='cpu'), and values"
        raise Unfit("the model's weights are on the meta device and have no values", action)
    if sum(p.numel() for p in made.parameters) <= _MOST_WEIGHTS:
        made.own = [p.data for p in made.parameters]
    made.state = state_of(function, seen)
    return made
