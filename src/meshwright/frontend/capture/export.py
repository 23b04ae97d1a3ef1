"""``torch.export`` of the user's model and loss, with every refusal told in the user's terms."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from meshwright.compiler.diagnostics import MeshwrightError, Origin, error
from meshwright.compiler.graph.adapter import is_mutable, user_stack_traces, without_export_chatter
from meshwright.compiler.graph.fake import fake_tensor
from meshwright.frontend.capture.attributes import Plainly, buffers_written
from meshwright.frontend.capture.batch import Call, Step, replace
from meshwright.frontend.capture.origins import error_origin, is_users, node_origin
from meshwright.frontend.capture.regions import mark_constants
from meshwright.frontend.capture.stand_in import cast, stand_ins

PREFIX = "model"
"""The name of the user's model within :class:`Step`."""


def export(step: Step, call: Call, found: dict[str, Tensor], compute: torch.dtype | None) -> ExportedProgram:
    """The functional ATen graph of the loss of one batch, composite ops kept whole.

    Parameters, buffers and batch are fake; floating ones have the compute dtype, except buffers, which keep
    their own unless the model then mixes dtypes.
    """
    try:
        return _export(step, call, found, compute, cast_buffers=False)
    except MeshwrightError:
        if compute is None or not any(b.is_floating_point() for b in step.buffers()):
            raise
    return _export(step, call, found, compute, cast_buffers=True)


def _export(
    step: Step, call: Call, found: dict[str, Tensor], compute: torch.dtype | None, cast_buffers: bool
) -> ExportedProgram:
    fakes = {name: fake_tensor(t.shape, cast(t.dtype, compute)) for name, t in found.items()}
    fake_call = replace(call, fakes)
    with (
        stand_ins(step, compute, cast_buffers),
        _refusals(),
        without_export_chatter(),
        user_stack_traces(is_users),
        _no_opaque_gradients(),
        buffers_written(),
        Plainly(),
    ):
        program = torch.export.export(step, fake_call.args, fake_call.kwargs, strict=False)
        _check_sizes(program)
        if any(_writes(node) for module in _graphs(program.graph_module) for node in module.graph.nodes):
            mark_constants(program, PREFIX)
            program = program.run_decompositions({})
    return program


def _graphs(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield part


def _writes(node: fx.Node) -> bool:
    """Whether a node writes into a tensor. Batch norm does so without saying it in its schema."""
    if node.target is torch.ops.aten.batch_norm.default:
        return bool(node.args[5])
    return is_mutable(node.target) and node.target is not torch.ops.aten.detach_.default


def _check_sizes(program: ExportedProgram) -> None:
    """Refuse what depends on the data for its size or for a Python number."""
    for node in program.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else (values,):
            dynamic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) or (
                isinstance(value, Tensor) and any(not isinstance(n, int) for n in value.shape)
            )
            if dynamic:
                name = str(node.target).removeprefix("aten.").partition(".")[0]
                raise error(
                    "E0254",
                    f"the result of '{name}' is a number or a size that depends on the data",
                    node_origin(node, PREFIX),
                    "keep sizes fixed: torch.where, a mask or ignore_index instead of selecting elements or .item()",
                )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn what goes wrong inside export into a diagnostic at the user's line."""
    try:
        yield
    except MeshwrightError:
        raise
    except (Exception, SystemExit) as failure:  # a model that exits is told as well
        raise _told(failure) from None


def _told(failure: BaseException) -> MeshwrightError:
    chain: list[BaseException] = [failure]
    while (after := chain[-1].__cause__ or chain[-1].__context__) is not None and after not in chain:
        chain.append(after)
    for one in chain:
        if isinstance(one, MeshwrightError):
            return one
    place = next((o for one in chain if (o := error_origin(one.__traceback__)).file), None)
    names = {type(one).__name__ for one in chain}
    text = str(chain[-1] if str(chain[-1]) else failure).strip()
    if names & {"GuardOnDataDependentSymNode", "DataDependentOutputException", "UserError"} or "data-dependent" in text:
        return error(
            "E0254",
            "Python code here takes a number or a decision from the data of a tensor",
            place,
            "use torch.where or a mask, so that the same operations run for every batch",
        )
    return error(
        "E0258",
        f"the model fails while it is traced: {type(chain[-1]).__name__}: {_first_lines(text)}",
        place,
        "run one step of the model on this batch with plain PyTorch first",
    )


def _first_lines(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines()[:3] if line.strip())[:400]


@contextlib.contextmanager
def _no_opaque_gradients() -> Iterator[None]:
    """Refuse gradients of the user's own making, which a graph of the forward pass would silently lose."""
    apply = torch.autograd.Function.apply

    def refuse_function(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch._library"):
            return apply.__func__(cls, *args, **kwargs)  # type: ignore[attr-defined]  # a bound classmethod
        raise error(
            "E0255",
            f"'{cls.__qualname__}' is a torch.autograd.Function, whose own gradient cannot be traced",
            _caller(),
            "register it as an operator with torch.library.custom_op and register_autograd",
        )

    def refuse_hook(self: Tensor, hook: Any) -> Any:
        raise error(
            "E0255",
            "a hook on a tensor changes its gradient, which cannot be traced",
            _caller(),
            "write the change as an operation in forward, or register an operator with register_autograd",
        )

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(refuse_function)),
        mock.patch.object(Tensor, "register_hook", refuse_hook),
    ):
        yield


def _caller() -> Origin:
    """The origin of the user's line that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if is_users(file):
            return Origin("", file, line, linecache.getline(file, line).strip())
        frame = frame.f_back
    return Origin()
