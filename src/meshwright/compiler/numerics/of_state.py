"""Findings about what a step keeps in half precision: weights, counters, second moments, and its loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.graph.adapter import OpOverload, overload_name
from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.graph.program import MASTER_COPY, StepProgram, TensorSpec, Value
from meshwright.compiler.numerics.casts import HALVES, dtype_of, half, is_cast
from meshwright.compiler.numerics.error_model import UNIT, one_rounding, stops_growing
from meshwright.compiler.numerics.finding import Finding
from meshwright.compiler.numerics.looked import Looked

MASTER = (
    'keep the weights in fp32: precision "bf16 compute, fp32 weights", as the key "precision" of what the factory '
    "returns, as --precision of compile and plan, or as the argument precision of meshwright.parallelize; or keep a "
    'master copy of them: numerics = "safe" in the plan'
)
WIDE_STATE = "keep it in fp32: optimizers keep state in the dtype of their weights"


def findings_of_state(looked: Looked, step: StepProgram, single: bool) -> Iterator[Finding]:
    """E0726 to E0729 of the outputs of a graph. ``single``: it is that of one device, and not what ranks run."""
    before = {value: node for node, value in looked.inputs.items()}
    second = frozenset(name.rpartition("/")[0] for name in step.state if _is_second(name, step))
    for value, node in looked.outputs.items():
        if value.kind == "loss":
            yield from _of_loss(looked, node, step.loss_as_written if single else None)
        elif (
            value.kind == "parameter" and half(node) and not step.begins_as_its_parameter(f"{value.name}/{MASTER_COPY}")
        ):
            yield from (
                replace(f, origin=_owner(looked, value.name)) for f in _of_weight(looked, value, node, step, second)
            )
        elif value.kind in ("state", "buffer") and half(node):
            yield from _of_kept(looked, value, node, before.get(value))


def _of_loss(looked: Looked, node: fx.Node, written: torch.dtype | None) -> Iterator[Finding]:
    """``written``: in which dtype torch alone computes the loss, if that is known."""
    source = node.args[0] if is_cast(node) else node
    if isinstance(source, fx.Node) and half(source):
        dtype = _name(source)
        message = f"the loss is computed in {dtype}: changes below {UNIT[dtype]:.2g} of it cannot be seen"
        yield _finding("E0728", looked, source, message, one_rounding(dtype), "fp32", "cast to fp32 before the loss")
    elif written in HALVES and written is not None:
        dtype = short_name(written)
        message = (
            f"as it is written the loss is computed in {dtype}: changes below {UNIT[dtype]:.2g} of it cannot be seen; "
            f"compiled it is computed in {_name_of(node)}"
        )
        advice = "cast to fp32 before the loss"
        yield _finding("E0728", looked, node, message, one_rounding(dtype), "fp32", advice, dtype)


def _of_weight(
    looked: Looked, value: Value, node: fx.Node, step: StepProgram, second: frozenset[str]
) -> Iterator[Finding]:
    """The update of a weight, relative to it, for an optimizer that normalises it (Adam): the learning rate over the
    weight's size, which is ``1 / sqrt(fan in)`` of matrices and 1 of vectors. Of others, the learning rate alone."""
    parameter = step.parameter(value.name)
    rate = step.scalars.get(f"{parameter.group}/lr")
    if rate is None:
        return
    dtype = _name(node)
    relative = rate * (math.sqrt(_fan_in(parameter.spec)) if parameter.name in second else 1)
    if relative >= 2 * UNIT[dtype]:
        return
    message = (
        f"weights are kept in {dtype} alone, and an update of about {relative:.2g} of a weight is less than the "
        f"distance of two neighbours ({2 * UNIT[dtype]:.2g})"
    )
    # of an update below half of that distance, nothing is left
    error = 1.0 if relative < UNIT[dtype] / 2 else min(1.0, one_rounding(dtype) / relative)
    yield _finding("E0726", looked, node, message, error, "master weights", MASTER)


def _is_second(name: str, step: StepProgram) -> bool:
    """Whether a state is a sum or mean of squares of gradients, by which an optimizer divides its updates."""
    return name.rpartition("/")[2] in ("exp_avg_sq", "sum", "square_avg") and bool(step.state[name].shape)


def _fan_in(spec: TensorSpec) -> int:
    return math.prod(spec.shape[1:]) if len(spec.shape) > 1 else 1


def _of_kept(looked: Looked, value: Value, node: fx.Node, before: fx.Node | None) -> Iterator[Finding]:
    dtype = _name(node)
    if before is not None and _counts(node, before):
        message = f"'{value.name}' counts in {dtype}: it stays at {stops_growing(dtype)}"
        yield _finding("E0727", looked, node, message, 1.0, "fp32 state", "count in int64 or fp32")
    elif value.kind == "state" and before is not None and _squares(node):
        what = value.name.rpartition("/")[2]
        message = f"the second moment '{what}' is kept in {dtype}: with beta 0.999 its changes are rounded away"
        made = _finding("E0729", looked, node, message, 1.0, "fp32 state", WIDE_STATE)
        yield replace(made, origin=_owner(looked, value.name.rpartition("/")[0]))


def _owner(looked: Looked, parameter: str) -> Origin:
    """The user's line that reads a parameter, and its module."""
    made = looked.made.get(parameter)
    return made.line if made is not None else Origin(parameter.rpartition(".")[0])


def _counts(node: fx.Node, before: fx.Node) -> bool:
    """Whether a value is the one before and a number."""
    plain = isinstance(node.target, OpOverload) and overload_name(node.target) in ("aten.add.Tensor", "aten.add.Scalar")
    return plain and node.args[0] is before and isinstance(node.args[1], (int, float))


def _squares(node: fx.Node) -> bool:
    """Whether a square is added to a value: by an ``addcmul`` of a tensor with itself, or a product."""
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting and len(seen) < 12:
        at = waiting.pop()
        seen.add(at)
        arguments: tuple[Any, ...] = at.args
        if isinstance(at.target, OpOverload):
            name = overload_name(at.target).split(".")[1]
            if name == "addcmul" and arguments[1] is arguments[2]:
                return True
            if name == "mul" and arguments[0] is arguments[1]:
                return True
            if name in ("add", "mul", "lerp", "_to_copy"):
                waiting += at.all_input_nodes
    return False


def _name(node: fx.Node) -> str:
    dtype = dtype_of(node)
    assert dtype in HALVES
    return short_name(dtype)


def _name_of(node: fx.Node) -> str:
    dtype = dtype_of(node)
    assert dtype is not None
    return short_name(dtype)


def _finding(
    code: str, looked: Looked, node: fx.Node, message: str, error: float, rewrite: str, advice: str, dtype: str = ""
) -> Finding:
    """``dtype``: that which is told of; if none is given, that of the node."""
    origin = looked.origin(node)
    told = dtype or _name(node)
    return Finding(code, message, looked.name, (node.name,), told, 1, "random signs", error, rewrite, origin, advice)
