"""Rules and decisions of calls, each found once: the calls of repeated blocks are equal."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor, fx

from meshwright.compiler.graph.calls import op_call
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.mesh import Mesh, Sharding
from meshwright.compiler.passes.proposals import Held
from meshwright.compiler.passes.strategy import Decision, decide
from meshwright.compiler.rules import rule_of
from meshwright.compiler.rules.rule import OpCall, Rule

Warn = Callable[[str], None]


_DECISIONS: dict[Hashable, tuple[Rule, Decision]] = {}
"""For all graphs and plans of a process; the mesh is part of the key, the rule is held so that its id stays its own."""
_MOST = 100_000


class Questions:
    """Answers for one graph on one mesh. ``whole_contractions``: see :func:`propagate`."""

    def __init__(self, mesh: Mesh, sequence: frozenset[str], whole_contractions: bool, warn: Warn) -> None:
        self._mesh = mesh
        self._sequence = sequence
        self._whole = whole_contractions
        self._warn = warn
        self._without: dict[Hashable, Rule] = {}
        if len(_DECISIONS) > _MOST:
            _DECISIONS.clear()

    def rule(self, call: OpCall) -> Rule:
        """The rule of a call; an op without one needs whole operands, and the user is told."""
        rule = rule_of(call)
        if rule is not None:
            return rule
        if call.key not in self._without:
            self._warn(f"no rule for {call.name}: it runs on whole operands")
            self._without[call.key] = whole_rule(call)
        return self._without[call.key]

    def decision(
        self,
        call: OpCall,
        held: tuple[Held, ...],
        wanted: tuple[Sharding | None, ...] = (),
        keep_storage: bool = False,
        widening: bool = False,
    ) -> Decision:
        """How a call is cut whose operands lie so; see :func:`decide`. ``widening``: it casts to a wider dtype, so
        that what is owed is paid before it."""
        rule = self.rule(call)
        lies = tuple([(h.sharding, tuple(sorted(h.priority.items())), h.bytes) for h in held])
        key = (id(rule), call.key, lies, wanted, keep_storage, widening, self._mesh, self._sequence, self._whole)
        known = _DECISIONS.get(key)
        if known is None:
            made = decide(
                rule,
                held,
                self._mesh,
                wanted=wanted,
                sequence=self._sequence,
                regroups=is_sum(call) or (len(call.operands) == 1 and not call.pointwise and not widening),
                keep_storage=keep_storage,
                whole=self._whole and call.name.startswith("meshwright.einsum"),
            )
            known = _DECISIONS[key] = rule, made
        return known[1]


def whole_rule(call: OpCall) -> Rule:
    """The rule of an op that has none: every dim of every operand is needed entire."""
    sizes: dict[str, int] = {}

    def dims(shape: tuple[int, ...], mark: str) -> tuple[tuple[str, ...], ...]:
        names = tuple(f"{mark}_{d}" for d in range(len(shape)))
        sizes.update(zip(names, shape, strict=True))
        return tuple((n,) for n in names)

    operands = tuple(dims(t.shape, f"in{i}") for i, t in enumerate(call.operands))
    results = tuple(None if t is None else dims(t.shape, f"out{i}") for i, t in enumerate(call.results))
    # nothing is known of the kernel, so it gets what it would get on one device: whole and contiguous
    return Rule(sizes, operands, results, whole=frozenset(sizes), dense=frozenset(range(len(operands))))


def call_of(node: fx.Node) -> OpCall:
    """The call that a node makes; it must be one of an op."""
    call = op_call(node)
    assert call is not None, f"{node.format_node()} calls no op"
    return call


def is_sum(call: OpCall) -> bool:
    """Whether the call adds two tensors of the same type, as they are."""
    types = {*call.operands, *call.results}
    return (
        call.name == "aten.add.Tensor"
        and len(call.operands) == 2
        and len(types) == 1
        and call.kwargs.get("alpha", 1) == 1
    )


def widens(node: fx.Node, call: OpCall) -> bool:
    """Whether the call casts an activation to a wider dtype: what it owes is paid before, in fewer bytes."""
    before, after = node.args[0] if node.args else None, node.meta.get("val")
    value = before.meta.get("val") if isinstance(before, fx.Node) else None
    if call.name != "aten._to_copy.default" or not isinstance(value, Tensor) or not isinstance(after, Tensor):
        return False
    return annotation(node).phase == "forward" and value.dim() > 1 and value.element_size() < after.element_size()
