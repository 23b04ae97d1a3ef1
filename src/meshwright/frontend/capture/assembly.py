"""Build a graph out of traced pieces: each kind of piece is traced once and copied where it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.adapter import trace
from meshwright.compiler.graph.fake import fake_tensor
from meshwright.compiler.graph.program import Annotation, Value


@dataclass
class Steps:
    """The traced optimizer step of some parameters. ``outputs`` are the names of parameters and states."""

    module: fx.GraphModule
    inputs: list[Value]
    outputs: list[str]

    def results(self) -> dict[str, fx.Node]:
        (output,) = self.module.graph.find_nodes(op="output")
        nodes: Any = output.args[0]
        return dict(zip(self.outputs, nodes, strict=True))

    def places(self) -> dict[fx.Node, Value]:
        return dict(zip(self.module.graph.find_nodes(op="placeholder"), self.inputs, strict=True))

    def independent(self) -> bool:
        """Whether each parameter's step reads that parameter's own tensors alone, besides scalars."""
        places = self.places()
        for name, node in self.results().items():
            for place in _closure([node]) & places.keys():
                value = places[place]
                if value.kind not in ("scalar", "constant") and _owner(value.name, value.kind) != self.owner(name):
                    return False
        return True

    def owner(self, output: str) -> str:
        """The parameter of an output."""
        known = {v.name for v in self.inputs if v.kind == "parameter"}
        return output if output in known else output.rpartition("/")[0]


def _owner(name: str, kind: str) -> str:
    return name.rpartition("/")[0] if kind == "state" else name


def _closure(nodes: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


@dataclass
class Assembly:
    """A graph under construction."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[Value] = field(default_factory=list)
    _places: dict[Value, fx.Node] = field(default_factory=dict)
    _traced: dict[Any, fx.GraphModule] = field(default_factory=dict)

    def place(self, value: Value, fake: Tensor) -> fx.Node:
        """A placeholder; the same one when asked again. To be called before anything that uses the graph's end."""
        if value in self._places:
            return self._places[value]
        last = list(self._places.values())[-1:]
        with self.graph.inserting_after(last[0]) if last else self.graph.inserting_before(None):
            node = self.graph.placeholder(f"input_{len(self._places)}")
        node.meta["val"] = fake
        self._annotate(node)
        self._places[value] = node
        self.inputs.append(value)
        return node

    def call(self, function: Callable[..., list[Tensor]], *operands: fx.Node) -> list[fx.Node]:
        """The ATen ops of ``function`` on these operands, traced once per kind of operands."""
        fakes = [n.meta["val"] for n in operands]
        key = (function.__code__, tuple((f.shape, f.dtype) for f in fakes))
        module = self._traced.get(key)
        if module is None:
            # fakes of their own: copies share theirs, and a trace tells tensors apart by identity
            own = [fake_tensor(f.shape, f.dtype) for f in fakes]
            module = self._traced[key] = trace(lambda *xs: function(*xs), *own)
        places = dict(zip(module.graph.find_nodes(op="placeholder"), operands, strict=True))
        (output,) = module.graph.find_nodes(op="output")
        nodes: Any = output.args[0]
        return self._copy(module, list(nodes), places)

    def inline_one(
        self,
        steps: Steps,
        model: str,
        name: str,
        held: dict[str, fx.Node],
        grads: dict[str, fx.Node],
        scalars: dict[str, fx.Node],
    ) -> dict[str, fx.Node]:
        """The step of parameter ``name`` as a copy of that of parameter ``model``; results by name."""
        wanted = {o: n for o, n in steps.results().items() if steps.owner(o) == model}
        renamed = {o: name + o.removeprefix(model) for o in wanted}
        return self._inline(steps, wanted, lambda n: name + n.removeprefix(model), renamed, held, grads, scalars)

    def inline_all(
        self, steps: Steps, held: dict[str, fx.Node], grads: dict[str, fx.Node], scalars: dict[str, fx.Node]
    ) -> dict[str, fx.Node]:
        """All steps as traced."""
        wanted = steps.results()
        return self._inline(steps, wanted, lambda n: n, {o: o for o in wanted}, held, grads, scalars)

    def _inline(
        self,
        steps: Steps,
        wanted: dict[str, fx.Node],
        rename: Callable[[str], str],
        renamed: dict[str, str],
        held: dict[str, fx.Node],
        grads: dict[str, fx.Node],
        scalars: dict[str, fx.Node],
    ) -> dict[str, fx.Node]:
        needed = _closure(list(wanted.values()))
        places: dict[fx.Node, fx.Node] = {}
        for place, value in steps.places().items():
            if place not in needed:
                continue
            if value.kind == "constant":
                places[place] = self.place(value, place.meta["val"])
            elif value.kind == "scalar":
                places[place] = scalars[value.name]
            else:
                places[place] = (grads if value.kind == "gradient" else held)[rename(value.name)]
        copied = self._copy(steps.module, list(wanted.values()), places)
        return dict(zip(renamed.values(), copied, strict=True))

    def _copy(self, module: fx.GraphModule, wanted: list[fx.Node], places: dict[fx.Node, fx.Node]) -> list[fx.Node]:
        needed = _closure(wanted)
        copies = dict(places)
        for node in module.graph.nodes:
            if node not in needed or node.op == "placeholder":
                continue
            made = self.graph.node_copy(node, lambda n: copies[n])
            made.meta = {"val": node.meta.get("val")}
            self._annotate(made)
            copies[node] = made
        return [copies[n] for n in wanted]

    @staticmethod
    def _annotate(node: fx.Node) -> None:
        value = node.meta.get("val")
        note = Annotation(phase="update")
        if isinstance(value, Tensor):
            note.shape, note.dtype = tuple(value.shape), value.dtype
        node.meta["meshwright"] = note

    def finish(self, outputs: list[fx.Node]) -> fx.GraphModule:
        """The module that gives these outputs."""
        self.graph.output(list(outputs))
        return fx.GraphModule(torch.nn.Module(), self.graph)
