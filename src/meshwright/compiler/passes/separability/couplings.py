"""Where samples of a batch couple: the step is cut into microbatches of one sample, by the rules of its ops, and what
has to be known of all of them before they can go on is a coupling.

A loss that is a sum over samples, divided by counts of the whole batch, has none: it is owed to the end. It does not
matter for this how large the step is, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.graph.adapter import graph_module
from meshwright.compiler.graph.calls import op_call, operand_nodes
from meshwright.compiler.graph.program import Graph, Signature, StepProgram, Value, annotation
from meshwright.compiler.graph.redistribute import moves, redistribute
from meshwright.compiler.mesh import MICRO, Mesh, Segment, Sharding
from meshwright.compiler.mesh_paths import steps
from meshwright.compiler.passes.declared import GLOBAL, names_of
from meshwright.compiler.passes.placement import Placement
from meshwright.compiler.passes.propagate import propagate
from meshwright.compiler.rules import rule_of
from meshwright.compiler.rules.rule import OpCall

Kind = Literal["batch statistic", "balance loss", "contrastive loss", "counted over the batch", "function of the batch"]
KINDS: tuple[Kind, ...] = (
    "batch statistic",
    "counted over the batch",
    "contrastive loss",
    "balance loss",
    "function of the batch",
)
"""Of couplings at one line the first counts."""

_ONE_BY_ONE = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "topk", "kthvalue")
"""Ops that give a sample its place among others."""
_COUNTING = ("histc", "bincount")
_PRODUCTS = ("mul", "einsum", "dot", "mm", "bmm")
_COMPARING = ("einsum", "mm", "bmm", "addmm", "softmax", "log_softmax", "logsumexp", "cdist", "max", "amax", "argmax")
"""Ops of losses that compare samples with each other."""


@dataclass(frozen=True)
class Coupling:
    """A line of the user's that couples samples."""

    kind: Kind
    origin: Origin
    node: str
    """The first op that needs other samples, by the name of its node in ``micro``."""
    op: str
    feeds: tuple[Value, ...]
    """Of the step's outputs, the loss and the buffers that are made of it."""

    @property
    def names(self) -> tuple[str, ...]:
        """What declarations call it."""
        return names_of(self.origin, self.kind)


def couplings(program: StepProgram) -> tuple[Coupling, ...]:
    """All couplings of the forward pass, in its order, one for each line of the user's. A batch of one sample has
    none."""
    if program.batch_size < 2:
        return ()
    mesh = Mesh(((MICRO, program.batch_size),))
    placed = propagate(_forward(program.micro), mesh, _one_by_one(program), meanings=GLOBAL)
    found: dict[tuple[str, str, int], list[Coupling]] = {}
    compared: set[fx.Node] = set()
    for node in placed.module.graph.nodes:
        if _gathers(node, mesh):
            for coupling in _told(node, placed):
                if coupling.kind == "contrastive loss":
                    compared.update(_after(node))
                elif node.all_input_nodes[0] in compared and coupling.kind != "counted over the batch":
                    coupling = replace(coupling, kind="contrastive loss")  # a softmax over what was compared
                place = coupling.origin
                found.setdefault((place.module, place.file, place.line), []).append(coupling)
    return tuple(min(alike, key=lambda c: KINDS.index(c.kind)) for alike in found.values())


def _forward(graph: Graph) -> Graph:
    """The forward pass alone, with the outputs that it makes."""
    new, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.module.graph.nodes:
        ours = node.op == "placeholder" or (node.op == "call_function" and annotation(node).phase == "forward")
        if ours and all(n in copies for n in node.all_input_nodes):
            copies[node] = new.node_copy(node, copies.__getitem__)
    made = {v: copies[n] for v, n in graph.outputs().items() if isinstance(n, fx.Node) and n in copies}
    new.output(tuple(made.values()))
    return Graph(graph_module(graph.module, new), Signature(graph.signature.inputs, tuple(made)))


