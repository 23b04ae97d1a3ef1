"""What comes into the graphs of a rank and what must go out: the only shardings that the checker takes as given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.equivalence.findings import OUTPUT, Finding
from meshwright.compiler.equivalence.layout import Layout, of_sharding, same_place
from meshwright.compiler.equivalence.related import Held, Related, Unknown
from meshwright.compiler.equivalence.single import Meaning
from meshwright.compiler.equivalence.walk import Walk
from meshwright.compiler.graph.pipeline_program import Compiled, copies_of
from meshwright.compiler.graph.program import Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import MICRO, Mesh, Sharding

STORED = ("parameter", "state")


@dataclass
class Border:
    """The inputs and outputs of the graphs of a compiled step."""

    compiled: Compiled
    meaning: Meaning
    findings: list[Finding] = field(default_factory=list)

    def stored(self, value: Value) -> Sharding | None:
        """How a parameter or an entry of the state lies between steps, by the plan."""
        if value.kind == "parameter":
            found = self.compiled.layouts.get(value.name)
            return None if found is None else found.rest
        return self.compiled.state.get(value.name) if value.kind == "state" else None

    def inputs(self, local: LocalGraph, name: str, mesh: Mesh, handed: Mapping[Value, Held]) -> dict[Value, Held]:
        """What comes into a graph; ``handed`` is what other graphs have made."""
        found: dict[Value, Held] = {}
        for value in local.signature.inputs:
            declared = local.inputs[value]
            if value in handed:
                found[value] = handed[value]
                if value.kind == "prologue" and isinstance(handed[value], Related):
                    found[value] = self._sliced(value, handed[value], declared, name, mesh)
                continue
            stored = self.stored(value)
            if value.kind in STORED and stored is None:
                self._wrong(
                    name, f"the ranks read the {value.kind} '{value.name}', which they do not hold", value=value
                )
                continue
            if value.kind in ("value", "gradient", "prologue"):
                self._wrong(name, f"nothing makes the {value.kind} '{value.name}' that is read", value=value)
                continue
            if stored is not None and stored.canonical(mesh) != declared.canonical(mesh):
                message = f"the {value.kind} '{value.name}' is read in another way than it is stored"
                self._wrong(name, message, str(declared), str(stored), value)
            term = self.meaning.terms.leaf(self.original(value))
            found[value] = Related(term, of_sharding(stored or declared, mesh))
        return found

    def original(self, value: Value) -> Value:
        """The parameter of which a value may be a further copy."""
        copies = copies_of(self.compiled)
        return replace(value, name=copies[value.name]) if value.kind == "parameter" and value.name in copies else value

    def _sliced(self, value: Value, held: Related, declared: Sharding, name: str, mesh: Mesh) -> Related:
        """A value of the prologue as a microbatch gets it: cut by ``micro`` where the graph says so."""
        lies = of_sharding(declared, mesh)
        bare = of_sharding(declared.without({MICRO}), mesh)
        if not same_place(bare, held.layout) and held.layout.axes:
            message = f"'{value.name}' of the prologue is read in another way than it is made"
            shape = self.meaning.shapes[value]
            self._wrong(name, message, str(declared), held.layout.told(shape, mesh), value)
        return Related(held.term, lies)

    def check(self, local: LocalGraph, name: str, mesh: Mesh, made: Mapping[Value, Held]) -> None:
        """Whether what a graph gives to the runtime is what the runtime takes it for."""
        for value, held in made.items():
            if value.kind == "value" or isinstance(held, Unknown):
                continue
            self._check_one(value, held, local, name, mesh)

    def _check_one(self, value: Value, held: Held, local: LocalGraph, name: str, mesh: Mesh) -> None:
        if not isinstance(held, Related):
            self._wrong(name, f"the {value.kind} '{value.name}' is no tensor", value=value)
            return
        declared = of_sharding(local.outputs[value], mesh)
        shape = self.meaning.shapes.get(value, declared.shape)
        if not same_place(declared, held.layout) or declared.shape != held.layout.shape:
            message = f"the {value.kind} '{value.name}' does not lie as it is taken to lie"
            self._wrong(name, message, held.layout.told(shape, mesh), declared.told(shape, mesh), value)
        elif (wanted := self._wanted(value, mesh)) is not None and not same_place(wanted, _added_up(held.layout)):
            message = f"the {value.kind} '{value.name}' does not leave the step as it has to"
            self._wrong(name, message, held.layout.told(shape, mesh), wanted.told(shape, mesh), value)
        right = self.meaning.outputs.get(value)
        if value.kind == "gradient" and self._shared(value.name):
            return  # a part of it; see :meth:`check_shared`
        if right is not None and right != held.term:
            names = self.meaning.terms.names
            message = f"the {value.kind} '{value.name}' is another value than in the step for one device"
            self._wrong(name, message, names[held.term], names[right], value)

    def _wanted(self, value: Value, mesh: Mesh) -> Layout | None:
        """How an output has to lie, if that is settled by what reads it in the next step."""
        stored = self.stored(value)
        if stored is not None:
            return of_sharding(stored, mesh)
        if value.kind == "buffer":
            inputs = (g.inputs[value] for g in self.compiled.micro_graphs if value in g.inputs)
            found = next(inputs, None)
            return None if found is None else of_sharding(found, mesh)
        if value.kind in ("norm", "prologue"):
            return None if value.kind == "prologue" else of_sharding(Sharding.whole(()), mesh)
        return None

    def _wrong(self, graph: str, message: str, found: str = "", expected: str = "", value: Value | None = None) -> None:
        origin: Origin | None = None
        if value is not None and value in self.meaning.outputs:
            node = self.meaning.terms.made_by.get(self.meaning.outputs[value])
            origin = annotation(node).origin if node is not None and annotation(node).origin.file else None
        self.findings.append(Finding(OUTPUT, graph, "", message, found, expected, origin))

    def _shared(self, name: str) -> bool:
        """Whether further stages have copies of a parameter, or it is one."""
        copies = copies_of(self.compiled)
        return name in copies or name in copies.values()

    def check_shared(self, made: Mapping[Value, Held]) -> None:
        """Whether the gradients of all copies of a tied parameter together are its gradient, and copies lie alike."""
        terms = self.meaning.terms
        for name in dict.fromkeys(copies_of(self.compiled).values()):
            copies = [name, *(c for c, original in copies_of(self.compiled).items() if original == name)]
            value = Value("gradient", name)
            parts = [made[v] for c in copies if (v := Value("gradient", c)) in made]
            if value in self.meaning.outputs and all(isinstance(p, Related) for p in parts):
                total, right = terms.sum([p.term for p in parts]), self.meaning.outputs[value]
                if total != right:
                    message = f"the gradients of the stages' copies of '{name}' do not add up to its gradient"
                    self._wrong("the stages", message, terms.names[total], terms.names[right], value)
            for copy in copies:
                own, first = (self.stored(Value("parameter", n)) for n in (copy, name))
                if own != first:
                    message = f"the copy '{copy}' lies in another way than '{name}', whose new value it gets"
                    self._wrong("the stages", message, str(own), str(first), value)

    def holds(self, names: frozenset[str] | None, local: LocalGraph, name: str) -> None:
        """Whether a stage reads only parameters that its ranks hold."""
        for value in local.signature.inputs:
            if value.kind == "parameter" and names is not None and value.name not in names:
                self._wrong(name, f"the stage reads '{value.name}', which another stage holds", value=value)

    def stores(self, walk: Walk, name: str) -> None:
        """Whether what is written to the host is written where it belongs."""
        (output,) = walk.local.module.graph.find_nodes(op="output")
        for value, node in zip(walk.local.signature.outputs, output.args[0], strict=True):
            into = walk.written_into.get(node)
            if into is not None and into != value:
                message = f"the {value.kind} '{value.name}' is written into '{into.name}'"
                self._wrong(name, message, into.name, value.name, value)

    def missing(self, made: Mapping[Value, list[str]]) -> None:
        """Whether every result of the step is given, and once. ``made``: by output, the graphs that give it."""
        copies = copies_of(self.compiled)
        for value in self.meaning.outputs:
            if not made.get(value):
                self._wrong("the ranks' program", f"the {value.kind} '{value.name}' is never made", value=value)
        for value, graphs in made.items():
            if len(graphs) > 1:
                message = f"the {value.kind} '{value.name}' is given by {' and by '.join(graphs)}: it counts twice"
                self._wrong(graphs[1], message, value=value)
            known = value in self.meaning.outputs or (value.kind == "gradient" and value.name in copies)
            if not known:
                self._wrong(graphs[0], f"the {value.kind} '{value.name}' is no result of the step", value=value)


def _added_up(layout: Layout) -> Layout:
    """As the runtime has it that adds up what the microbatches give."""
    return replace(layout, owed=layout.owed - {(MICRO, "sum")})
