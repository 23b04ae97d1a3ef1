"""The parser: precedence, places, words that are keywords only where they are expected."""

from __future__ import annotations

import pytest

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.frontend.language import tree
from meshwright.frontend.language.parser import parse

FILE = """# a comment before everything

axes                                  # and one behind
    b: batch
    data = 3, batch = 4, on = 2

model m(x[b data]) -> [b batch]
    # a comment alone
    param W[data batch] ~ normal(1)
    steps = x
        # a comment at another depth

    loss = (steps
      * W) + 1
    loss
"""


def expression(text: str) -> tree.Expression:
    file = parse(f"axes\n    b: batch\nmodel m(x[b]) -> [b]\n    {text}\n", "m.mw")
    assert file.model is not None
    last = file.model.body[-1]
    assert isinstance(last, tree.Result)
    return last.value


def shown(node: tree.Expression) -> str:
    """The expression with every bracket written."""
    match node:
        case tree.Number(value):
            return str(value)
        case tree.Name(name):
            return name
        case tree.Paren(inner):
            return shown(inner)
        case tree.Negative(operand):
            return f"(-{shown(operand)})"
        case tree.Binary(operator, left, right):
            return f"({shown(left)} {operator} {shown(right)})"
        case tree.Lookup(table, index):
            return f"{shown(table)}[{shown(index)}]"
        case tree.Arrow(value, shape):
            return f"({shown(value)} -> {' '.join(shape.names)})"
        case tree.Call(function, arguments):
            return f"{function.name}({', '.join(shown(a.value) for a in arguments)})"
    raise AssertionError(node)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("a + b * c", "(a + (b * c))"),
        ("a * b / c", "((a * b) / c)"),
        ("a - b - c", "((a - b) - c)"),
        ("-a ** 2", "(-(a ** 2))"),
        ("a ** -2 ** b", "(a ** (-(2 ** b)))"),
        ("(a + b) * c", "((a + b) * c)"),
        ("a + b * c -> [b c]", "((a + (b * c)) -> b c)"),
        ("E[a + 1] * c", "(E[(a + 1)] * c)"),
        ("f(a * b -> [b] over b, c)", "f(((a * b) -> b), c)"),
        ("1_000 + 2.5e-3 + .5", "((1000 + 0.0025) + 0.5)"),
    ],
)
def test_precedence(text: str, meaning: str) -> None:
    assert shown(expression(text)) == meaning


def test_keywords_are_names_elsewhere() -> None:
    file = parse(FILE, "m.mw")
    assert file.axes is not None and file.model is not None
    assert [a.name.name for a in file.axes.axes] == ["b", "data", "batch", "on"]
    assert [type(s).__name__ for s in file.model.body] == ["Param", "Assign", "Assign", "Result"]


def test_spans_point_at_the_text() -> None:
    file = parse(FILE, "m.mw")
    assert file.model is not None
    param = file.model.body[0]
    assert isinstance(param, tree.Param)
    span = param.declared[0].shape.axes[1].span
    assert (span.file, span.line) == ("m.mw", 9)
    assert span.text[span.column - 1 : span.column - 1 + span.length] == "batch"


def test_windows_line_ends_and_missing_last_one() -> None:
    assert parse(FILE.replace("\n", "\r\n").rstrip(), "m.mw").model is not None


def test_over_and_keywords_of_arguments() -> None:
    call = expression("f(x over b c, eps = 1)")
    assert isinstance(call, tree.Call)
    assert [w.name for w in call.arguments[0].over] == ["b", "c"]
    assert call.arguments[1].keyword is not None and call.arguments[1].keyword.name == "eps"


def test_syntax_error_carries_the_place() -> None:
    with pytest.raises(MeshwrightError) as caught:
        parse("axes\n    b: batch\nmodel m(x[b]) -> [b]\n    x +\n", "m.mw")
    place = caught.value.diagnostics[0].place
    assert place is not None and "m.mw:4:8" in place.render()
