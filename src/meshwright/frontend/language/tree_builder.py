"""Turns what lark parsed into the syntax tree: one method per rule of the grammar."""

from __future__ import annotations

from typing import Any

from lark import Token, Transformer, v_args
from lark.tree import Meta

from meshwright.compiler.diagnostics import Span, error
from meshwright.frontend.language import tree
from meshwright.frontend.language.sizes import LARGEST


@v_args(meta=True)
class TreeBuilder(Transformer[Token, Any]):
    """One method per rule of the grammar: children in, dataclass out."""

    def __init__(self, path: str, lines: list[str]) -> None:
        super().__init__()
        self._path = path
        self._lines = lines

    def _span(self, meta: Meta) -> Span:
        text = self._lines[meta.line - 1] if meta.line <= len(self._lines) else ""
        end = meta.end_column if meta.end_line == meta.line else len(text.split("#")[0].rstrip()) + 1
        return Span(self._path, meta.line, meta.column, max(1, end - meta.column), text)

    def _head(self, meta: Meta, word: str) -> Span:
        """The place of a line's first word."""
        return Span(self._path, meta.line, meta.column, len(word), self._lines[meta.line - 1])

    def NAME(self, token: Token) -> tree.Word:
        line, column = token.line or 1, token.column or 1
        return tree.Word(str(token), Span(self._path, line, column, len(token), self._lines[line - 1]))

    def start(self, meta: Meta, c: list[Any]) -> list[tree.Section]:
        return c

    def use(self, meta: Meta, c: list[Any]) -> tree.Use:
        return tree.Use(c[0], tuple(c[1:]), self._head(meta, "use"))

    def dotted(self, meta: Meta, c: list[Any]) -> tree.Word:
        return tree.Word(".".join(word.name for word in c), self._span(meta))

    def axes(self, meta: Meta, c: list[Any]) -> tree.Axes:
        return tree.Axes(tuple(axis for line in c for axis in line), self._head(meta, "axes"))

    def axis_line(self, meta: Meta, c: list[Any]) -> list[tree.Axis]:
        return c

    def axis(self, meta: Meta, c: list[Any]) -> tree.Axis:
        return tree.Axis(*c)

    def function(self, meta: Meta, c: list[Any]) -> tree.Function:
        name, inputs, result, *body = c
        return tree.Function(name, inputs or (), result, tuple(body), self._head(meta, "def"))

    def model(self, meta: Meta, c: list[Any]) -> tree.Function:
        name, inputs, result, *body = c
        return tree.Function(name, inputs or (), result, tuple(body), self._head(meta, "model"), is_model=True)

    def inputs(self, meta: Meta, c: list[Any]) -> tuple[tree.Input, ...]:
        return tuple(c)

    def input(self, meta: Meta, c: list[Any]) -> tree.Input:
        return tree.Input(*c)

    def shape(self, meta: Meta, c: list[Any]) -> tree.Shape:
        return tree.Shape(tuple(c), self._span(meta))

    def param(self, meta: Meta, c: list[Any]) -> tree.Param:
        return tree.Param(tuple(c[:-1]), c[-1], self._span(meta))

    def declared(self, meta: Meta, c: list[Any]) -> tree.Declared:
        return tree.Declared(*c)

    def assign(self, meta: Meta, c: list[Any]) -> tree.Assign:
        return tree.Assign(c[0], c[1], self._span(meta))

    def repeat(self, meta: Meta, c: list[Any]) -> tree.Repeat:
        return tree.Repeat(c[0], c[1], tuple(c[2:]), self._head(meta, "repeat"))

    def result(self, meta: Meta, c: list[Any]) -> tree.Result:
        return tree.Result(c[0], c[0].span)

    def arrow(self, meta: Meta, c: list[Any]) -> tree.Arrow:
        return tree.Arrow(c[0], c[1], self._span(meta))

    def _binary(self, operator: str, meta: Meta, c: list[Any]) -> tree.Binary:
        return tree.Binary(operator, c[0], c[1], self._span(meta))

    def add(self, meta: Meta, c: list[Any]) -> tree.Binary:
        return self._binary("+", meta, c)

    def subtract(self, meta: Meta, c: list[Any]) -> tree.Binary:
        return self._binary("-", meta, c)

    def multiply(self, meta: Meta, c: list[Any]) -> tree.Binary:
        return self._binary("*", meta, c)

    def divide(self, meta: Meta, c: list[Any]) -> tree.Binary:
        return self._binary("/", meta, c)

    def power(self, meta: Meta, c: list[Any]) -> tree.Binary:
        return self._binary("**", meta, c)

    def negative(self, meta: Meta, c: list[Any]) -> tree.Negative:
        return tree.Negative(c[0], self._span(meta))

    def lookup(self, meta: Meta, c: list[Any]) -> tree.Lookup:
        return tree.Lookup(c[0], c[1], self._span(meta))

    def number(self, meta: Meta, c: list[Any]) -> tree.Number:
        text = str(c[0]).replace("_", "")
        value = float(text) if any(mark in text for mark in ".eE") else int(text)
        if abs(value) > LARGEST:
            raise error("E0101", "this number is too large", self._span(meta), "write a smaller number")
        return tree.Number(value, self._span(meta))

    def text(self, meta: Meta, c: list[Any]) -> tree.Text:
        return tree.Text(str(c[0])[1:-1], self._span(meta))

    def name(self, meta: Meta, c: list[Any]) -> tree.Name:
        return tree.Name(c[0].name, c[0].span)

    def paren(self, meta: Meta, c: list[Any]) -> tree.Paren:
        return tree.Paren(c[0], self._span(meta))

    def tuple(self, meta: Meta, c: list[Any]) -> tree.Sequence:
        return tree.Sequence((*(item for item in c if item is not None),), self._span(meta))

    def call(self, meta: Meta, c: list[Any]) -> tree.Call:
        return tree.Call(c[0], c[1] or (), self._span(meta))

    def arguments(self, meta: Meta, c: list[Any]) -> Any:
        return (*(argument for argument in c if argument is not None),)

    def keyword(self, meta: Meta, c: list[Any]) -> tree.Argument:
        return tree.Argument(c[1], self._span(meta), keyword=c[0])

    def positional(self, meta: Meta, c: list[Any]) -> tree.Argument:
        return tree.Argument(c[0], self._span(meta), over=(*(word for word in c[1:] if word is not None),))

    def train(self, meta: Meta, c: list[Any]) -> tree.Train:
        return tree.Train((*c,), self._head(meta, "train"))

    def _setting(self, kind: str, meta: Meta, c: list[Any]) -> tree.Setting:
        return tree.Setting(kind, self._head(meta, kind), c[0])

    def loss(self, meta: Meta, c: list[Any]) -> tree.Setting:
        return self._setting("loss", meta, c)

    def optimizer(self, meta: Meta, c: list[Any]) -> tree.Setting:
        return self._setting("optimizer", meta, c)

    def learning_rate(self, meta: Meta, c: list[Any]) -> tree.Setting:
        return self._setting("learning rate", meta, c)

    def clip(self, meta: Meta, c: list[Any]) -> tree.Setting:
        return self._setting("clip", meta, c)

    def batch(self, meta: Meta, c: list[Any]) -> tree.Setting:
        return self._setting("batch", meta, c)

    def data(self, meta: Meta, c: list[Any]) -> tree.Setting:
        return self._setting("data", meta, c)

    def steps(self, meta: Meta, c: list[Any]) -> tree.Setting:
        return self._setting("steps", meta, c)

    def seed(self, meta: Meta, c: list[Any]) -> tree.Setting:
        return self._setting("seed", meta, c)

    def checkpoint(self, meta: Meta, c: list[Any]) -> tree.Setting:
        return self._setting("checkpoint every", meta, c)

    def precision(self, meta: Meta, c: list[Any]) -> tree.Setting:
        return tree.Setting("precision", self._head(meta, "precision"), dtypes=(*c,))

    def dtype(self, meta: Meta, c: list[Any]) -> Any:
        return (c[0], c[1])

    def parallel(self, meta: Meta, c: list[Any]) -> tree.Parallel:
        return tree.Parallel((*c,), self._head(meta, "parallel"))

    def mesh(self, meta: Meta, c: list[Any]) -> tree.Pin:
        return tree.Pin("mesh", self._span(meta), subjects=(*(a[0] for a in c),), values=(*(a[1] for a in c),))

    def mesh_axis(self, meta: Meta, c: list[Any]) -> Any:
        return (c[0], c[1])

    def names(self, meta: Meta, c: list[Any]) -> Any:
        return (*c,)

    def shard(self, meta: Meta, c: list[Any]) -> tree.Pin:
        return tree.Pin("shard", self._span(meta), c[0], c[1])

    def sequence(self, meta: Meta, c: list[Any]) -> tree.Pin:
        return tree.Pin("sequence", self._span(meta), on=c[0])

    def microbatches(self, meta: Meta, c: list[Any]) -> tree.Pin:
        return tree.Pin("microbatches", self._span(meta), values=(c[0],))

    def separability(self, meta: Meta, c: list[Any]) -> tree.Pin:
        return tree.Pin("separability", self._span(meta), values=(*c,))

    def recompute(self, meta: Meta, c: list[Any]) -> tree.Pin:
        return tree.Pin("recompute", self._span(meta), c[0])
