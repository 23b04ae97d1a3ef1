"""The one module that touches private parts of torch for tracing: when torch moves them, this file changes."""

from __future__ import annotations

import contextlib
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from meshwright.compiler.graph.fake import fake_mode
from meshwright.compiler.rules import has_rule

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "compiling",
    "decomposed",
    "exporting",
    "functionalized",
    "graph_module",
    "is_mutable",
    "is_random",
    "lifted_constants",
    "mark_stepped",
    "overload_name",
    "plain_form",
    "times_written",
    "trace",
    "traced_graph",
    "user_stack_traces",
    "without_export_chatter",
    "write_code",
    "written_in_ops",
]


def trace(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """The ATen graph of ``function`` on fake tensors, below autograd: ``torch.autograd.grad`` may be called in it.

    An op that has no rule, but a decomposition into core ops, is decomposed.
    """
    with fake_mode():
        made = make_fx(function, _without_rules(), tracing_mode="real", _allow_non_fake_inputs=True)(*args)
    assert isinstance(made, fx.GraphModule)
    return made


@cache
def _without_rules() -> dict[OpOverload, Callable[..., Any]]:
    table = core_aten_decompositions()
    # decompositions of Fourier transforms write into views of their result
    ops = [op for op in table if isinstance(op, OpOverload) and "fft" not in str(op)]
    return {op: table[op] for op in ops if not has_rule(overload_name(op), torch.Tag.pointwise in op.tags)}


def written_in_ops(*ops: OpOverload) -> dict[OpOverload, Callable[..., Any]]:
    """How torch writes these ops in other ones, for those that it tells of."""
    found = get_decompositions(list(ops))
    return {op: found[op] for op in ops if op in found}


def decomposed(op: OpOverload) -> Callable[..., Any] | None:
    """How torch writes one op in other ones: as registered, or as the op itself is composed. None if it does not."""
    found = get_decompositions([op]).get(op)
    if found is not None:
        return found
    return op.decompose if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd) else None


def plain_form(op: Any) -> Callable[..., Any] | None:
    """How an op that is given functions computes without a compiler, as Python on tensors; None if it has no such."""
    if not isinstance(op, HigherOrderOperator):
        return None
    found = op.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    return found if callable(found) else None


def overload_name(target: OpOverload) -> str:
    """``torch.ops.aten.add.Tensor`` -> ``aten.add.Tensor``."""
    schema = target._schema
    return f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"


def traced_graph() -> fx.Graph:
    """The graph that :func:`trace` is building, to be called from within the traced function."""
    mode = get_proxy_mode()
    assert mode is not None, "no trace is running"
    graph = mode.tracer.graph
    assert isinstance(graph, fx.Graph)
    return graph


def functionalized(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with every write into a tensor replaced by a new tensor."""
    made: Callable[..., Any] = torch.func.functionalize(function, remove="mutations")
    return made


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true: torch's optimizers then keep their step counters as tensors
    instead of calling ``.item()``, and skip the checks of where those tensors live."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def graph_module(root: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """A module around a graph whose Python code is written when somebody runs or reads it."""
    return _LazyGraphModule(root, graph)


def write_code(module: fx.GraphModule) -> None:
    """Write the Python code of a module now: threads that run it must not all begin to write it."""
    _LazyGraphModule.force_recompile(module)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Make ``torch.compiler.is_exporting()`` true: models then take the way that they take in an export."""
    before = torch.compiler._is_exporting_flag
    torch.compiler._is_exporting_flag = True
    try:
        with compiling():
            yield
    finally:
        torch.compiler._is_exporting_flag = before


def is_mutable(target: Any) -> bool:
    """Whether the op writes into one of its arguments."""
    return isinstance(target, OpOverload) and bool(target._schema.is_mutable)


def is_random(target: Any) -> bool:
    """Whether the op draws from torch's global generator."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def lifted_constants(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The real tensors that a trace met and keeps as attributes, by attribute name."""
    found: dict[str, torch.Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target), None)
            if isinstance(value, torch.Tensor):
                found[str(node.target)] = value
    return found


@contextlib.contextmanager
def user_stack_traces(keep: Callable[[str], bool]) -> Iterator[None]:
    """Within the context, traced nodes remember every frame whose file ``keep`` accepts, not only ``forward``s."""

    def chosen(self: fx.proxy.TracerBase, summary: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list([frame for frame in summary if keep(frame.filename)])

    with mock.patch.object(fx.proxy.TracerBase, "_filter_traceback_frames", chosen):
        yield


@contextlib.contextmanager
def without_export_chatter() -> Iterator[None]:
    """Export logs what it then raises, and prints the graph as far as it came; the diagnostic says it once and in the
    user's terms."""
    from torch.export import _trace as tracing  # slow to import, and wanted by those who capture alone

    names = ("torch.export", "torch._export", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), mock.patch.object(tracing, "print", _unsaid, create=True):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _unsaid(*told: object, **how: object) -> None:
    """In the place of ``print``."""


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell torch's learning-rate schedulers, which warn otherwise, that the optimizer has made its step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # the attribute that schedulers set and read


def times_written(tensor: torch.Tensor) -> int:
    """How often the tensor has been written in place."""
    return tensor._version


def untraced() -> contextlib.AbstractContextManager[None]:
    """Compute with real values while a trace is under way: what is done inside is not recorded."""
    manager: contextlib.AbstractContextManager[None] = _disable_current_modes()
    return manager