def _one_by_one(program: StepProgram) -> Placement:
    """Every sample in a microbatch of its own."""

    def lies(shape: tuple[int, ...], dim: int | None) -> Sharding:
        return Sharding(tuple((Segment(n, (MICRO,) if d == dim else ()),) for d, n in enumerate(shape)))

    inputs = {
        Value("batch", name): lies(spec.shape, program.batch_dims.get(name)) for name, spec in program.batch.items()
    }
    outputs = program.micro.signature.outputs
    return Placement(inputs, {}, may_owe=frozenset(v for v in outputs if v.kind in ("gradient", "loss", "buffer")))


def _gathers(node: fx.Node, mesh: Mesh) -> bool:
    """Whether a node brings together what several microbatches hold."""
    if node.target is not redistribute or annotation(node).phase != "forward":
        return False
    _, source, target = moves(node)
    return any(MICRO in step.axes and step.kind not in ("shard", "owe") for step in steps(source, target, mesh))


def _told(node: fx.Node, graph: Graph) -> Iterator[Coupling]:
    """The couplings of the ops for which something was brought together: the first that reads it, and others that could
    not have taken it owed. What is merely returned couples nothing."""
    calls = [(user, call) for user in node.users if user.op == "call_function" and (call := op_call(user)) is not None]
    for number, (user, call) in enumerate(calls):
        if number == 0 or _needs(user, call, node):
            kind = _kind(node, call.name.split(".")[1], known=rule_of(call) is not None)
            yield Coupling(kind, annotation(user).origin, user.name, call.name, _feeds(node, graph))


def _needs(user: fx.Node, call: OpCall, node: fx.Node) -> bool:
    """Whether an op could not take a value as a sum that is owed: it is not linear in it, or has samples beside it."""
    rule, operands = rule_of(call), operand_nodes(user)
    if rule is None or not any(operands.index(node) in group for group in rule.linear):
        return True
    return any(MICRO in (annotation(n).sharding or Sharding(())).axes for n in operands)


def _kind(node: fx.Node, op: str, known: bool) -> Kind:
    _, source, _ = moves(node)
    if op in _COUNTING:
        return "balance loss" if _multiplied(node) else "counted over the batch"
    if op in _ONE_BY_ONE or (MICRO in source.axes and not known):
        return "counted over the batch"
    if MICRO in source.axes:
        return "contrastive loss" if op in _COMPARING else "counted over the batch"
    if _returns(node):
        return "batch statistic"
    return "balance loss" if _multiplied(node) else "function of the batch"


def _returns(node: fx.Node) -> bool:
    """Whether what was brought together is used on samples again, as a mean that is subtracted from them is."""
    return any(
        MICRO in (annotation(after).sharding or Sharding(())).axes
        for after in _after(node)
        if annotation(after).phase == "forward" and after.op == "call_function"
    )


def _multiplied(node: fx.Node) -> bool:
    """Whether it is multiplied by another sum over samples, one that was brought together or one that is owed."""
    made = {node, *_after(node)}
    for after in made:
        call = op_call(after) if after is not node else None
        if call is None or call.name.split(".")[1] not in _PRODUCTS:
            continue
        others = [n for n in after.all_input_nodes if n not in made]
        if any(_sum_over_samples(other) for other in others):
            return True
    return False


def _sum_over_samples(node: fx.Node) -> bool:
    """Whether a value is one: it owes a sum, or what it owed was brought together."""
    if MICRO in (annotation(node).sharding or Sharding(())).owed:
        return True
    return node.target is redistribute and MICRO in moves(node)[1].owed


def _feeds(node: fx.Node, graph: Graph) -> tuple[Value, ...]:
    after = {node, *_after(node)}
    return tuple(
        value
        for value, made in graph.outputs().items()
        if isinstance(made, fx.Node) and made in after and value.kind in ("loss", "buffer", "result")
    )


def _after(node: fx.Node) -> Iterator[fx.Node]:
    """All that is computed from a node in the forward pass."""
    seen: set[fx.Node] = set()
    waiting = list(node.users)
    while waiting:
        one = waiting.pop()
        if one not in seen and (one.op == "call_function" and annotation(one).phase == "forward"):
            seen.add(one)
            waiting.extend(one.users)
            yield one
