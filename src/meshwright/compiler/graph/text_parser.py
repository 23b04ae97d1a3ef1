"""Reads the textual form of a graph (text.py) back into an equal graph, with its annotations."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import fx

from meshwright.compiler.diagnostics import Origin, Span, error, suggestion
from meshwright.compiler.graph.dtypes import dtype_named
from meshwright.compiler.graph.fake import fake_tensor
from meshwright.compiler.graph.program import Annotation, Graph, Kind, Signature, Value
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.graph.text import RECOMPUTE
from meshwright.compiler.graph.text_line import CODE, Line
from meshwright.compiler.mesh import Sharding

_HEAD = re.compile(r"(local |sharded )?graph ([A-Za-z_]\w*)\s*$")
_COMMENT = re.compile(
    r"#\s*(?:(?P<phase>forward|backward|update|prologue|recompute)(?:\s+|$))?(?P<block>[^\s|(@]\S*)?\s*"
    r"(?:@ (?P<file>.*?):(?P<line>\d+))?\s*(?:\((?P<module>[^)]*)\))?\s*(?:\| (?P<text>.*))?$"
)
_KINDS = get_args(Kind)


def parse_graph(text: str, file: str = "text") -> tuple[str, Graph]:
    """The name and the graph of its textual form. Raises MeshwrightError E0150 with the place."""
    reader = _Reader(text, file)
    return reader.name, Graph(reader.module(), reader.signature())


def parse_local_graph(text: str, file: str = "text") -> tuple[str, LocalGraph]:
    """The same for the graph of a rank: ``local graph ...``."""
    reader = _Reader(text, file)
    if reader.form != "local":
        raise error(CODE, "this is not the graph of a rank", Span(file, 1, 1), "it begins with 'local graph NAME'")
    return reader.name, LocalGraph(reader.module(), reader.signature(), reader.input_shardings, reader.output_shardings)


def parse_border(text: str, file: str = "text") -> tuple[dict[Value, Sharding], dict[Value, Sharding]]:
    """The shardings that the inputs and outputs of a graph are written with."""
    reader = _Reader(text, file)
    return reader.input_shardings, reader.output_shardings


@dataclass
class _Reader:
    text: str
    file: str
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[tuple[Value, Any]] = field(default_factory=list)
    input_shardings: dict[Value, Sharding] = field(default_factory=dict)
    output_shardings: dict[Value, Sharding] = field(default_factory=dict)
    name: str = ""
    form: str = ""

    def __post_init__(self) -> None:
        for number, line in enumerate(self.text.split("\n"), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            if self.name:
                _Definition(self, Line(self.file, line, number, self.nodes)).read()
                continue
            head = _HEAD.match(line)
            if not head:
                place = Span(self.file, number, 1, len(line), line)
                raise error(CODE, "a graph begins with its name", place, "write: graph NAME")
            self.form, self.name = (head[1] or "").strip(), head[2]
        if not self.name:
            raise error(CODE, "there is no graph in this text", Span(self.file, 1, 1), "write: graph NAME")
        self.graph.output(tuple(value for _, value in self.outputs))
        self.graph.lint()

    def module(self) -> fx.GraphModule:
        return fx.GraphModule(torch.nn.Module(), self.graph, self.name)

    def signature(self) -> Signature:
        return Signature(tuple(self.inputs), tuple(role for role, _ in self.outputs))


@dataclass
class _Definition:
    """Reads one line into the graph."""

    reader: _Reader
    line: Line

    def read(self) -> None:
        self.line.advance()
        if self.line.token == "output":
            self.read_output()
        elif self.line.kind == "node":
            self.read_node()
        else:
            raise self.line.fault("a line begins with a %name or with 'output'")

    def role(self) -> Value:
        if self.line.token not in _KINDS:
            raise self.line.fault(f"unknown role '{self.line.token}'", suggestion(self.line.token, _KINDS))
        kind = self.line.advance()
        if self.line.kind != "string":
            raise self.line.fault("expected the name of the value, in quotes")
        return Value(kind, ast.literal_eval(self.line.advance()))  # type: ignore[arg-type]  # checked against Kind above

    def read_output(self) -> None:
        self.line.advance()
        role = self.role()
        if self.line.token == ":":
            self.reader.output_shardings[role] = self.line.sharding()
        self.line.expect("=")
        value = self.line.value()
        self.line.end()
        self.reader.outputs.append((role, value))

    def read_node(self) -> None:
        name = self.line.advance()[1:]
        if name in self.reader.nodes:
            raise self.line.fault(f"%{name} is defined twice", "give it another name")
        notes: list[Annotation | None] | Annotation | None = None
        if self.line.token == ":":
            self.line.advance()
            notes = self.types()
        self.line.expect("=")
        graph = self.reader.graph
        if self.line.token == "input":
            self.line.advance()
            role = self.role()
            node = graph.create_node("placeholder", name, name=name)
            self.reader.inputs.append(role)
            if isinstance(notes, Annotation) and notes.sharding is not None:
                self.reader.input_shardings[role] = notes.sharding
        else:
            target = self.line.function()
            args, kwargs = self.line.arguments()
            node = graph.create_node("call_function", target, tuple(args), kwargs, name=name)
        node.name = name  # as printed, whatever fx would choose
        self.annotate(node, notes, self.line.end())
        self.reader.nodes[name] = node

    def annotate(self, node: fx.Node, notes: list[Annotation | None] | Annotation | None, comment: str) -> None:
        note = notes if isinstance(notes, Annotation) else Annotation()
        if isinstance(notes, list):
            node.meta["val"] = tuple(_fake(n) for n in notes)
        elif notes is not None:
            node.meta["val"] = _fake(notes)
        found = _COMMENT.match(comment)
        if found:
            note.recomputed = found["phase"] == RECOMPUTE
            phase = "backward" if note.recomputed else found["phase"] or "forward"
            note.phase = phase  # type: ignore[assignment]  # the pattern admits only phases
            note.block = found["block"] or ""
            note.origin = Origin(
                found["module"] or "", found["file"] or "", int(found["line"] or 0), found["text"] or ""
            )
        node.meta["meshwright"] = note

    def types(self) -> list[Annotation | None] | Annotation:
        if self.line.token != "(":
            return self.type()
        self.line.advance()
        result: list[Annotation | None] = []
        while self.line.token != ")":
            if self.line.token == "None":
                result.append(None)
                self.line.advance()
            else:
                result.append(self.type())
            if self.line.token != ")":
                self.line.expect(",")
        self.line.advance()
        return result

    def type(self) -> Annotation:
        try:
            dtype = dtype_named(self.line.token)
        except KeyError:
            raise self.line.fault(f"'{self.line.token}' is no dtype") from None
        sharding = self.line.sharding()
        note = Annotation(shape=sharding.shape, dtype=dtype, sharding=sharding if self.reader.form else None)
        if self.line.token == "of":
            if self.line.rest.startswith("?"):
                self.line.advance()
                self.line.advance()
                note.sharding = None
            else:
                note.sharding = self.line.sharding()
        return note


def _fake(note: Annotation | None) -> torch.Tensor | None:
    if note is None or note.dtype is None:
        return None
    return fake_tensor(note.shape, note.dtype)
