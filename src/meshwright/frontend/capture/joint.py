"""The exported loss, interpreted with our lowerings and differentiated, as one flat ATen graph.

Alongside the graph is built, each new node is told from which node of the exported graph it comes;
a backward node comes from where its forward node came from.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from meshwright.compiler.diagnostics import MeshwrightError, Origin, error
from meshwright.compiler.graph.adapter import HigherOrderOperator, is_mutable, is_random, trace, traced_graph
from meshwright.compiler.graph.program import Annotation
from meshwright.frontend.capture.lowering import Site, lowering_of
from meshwright.frontend.capture.lowering.site import Folded
from meshwright.frontend.capture.origins import Blocks, error_origin, node_origin
from meshwright.frontend.capture.writes import without_writes

RECURRENT = ("gru", "lstm", "rnn_tanh", "rnn_relu")
"""ATen tags them random, for the dropout that they may do."""
SKIPPED = {
    "aten._assert_tensor_metadata",
    "aten._assert_async",
    "aten._assert_scalar",
    "aten.sym_constrain_range",
    "aten.sym_constrain_range_for_size",
}


@dataclass
class Marker:
    """Attributes the nodes of the graph under construction to their sources."""

    blocks: Blocks
    source: fx.Node | None = None
    phase: str = "forward"
    marks: dict[str, tuple[fx.Node | None, str]] = field(default_factory=dict)
    last: fx.Node | None = None

    def switch(self, source: fx.Node | None, phase: str | None = None) -> None:
        """What is added from now on comes from ``source``."""
        root = traced_graph()._root
        at = root.prev
        while at is not self.last and at is not root:
            self.marks[at.name] = (self.source, self.phase)
            at = at.prev
        self.last = root.prev if root.prev is not root else None
        self.source = source
        self.phase = phase or self.phase


@dataclass
class Interpreter:
    """Runs an exported graph on traced tensors."""

    prefix: str
    marker: Marker
    key: Tensor
    folded: dict[fx.Node, Folded]
    constants: dict[str, Tensor]
    counter: Iterator[int] = field(default_factory=lambda: itertools.count(0))
    tagged: dict[Any, fx.Node] = field(default_factory=dict)
    """Autograd nodes and the nodes of the exported graph that made them."""

    def run(self, module: fx.GraphModule, inputs: list[Any], grad: bool = True) -> list[Any]:
        """The outputs of a graph for given inputs, in order."""
        values: dict[fx.Node, Any] = {}
        places = iter(inputs)
        with torch.set_grad_enabled(grad):
            for node in module.graph.nodes:
                if node.op == "placeholder":
                    values[node] = next(places)
                elif node.op == "get_attr":
                    values[node] = operator.attrgetter(str(node.target))(module)
                elif node.op == "output":
                    found = fx.map_arg(node.args[0], lambda n: values[n])
                    return list(found) if isinstance(found, (tuple, list)) else [found]
                else:
                    self.marker.switch(node)
                    values[node] = self._node(node, values)
                    self._tag(node, values[node])
        raise AssertionError("an FX graph has an output")

    def _node(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args: Any
        kwargs: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        target: Any = node.target
        if target is operator.getitem:
            return args[0][args[1]]
        if isinstance(target, HigherOrderOperator):
            return self._region(node, target, args)
        if str(target).rpartition(".")[0] in SKIPPED:
            return None
        place = node_origin(node, self.prefix)
        lowering = lowering_of(target)
        try:
            if lowering is not None:
                site = Site(node, place, self.key, lambda: next(self.counter), self.folded, self.constants, values)
                return lowering(site, *args, **kwargs)
            if target in (torch.ops.aten.detach_.default, torch.ops.aten.lift_fresh_copy.default):
                return args[0]
            if target is torch.ops.meshwright.constant.default:
                return args[0].detach()
            _check(target, place)
            return target(*args, **kwargs)
        except MeshwrightError:
            raise
        except Exception as failure:
            raise error(
                "E0257",
                f"'{target}' cannot be traced: {type(failure).__name__}: {str(failure).splitlines()[0][:300]}",
                place,
                "replace the operation, or register it as an operator with torch.library and register_autograd",
            ) from failure

    def _region(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> Any:
        """Regions that export keeps apart: no_grad, autocast, activation checkpoints."""
        name = target.name() if callable(getattr(target, "name", None)) else str(target)
        if "set_grad_enabled" in name:
            enabled, module, *inputs = args
            return tuple(self.run(module, inputs, grad=enabled))
        if "autocast" in name:
            at = next(i for i, a in enumerate(args) if isinstance(a, fx.GraphModule))
            device, dtype, enabled, cache = args[:at]
            with torch.autocast(device, dtype, enabled, cache):
                return tuple(self.run(args[at], list(args[at + 1 :]), torch.is_grad_enabled()))
        if "checkpoint" in name:
            module, *inputs = args
            return tuple(self.run(module, inputs, torch.is_grad_enabled()))
        raise error(
            "E0257",
            f"the higher-order operator '{name}' has no meaning in a captured step",
            node_origin(node, self.prefix),
            "write the region without it",
        )

    def _tag(self, node: fx.Node, value: Any) -> None:
        """Remember which autograd nodes this node made."""
        pending = [t.grad_fn for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.grad_fn is not None]
        while pending:
            at = pending.pop()
            if at in self.tagged:
                continue
            self.tagged[at] = node
            pending.extend(after for after, _ in at.next_functions if after is not None)

    def mark_backward(self) -> None:
        """From here on, what an autograd node adds is marked with its forward node."""
        for at, node in self.tagged.items():
            at.register_prehook(_switching(self.marker, node))


def _switching(marker: Marker, node: fx.Node) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        marker.switch(node)

    return hook


def _check(target: Any, place: Origin) -> None:
    name = str(target).removeprefix("aten.").partition(".")[0]
    if name in RECURRENT:
        raise error(
            "E0257",
            f"'{name}' is a fused recurrent layer, of which only the kernel knows the steps",
            place,
            "write the recurrence as operations in forward",
        )
    if is_random(target):
        raise error(
            "E0251",
            f"'{name}' draws random numbers from the device's generator, which no other mesh could repeat",
            place,
            "use torch.nn.functional.dropout, or draw the numbers outside and pass them in the batch",
        )
    if is_mutable(target):
        raise error(
            "E0257", f"'{name}' writes into a tensor in a way that cannot be undone", place, "write it out of place"
        )


@dataclass
class Joint:
    """The joint graph. Its inputs and outputs are those of the function that was traced, in order."""

    module: fx.GraphModule
    has_gradient: list[bool]


def trace_joint(
    module: fx.GraphModule,
    arguments: Callable[[list[Tensor], list[Tensor]], list[Any]],
    parameters: list[Tensor],
    others: list[Tensor],
    trainable: list[bool],
    casts: list[torch.dtype],
    reduce: torch.dtype | None,
    outputs: tuple[int, list[tuple[int, torch.dtype]]],
    folded: dict[fx.Node, Folded],
    masks: dict[str, int],
    blocks: Blocks,
    prefix: str,
    scaled: bool = False,
) -> Joint:
    """Trace loss, gradients and buffers.

    ``parameters`` are fakes at rest; ``casts`` their dtypes in computation. ``others`` are the further inputs,
    the key first, then whatever ``arguments(parameters, others)`` needs to give the inputs of ``module``.
    ``outputs`` says which output of ``module`` is the loss and which are buffers (with their dtypes). The traced
    outputs are ``(loss, *buffers, *gradients of trainable parameters that have one)``. ``masks`` says which of
    ``others`` the constant masks are. ``scaled``: the last of ``others`` is what gradients begin at.
    """
    marker = Marker(blocks)
    flags: list[bool] = []

    def step(leaves: list[Tensor], rest: list[Tensor]) -> list[Tensor]:
        root = traced_graph()._root
        marker.last = root.prev
        cast = [p.to(d) if p.dtype != d else p for p, d in zip(leaves, casts, strict=True)]
        fixed = {name: rest[at] for name, at in masks.items()}
        interpreter = Interpreter(prefix, marker, rest[0], folded, fixed)
        found = interpreter.run(module, arguments(cast, rest))
        loss = found[outputs[0]]
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()
        kept = [found[i].detach().to(dtype) for i, dtype in outputs[1]]
        wanted = [p for p, t in zip(leaves, trainable, strict=True) if t]
        grads: list[Tensor | None] = [None] * len(wanted)
        if loss.requires_grad:
            interpreter.mark_backward()
            marker.switch(None, "backward")
            # not ones_like, which would wait for the loss
            begin = rest[-1].to(loss.dtype) if scaled else torch.full((), 1.0, dtype=loss.dtype)
            grads = _gradients(loss, wanted, begin)
        flags.extend(g is not None for g in grads)
        given = [g if reduce is None else g.to(reduce) for g in grads if g is not None]
        marker.switch(None)
        return [loss.detach(), *kept, *given]

    leaves = [p.detach().requires_grad_(t) for p, t in zip(parameters, trainable, strict=True)]
    made = trace(step, leaves, others)
    describe(made.graph, marker, prefix)
    without_writes(made.graph)
    return Joint(made, flags)


def _gradients(loss: Tensor, wanted: list[Tensor], seed: Tensor) -> list[Tensor | None]:
    try:
        return list(torch.autograd.grad(loss, wanted, seed, allow_unused=True))
    except RuntimeError as failure:
        raise error(
            "E0257",
            f"the loss cannot be differentiated: {str(failure).splitlines()[0][:300]}",
            error_origin(failure.__traceback__),
            "give every custom operator a gradient with torch.library.register_autograd",
        ) from failure


def describe(graph: fx.Graph, marker: Marker, prefix: str) -> None:
    """Write the annotation of every traced node: type, phase, and where it comes from."""
    for node in graph.nodes:
        source, phase = marker.marks.get(node.name, (None, "forward"))
        value = node.meta.get("val")
        note = Annotation(phase=phase)  # type: ignore[arg-type]  # forward or backward
        if source is not None:
            note.origin = node_origin(source, prefix)
            note.block = marker.blocks.around(note.origin.module)
        if isinstance(value, Tensor):
            note.shape, note.dtype = tuple(value.shape), value.dtype
        node.meta = {"val": value, "meshwright": note}
