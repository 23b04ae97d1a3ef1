"""Reads the textual form of a graph (text.py) back into an equal graph, with its annotations."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import fx

from meshwright.compiler.diagnostics import MeshwrightError, Origin, Span, error, suggestion
from meshwright.compiler.graph.dtypes import dtype_named
from meshwright.compiler.graph.fake import fake_tensor
from meshwright.compiler.graph.functions import COLLECTIVES, function_named
from meshwright.compiler.graph.program import Annotation, Graph, Kind, Signature, Value
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Sharding, parse_sharding

CODE = "E0150"
_HEAD = re.compile(r"(local |sharded )?graph ([A-Za-z_]\w*)\s*$")
_TOKEN = re.compile(
    r"\s*(?:(?P<node>%[A-Za-z_]\w*)|(?P<string>\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*')"
    r"|(?P<number>-?(?:\d[\d_]*\.?\d*(?:e[+-]?\d+)?|inf\b|nan\b))|(?P<name>[A-Za-z_][\w.]*)"
    r"|(?P<comment>\#.*)|(?P<mark>[^\s]))"
)
_SHARDING = re.compile(r"\s*(\[[^\]]*\](?:\s*\+\w+(?::\w+)?)*)")
_COMMENT = re.compile(
    r"#\s*(?:(?P<phase>forward|backward|update|prologue)(?:\s+|$))?(?P<block>[^\s|(@]\S*)?\s*"
    r"(?:@ (?P<file>.*?):(?P<line>\d+))?\s*(?:\((?P<module>[^)]*)\))?\s*(?:\| (?P<text>.*))?$"
)
_KINDS = get_args(Kind)
_MADE: dict[str, Callable[..., Any]] = {
    "slice": slice,
    "complex": complex,
    "device": torch.device,
    "sharding": parse_sharding,
}
_WORDS: dict[str, object] = {"None": None, "True": True, "False": False, "inf": float("inf"), "nan": float("nan")}


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
                _Line(self, line, number).read()
                continue
            head = _HEAD.match(line)
            if not head:
                raise error(
                    CODE,
                    "a graph begins with its name",
                    Span(self.file, number, 1, len(line), line),
                    "write: graph NAME",
                )
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
class _Line:
    """Reads one line; ``at`` is where the next token begins."""

    reader: _Reader
    line: str
    number: int
    at: int = 0
    kind: str = ""
    token: str = ""
    start: int = 0

    def read(self) -> None:
        self.advance()
        if self.token == "output":
            self.read_output()
        elif self.kind == "node":
            self.read_node()
        else:
            raise self.fault("a line begins with a %name or with 'output'")

    def fault(self, message: str, action: str = "see the textual form in compiler/graph/text.py") -> MeshwrightError:
        column = min(self.start, len(self.line)) + 1
        return error(
            CODE, message, Span(self.reader.file, self.number, column, max(1, len(self.token)), self.line), action
        )

    def advance(self) -> str:
        """Step to the next token and return the one before it."""
        passed = self.token
        found = _TOKEN.match(self.line, self.at)
        if found is None:
            self.kind, self.token, self.start = "end", "", len(self.line)
            return passed
        self.kind = found.lastgroup or ""
        self.token = found[self.kind]
        self.start, self.at = found.start(self.kind), found.end()
        if self.kind == "name" and self.token in ("inf", "nan"):
            self.kind = "number"
        return passed

    def expect(self, mark: str) -> None:
        if self.token != mark:
            raise self.fault(f"expected '{mark}'" + (f", found '{self.token}'" if self.token else ""))
        self.advance()

    def end(self) -> str:
        if self.kind not in ("comment", "end"):
            raise self.fault(f"expected the end of the line, found '{self.token}'")
        return self.token if self.kind == "comment" else ""

    def role(self) -> Value:
        if self.token not in _KINDS:
            raise self.fault(f"unknown role '{self.token}'", suggestion(self.token, _KINDS))
        kind = self.advance()
        if self.kind != "string":
            raise self.fault("expected the name of the value, in quotes")
        return Value(kind, ast.literal_eval(self.advance()))  # type: ignore[arg-type]  # checked against Kind above

    def read_output(self) -> None:
        self.advance()
        role = self.role()
        if self.token == ":":
            self.reader.output_shardings[role] = self.sharding()
        self.expect("=")
        value = self.value()
        self.end()
        self.reader.outputs.append((role, value))

    def read_node(self) -> None:
        name = self.advance()[1:]
        if name in self.reader.nodes:
            raise self.fault(f"%{name} is defined twice", "give it another name")
        notes: list[Annotation | None] | Annotation | None = None
        if self.token == ":":
            self.advance()
            notes = self.types()
        self.expect("=")
        graph = self.reader.graph
        if self.token == "input":
            self.advance()
            role = self.role()
            node = graph.create_node("placeholder", name, name=name)
            self.reader.inputs.append(role)
            if isinstance(notes, Annotation) and notes.sharding is not None:
                self.reader.input_shardings[role] = notes.sharding
        else:
            target = self.function()
            args, kwargs = self.arguments()
            node = graph.create_node("call_function", target, tuple(args), kwargs, name=name)
        node.name = name  # as printed, whatever fx would choose
        self.annotate(node, notes, self.end())
        self.reader.nodes[name] = node

    def annotate(self, node: fx.Node, notes: list[Annotation | None] | Annotation | None, comment: str) -> None:
        note = notes if isinstance(notes, Annotation) else Annotation()
        if isinstance(notes, list):
            node.meta["val"] = tuple(_fake(n) for n in notes)
        elif notes is not None:
            node.meta["val"] = _fake(notes)
        found = _COMMENT.match(comment)
        if found:
            note.phase = found["phase"] or "forward"  # type: ignore[assignment]  # the pattern admits only phases
            note.block = found["block"] or ""
            note.origin = Origin(
                found["module"] or "", found["file"] or "", int(found["line"] or 0), found["text"] or ""
            )
        node.meta["meshwright"] = note

    def types(self) -> list[Annotation | None] | Annotation:
        if self.token != "(":
            return self.type()
        self.advance()
        result: list[Annotation | None] = []
        while self.token != ")":
            if self.token == "None":
                result.append(None)
                self.advance()
            else:
                result.append(self.type())
            if self.token != ")":
                self.expect(",")
        self.advance()
        return result

    def type(self) -> Annotation:
        try:
            dtype = dtype_named(self.token)
        except KeyError:
            raise self.fault(f"'{self.token}' is no dtype") from None
        sharding = self.sharding()
        note = Annotation(shape=sharding.shape, dtype=dtype, sharding=sharding if self.reader.form else None)
        if self.token == "of":
            if self.line[self.at :].lstrip().startswith("?"):
                self.advance()
                self.advance()
                note.sharding = None
            else:
                note.sharding = self.sharding()
        return note

    def sharding(self) -> Sharding:
        """The sharding that follows the current token."""
        found = _SHARDING.match(self.line, self.at)
        if not found:
            self.advance()
            raise self.fault("expected a shape or sharding in brackets")
        self.start, self.token = found.start(1), found[1]
        try:
            result = parse_sharding(found[1])
        except ValueError as fault:
            raise self.fault(str(fault)) from None
        self.at = found.end()
        self.advance()
        return result

    def function(self) -> Any:
        try:
            target = function_named(self.token)
        except KeyError:
            raise self.fault(f"unknown op '{self.token}'", suggestion(self.token, COLLECTIVES)) from None
        self.advance()
        return target

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        self.expect("(")
        while self.token != ")":
            if self.kind == "name" and self.line[self.at :].lstrip()[:1] == "=":
                key = self.advance()
                self.advance()
                kwargs[key] = self.value()
            else:
                args.append(self.value())
            if self.token != ")":
                self.expect(",")
        self.advance()
        return args, kwargs

    def value(self) -> Any:
        """One argument: a node, a literal, a list, a tuple, a dict, a dtype, a device."""
        if self.kind == "node":
            name = self.token[1:]
            if name not in self.reader.nodes:
                raise self.fault(f"%{name} is not defined above", suggestion(name, self.reader.nodes))
            self.advance()
            return self.reader.nodes[name]
        if self.kind == "string":
            return ast.literal_eval(self.advance())
        if self.kind == "number":
            text = self.advance()
            return float(text) if re.search(r"[.en]", text) else int(text)
        if self.kind == "name":
            return self.word()
        if self.token == "[":
            return self.items("]")[0]
        if self.token == "(":
            items, commas = self.items(")")
            return tuple(items) if commas or not items else items[0]
        if self.token == "{":
            return self.mapping()
        raise self.fault(f"expected a value, found '{self.token}'" if self.token else "expected a value")

    def items(self, close: str) -> tuple[list[Any], int]:
        result: list[Any] = []
        commas = 0
        self.advance()
        while self.token != close:
            result.append(self.value())
            if self.token != close:
                self.expect(",")
                commas += 1
        self.advance()
        return result, commas

    def mapping(self) -> dict[Any, Any]:
        result = {}
        self.advance()
        while self.token != "}":
            key = self.value()
            self.expect(":")
            result[key] = self.value()
            if self.token != "}":
                self.expect(",")
        self.advance()
        return result

    def word(self) -> Any:
        word = self.token
        if word in _WORDS:
            self.advance()
            return _WORDS[word]
        if word in _MADE:
            self.advance()
            parts = self.items(")")[0]
            try:
                return _MADE[word](*parts)
            except (TypeError, ValueError, RuntimeError):
                raise self.fault(f"'{word}' does not take these arguments") from None
        found = getattr(torch, word.removeprefix("torch."), None) if word.startswith("torch.") else None
        if not isinstance(found, (torch.layout, torch.memory_format)):
            try:
                found = dtype_named(word)
            except KeyError:
                raise self.fault(f"unknown word '{word}'") from None
        self.advance()
        return found


def _fake(note: Annotation | None) -> torch.Tensor | None:
    if note is None or note.dtype is None:
        return None
    return fake_tensor(note.shape, note.dtype)
