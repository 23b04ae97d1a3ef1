"""Walk through the graph of a rank and say of every value which term it is and how it lies."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from meshwright.compiler.analysis.offloading import TO_HOST
from meshwright.compiler.equivalence.communication import FUNCTIONS, REDUCTIONS
from meshwright.compiler.equivalence.findings import UNDECIDED, WRONG, Finding
from meshwright.compiler.equivalence.fit import fit
from meshwright.compiler.equivalence.layout import Layout, Mismatch, reshaped
from meshwright.compiler.equivalence.meaning import SAME, TOTAL, adds, cast_to, is_item, is_view, local_shape
from meshwright.compiler.equivalence.related import UNKNOWN, Held, Related, Unknown
from meshwright.compiler.equivalence.single import Meaning
from meshwright.compiler.equivalence.terms import Known, distributes
from meshwright.compiler.equivalence.written import Place, Written, written
from meshwright.compiler.graph.adapter import OpOverload
from meshwright.compiler.graph.program import Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Mesh, Sharding


@dataclass
class Walk:
    """The walk through one graph. ``inputs`` say what comes in."""

    local: LocalGraph
    name: str
    mesh: Mesh
    meaning: Meaning
    fits: dict[Hashable, Any]
    """What calls of one form on operands that lie alike give: the same for all blocks, and all graphs of one mesh."""
    findings: list[Finding] = field(default_factory=list)
    env: dict[fx.Node, Held] = field(default_factory=dict)
    stores: dict[fx.Node, Value] = field(default_factory=dict)
    """Inputs that may be written into."""
    written_into: dict[fx.Node, Value] = field(default_factory=dict)
    """By node: the input into which it writes its operand."""

    def run(self, inputs: Mapping[Value, Held]) -> dict[Value, Held]:
        """What goes out."""
        nodes = self.local.module.graph.nodes
        placeholders = [n for n in nodes if n.op == "placeholder"]
        for node, value in zip(placeholders, self.local.signature.inputs, strict=True):
            self.env[node] = inputs.get(value, UNKNOWN)
            self.stores[node] = value
        for node in nodes:
            if node.op == "call_function":
                self.env[node] = self._value(node)
        (output,) = (n for n in nodes if n.op == "output")
        pairs = zip(self.local.signature.outputs, output.args[0], strict=True)
        return {v: self.env[n] for v, n in pairs if isinstance(n, fx.Node)}

    def _value(self, node: fx.Node) -> Held:
        try:
            if any(isinstance(self.env[n], Unknown) for n in node.all_input_nodes):
                return UNKNOWN
            if isinstance(node.target, OpOverload):
                return self._op(node)
            return self._function(node)
        except Mismatch as fault:
            self._find(node, UNDECIDED if isinstance(fault, _Undecided) else WRONG, fault)
        return UNKNOWN

    def _find(self, node: fx.Node, code: str, fault: Mismatch) -> None:
        origin = annotation(node).origin
        self.findings.append(
            Finding(
                code, self.name, node.name, fault.message, fault.found, fault.expected, origin if origin.file else None
            )
        )

    def _function(self, node: fx.Node) -> Held:
        """What is no ATen-like op: taking one of several results, and communication."""
        if is_item(node):
            source, index = node.args
            return self.env[source][index]  # type: ignore[index]  # what getitem reads is several
        handler = FUNCTIONS.get(node.target)
        if handler is None:
            raise _Undecided(f"nothing is known of what {getattr(node.target, '__name__', node.target)} gives")

        def given(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self.env[value]
            return [given(v) for v in value] if isinstance(value, list) else value

        if "owned" in node.kwargs or (node.target in REDUCTIONS and len(node.args) > 3 and node.args[3]):
            self._check_owned(node)
        return handler(self.mesh, *(given(a) for a in node.args), **{k: given(v) for k, v in node.kwargs.items()})

    def _check_owned(self, node: fx.Node) -> None:
        """What is reduced where it lies must be read by nothing else."""
        for source in node.all_input_nodes:
            at = source
            while True:
                if len(at.users) > 1:
                    raise Mismatch(f"'{at.name}' is reduced where it lies, and is read by others too")
                value = self.stores.get(at)
                if value is not None and value.kind != "gradient":
                    raise Mismatch(f"the {value.kind} '{value.name}' is reduced where it lies")
                if not isinstance(at.target, OpOverload) or not (at.target in SAME or is_view(at.target)):
                    break
                at = at.all_input_nodes[0]

    def _op(self, node: fx.Node) -> Held:
        first = node.args[0] if node.args else None
        x = self.env.get(first) if isinstance(first, fx.Node) else None
        if isinstance(x, Related):
            if node.target in SAME:
                return x
            if node.target is TO_HOST:
                return self._stored(node)
            if is_view(node.target):
                shape = local_shape(node, x.layout.shape)
                if shape is None:
                    raise _Undecided("the shape that a view gives cannot be read off")
                return Related(x.term, reshaped(x.layout, shape))
            if (
                (target := cast_to(node)) is not None
                and target.is_floating_point
                and self.meaning.terms.is_real(x.term)
            ):
                return x
        places = {n: p for n in node.all_input_nodes if isinstance(p := self.env[n], Place)}
        made, operands = written(node, places)
        held = [self.env[n] for n in operands]
        if made.name == TOTAL or (adds(node) and self._alike(held)):
            return self._sum(node, held)
        return self._call(node, made, held)

    @staticmethod
    def _alike(held: Sequence[Held]) -> bool:
        first, second = held
        return bool(first.layout.segments == second.layout.segments and first.layout.shape == second.layout.shape)

    def _sum(self, node: fx.Node, held: Sequence[Related]) -> Related:
        first = held[0].layout
        for other in held[1:]:
            if other.layout.segments != first.segments:
                raise Mismatch("values that lie differently are added up")
            if other.layout.owed != first.owed:
                axes = sorted(a for a, _ in other.layout.owed ^ first.owed)
                raise Mismatch(
                    f"a value that owes a sum over '{', '.join(axes)}' is added to one that does not: the latter would "
                    "count on every rank"
                )
        filled = first.filled
        for other in held[1:]:
            filled &= other.layout.filled
        filled = frozenset(f for f in filled if f[1] == 0.0)
        layout = Layout(first.segments, first.owed, first.shape, filled)
        return Related(self.meaning.terms.sum([h.term for h in held], node.name), layout)

    def _call(self, node: fx.Node, made: Written, held: Sequence[Related]) -> Held:
        terms = tuple(h.term for h in held)
        candidates = self._candidates(terms, made, node)
        fault: Mismatch | None = None
        for known in candidates:
            try:
                layouts = self._fit(known, made, held, node)
            except Mismatch as reason:
                fault = fault or reason
                continue
            found = [
                None if r is None or lies is None else Related(r, lies)
                for r, lies in zip(known.results, layouts, strict=True)
            ]
            return found if _several(node) else found[0]
        if len(held) == 1 and len(self.meaning.terms.members(terms[0])) > 1:
            return self._term_by_term(node, made, held[0])
        if fault is not None:
            raise fault
        raise self._stranger(node, made, held)

    def _candidates(self, terms: tuple[int, ...], made: Written, node: fx.Node) -> list[Known]:
        """The calls of the step for one device on the same values: first those of the same op and the same name."""
        found = self.meaning.terms.calls.get(terms, [])
        family = made.name.rpartition(".")[0]
        if not terms:
            found = [k for k in found if k.call.name == made.name]
        if len(found) < 2:
            return found
        hint = annotation(node).sharding
        shape = hint.shape if hint is not None else None

        def order(known: Known) -> tuple[bool, bool, bool]:
            first = known.call.results[0]
            return (
                known.call.name.rpartition(".")[0] != family,
                first is None or first.shape != shape,
                known.node.name != node.name,
            )

        return sorted(found, key=order)

    def _fit(self, known: Known, made: Written, held: Sequence[Related], node: fx.Node) -> tuple[Layout | None, ...]:
        lacking = len(known.rule.sizes) > 0 and any(
            f not in {g for dims in known.rule.operands for fs in dims for g in fs} for f in known.rule.sizes
        )
        hint: Sharding | None = annotation(node).sharding if lacking else None
        key = (self.mesh, known.call.key, tuple(h.layout for h in held), made, hint)
        found = self.fits.get(key)
        if found is None:
            try:
                found = fit(known.call, known.rule, [h.layout for h in held], made, hint, self.mesh)
            except Mismatch as fault:
                found = fault
            self.fits[key] = found
        if isinstance(found, Mismatch):
            raise found
        layouts: tuple[Layout | None, ...] = found
        return layouts

    def _term_by_term(self, node: fx.Node, made: Written, x: Related) -> Related:
        """An op of a part of a sum: the sum of what it gives of each term."""
        parts: list[int] = []
        layout: Layout | None = None
        for term in self.meaning.terms.members(x.term):
            one = self._call(node, made, [Related(term, x.layout)])
            known = self.meaning.terms.calls.get((term,), [])
            if not isinstance(one, Related) or not any(
                one.term in k.results and distributes(k.rule, (term,)) for k in known
            ):
                raise self._stranger(node, made, [x])
            parts.append(one.term)
            layout = one.layout
        assert layout is not None
        return Related(self.meaning.terms.sum(parts, node.name), layout)

    def _stranger(self, node: fx.Node, made: Written, held: Sequence[Related]) -> Mismatch:
        """Of a call that the step for one device does not make: what the one in its place reads instead."""
        terms = self.meaning.terms
        own = [terms.names[h.term] for h in held]
        twins = [k for k in self.meaning.like(node, made.name) if len(k.reads) == len(own)]
        shared = [sum(h.term == t for h, t in zip(held, k.reads, strict=True)) for k in twins]
        best: int = max(shared, default=0)
        if best or len(twins) == 1:
            twin = twins[shared.index(best)]
            right = [terms.names[t] for t in twin.reads]
            pairs = [(a, b) for a, b, h, t in zip(own, right, held, twin.reads, strict=True) if h.term != t]
            found, wanted = ", ".join(a for a, _ in pairs), ", ".join(b for _, b in pairs)
            return Mismatch(f"{made.name} reads another value than in the step for one device", found, wanted)
        return _Undecided(f"the step for one device makes no such call of {made.name} of {', '.join(own) or 'nothing'}")

    def _stored(self, node: fx.Node) -> Held:
        store, x = node.args
        assert isinstance(store, fx.Node) and isinstance(x, fx.Node)
        if self.stores.get(store) is None:
            raise Mismatch("what is written to the host is written into something that is no input")
        held = self.env[x]
        if isinstance(held, Related):
            self.written_into[node] = self.stores[store]
            self.env[store] = held  # whoever reads it from now on gets the new value
        return held


class _Undecided(Mismatch):
    """Nothing can be said."""


def _several(node: fx.Node) -> bool:
    assert isinstance(node.target, OpOverload)
    returns = node.target._schema.returns
    return len(returns) > 1 or (len(returns) == 1 and str(returns[0].type).startswith("List"))
