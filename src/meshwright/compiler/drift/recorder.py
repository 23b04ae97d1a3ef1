"""Sees every op of a run: which there are, on what they work, and what comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compiler.causality.call import bind, tensors_in
from meshwright.compiler.causality.interpreter import is_view
from meshwright.compiler.causality.places import user_place
from meshwright.compiler.drift.step import Key, Operand, Step, Trace
from meshwright.compiler.graph.adapter import OpOverload, TorchDispatchMode, is_mutable, is_random, overload_name
from meshwright.compiler.graph.dtypes import short_name

_MOVES = frozenset(
    "clone detach alias lift_fresh lift_fresh_copy contiguous _unsafe_view view_copy empty empty_like empty_strided "
    "_reshape_alias _reshape_copy resize_ set_ _local_scalar_dense is_same_size".split()
)
"""Ops that compute nothing."""
_LARGEST_CONSTANT = 1 << 16
"""Elements up to which a constant is kept and compared."""
BUDGET = 16_000_000
"""Elements of results that are kept in one run."""


@dataclass(frozen=True)
class _Made:
    """What is known of a piece of memory."""

    constant: bool
    sources: frozenset[int]


def base_name(func: Any) -> str:
    """``aten.add_.Tensor`` -> ``aten.add``: writing in place is no other op; nor are the forms of a batch norm."""
    if not isinstance(func, OpOverload):
        return str(func)
    space, _, base = func._schema.name.partition("::")
    if "batch_norm" in base:
        return f"{space}.batch_norm"
    return f"{space}.{base.rstrip('_') if not base.startswith('__') else base}"


def is_cast(func: Any) -> bool:
    """Whether an op may change a dtype and nothing else."""
    return isinstance(func, OpOverload) and func._schema.name in ("aten::_to_copy", "aten::copy_", "aten::to")


def computes(func: Any) -> bool:
    """Whether an op is one to be compared."""
    if not isinstance(func, OpOverload):
        return True
    return not is_view(func) or is_mutable(func) if func._schema.name.partition("::")[2] not in _MOVES else False


class Where:
    """The path of the module whose ``forward`` runs, and how many of each op it has had."""

    def __init__(self) -> None:
        self.stack: list[str] = [""]
        self.counts: Counter[tuple[str, str]] = Counter()

    def key(self, func: Any) -> Key:
        """The key of the next op."""
        name = base_name(func)
        place = (self.stack[-1], name)
        number = self.counts[place]
        self.counts[place] += 1
        return (*place, number)

    def follow(self, modules: list[nn.Module]) -> list[Any]:
        """Hooks, to be removed, that keep the stack."""
        handles: list[Any] = []
        for root in modules:
            for path, module in root.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # it takes no hooks: its ops are those of the module around it
                handles.append(module.register_forward_pre_hook(self._entering(path)))
                handles.append(module.register_forward_hook(self._leaving, always_call=True))
        return handles

    def _entering(self, path: str) -> Any:
        def enter(module: nn.Module, given: Any) -> None:
            self.stack.append(path)

        return enter

    def _leaving(self, module: nn.Module, given: Any, returned: Any) -> None:
        if len(self.stack) > 1:
            self.stack.pop()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it without types
    """A run as a :class:`Trace`; ``variables`` are inputs and weights: what is no constant."""

    supports_higher_order_operators = True

    def __init__(self, where: Where, variables: list[Tensor], buffers: list[Tensor], budget: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without types
        self.where = where
        self.trace = Trace()
        self.left = budget
        self._made: dict[int, _Made] = {}
        self._buffers = {_address(b) for b in buffers if b.is_floating_point()}
        self._written: set[int] = set()
        for value in variables:
            self._made[_address(value)] = _Made(False, frozenset())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [*_leaves(list(args)), *_leaves(list(kwargs.values()))]
        tensors = [v for v in given if isinstance(v, Tensor)]
        operands = tuple(_operand(t) for t in tensors)
        known = [self._known(t) for t in tensors]
        constants = {i: t.detach().clone() for i, t in enumerate(tensors) if known[i].constant and _small(t)}
        out = func(*args, **kwargs)
        outs = tensors_in(out)
        random = _draws(func, args, kwargs)
        constant = all(k.constant for k in known) and not random
        sources = frozenset(s for k in known for s in k.sources)
        if not computes(func):
            self._keep(outs, tensors, _Made(constant, sources))
            return out
        cast = is_cast(func)
        key = ("", "cast", 0) if cast else self.where.key(func)
        number = len(self.trace.steps)
        step = Step(
            number,
            key,
            overload_name(func) if isinstance(func, OpOverload) else str(func),
            user_place(),
            operands,
            tuple(_operand(t) for t in outs),
            tuple(v for v in given if not isinstance(v, Tensor) and _tells(v)),
            constants if not constant else {},
            sources,
            not constant,
            random,
            cast,
            isinstance(func, OpOverload) and torch.Tag.dynamic_output_shape in func.tags,
            self._value(outs) if not cast else None,
        )
        self.trace.steps.append(step)
        made = _Made(constant, frozenset((number,)))
        for target in _written(func, args, kwargs):
            before = self._known(target)
            outs = [o for o in outs if _address(o) != _address(target)]
            # what is left of the memory as it was counts as well
            whole = cast and target.numel() * target.itemsize == target.untyped_storage().nbytes()
            kept = made if whole else _Made(made.constant and before.constant, made.sources | before.sources)
            self._made[_address(target)] = kept
            if _address(target) in self._buffers:
                self._written.add(number)
        self._keep(outs, [], made)
        return out

    def end(self, outputs: list[Tensor]) -> Trace:
        """The trace of a run that has returned ``outputs``."""
        sources = frozenset(s for o in outputs for s in self._known(o).sources)
        self.trace.mark(sources, frozenset(self._written))
        return self.trace

    def _known(self, tensor: Tensor) -> _Made:
        return self._made.get(_address(tensor)) or _Made(True, frozenset())

    def _keep(self, outs: list[Tensor], given: list[Tensor], made: _Made) -> None:
        addresses = {_address(t) for t in given}
        for out in outs:
            if _address(out) not in addresses:
                self._made[_address(out)] = made

    def _value(self, outs: list[Tensor]) -> Tensor | None:
        if not outs or outs[0].numel() > self.left:
            return None
        self.left -= outs[0].numel()
        return outs[0].detach().clone()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if not is_mutable(func):
        return []
    bound = bind(func, args, kwargs)
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for name in names for t in tensors_in(bound.get(name))]


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the op draws by chance: an attention only if it drops."""
    return is_random(func) and bool(bind(func, args, kwargs).get("dropout_p", 1.0))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _small(tensor: Tensor) -> bool:
    return tensor.numel() <= _LARGEST_CONSTANT


def _operand(tensor: Tensor) -> Operand:
    ordered = tensor.is_contiguous()
    return Operand(short_name(tensor.dtype), tuple(tensor.shape), tensor.is_floating_point(), ordered)


def _tells(value: Any) -> bool:
    """Whether an argument is of what is computed, and not of where or in which dtype."""
    return isinstance(value, bool | int | float | str)
