"""What the checker makes of products and sums, and odd inputs that once could slip through to torch."""

from __future__ import annotations

import pytest
import torch

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.frontend.language import load_text

HEAD = "axes\n    b: batch\n    t: time = 3\n    d = 4, e = 4, f = 5\n"
MODEL = HEAD + "model m(x[b t d], n: int[b t]) -> [b t d]\n"


def source_of(body: str, result: str = "b t d", parameters: str = "W[d f], V[f e], g[d]") -> str:
    """The generated Python of a model with this last line."""
    text = f"{HEAD}model m(x[b t d], n: int[b t]) -> [{result}]\n    param {parameters} ~ ones\n    {body}\n"
    return load_text(text, "m.mw").source()


@pytest.mark.parametrize(
    ("value", "result", "python"),
    [
        ("x * W", "b t f", 'torch.einsum("btd,df->btf", x, self.W)'),
        ("W * x", "b t f", 'torch.einsum("df,btd->btf", self.W, x)'),
        ("x * g", "b t d", "(x * self.g)"),
        ("relu(x * W)", "b t f", 'F.relu(torch.einsum("btd,df->btf", x, self.W))'),
        ("x * g -> [b t]", "b t", 'torch.einsum("btd,d->bt", x, self.g)'),
        ("x * g", "d b t", "(x.permute(2, 0, 1) * self.g.unsqueeze(1).unsqueeze(2))"),
        (
            "x * W * V -> [b t e]",
            "b t e",
            'torch.einsum("btf,fe->bte", torch.einsum("btd,df->btf", x, self.W), self.V)',
        ),
        ("2 * x * 3", "b t d", "((x * 2) * 3)"),
        ("(2 * 3 + d) * x", "b t d", "(x * 10)"),
        ("x / sqrt(d)", "b t d", "(x / 2.0)"),
    ],
)
def test_python_of_products(value: str, result: str, python: str) -> None:
    assert f"return {python}" in source_of(value, result)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ('x * "a"', "E0217"),
        ('-"a"', "E0217"),
        ("x + (1, 2)", "E0217"),
        ("x * 1e999", "E0101"),
        ("x * 9 ** 9 ** 9", "E0203"),
        ("x * (0 - 8) ** 0.5", "E0203"),
        ("x * (1 / 0)", "E0203"),
        ("x + sqrt(0 - 1)", "E0203"),
        ("x + sum(x over t t) * x -> [b t d]", "E0216"),
        ("gelu(x, approximate = 3)", "E0211"),
        ("softplus(x, beta = x)", "E0211"),
        ("dropout(x, 2)", "E0211"),
        ("dropout(x, x)", "E0211"),
        ("maximum(x)", "E0211"),
        ("max(x, 1)", "E0217"),
        ("relu(n)", "E0217"),
        ("x + b", "E0203"),
        ("x + relu", "E0210"),
        ("m(x, n)", "E0210"),
        ("norm(x)", "E0211"),
        ("norm(x over f)", "E0208"),
        ("softmax(x over t d)", "E0211"),
        ("x[n]", "E0216"),
        ("attend(x, x, x over t, causal over t)", "E0211"),
        ("attend(x, x, x, later over t)", "E0211"),
        ("attend(x, x, x over t, window = 2)", "E0211"),
        ("rope(x over d)", "E0209"),
        ("swiglu(x, n)", "E0217"),
        ("next(x over t)", "E0217"),
        ("n", "E0205"),
        ("3", "E0205"),
    ],
)
def test_faults_of_expressions(body: str, code: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        load_text(f"{MODEL}    {body}\n", "m.mw")
    assert [d.code for d in caught.value.diagnostics] == [code], str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "param lambda[d] ~ ones",
        "param predict[d] ~ ones",
        "param forward[d] ~ ones",
        "param half[d] ~ ones",
        "repeat x = 2\n        x = x + 1",
        "repeat class = 2\n        x = x + 1",
        "true = x",
        "param x[d] ~ ones",
        "layers = x\n    repeat layers = 2\n        x = x + 1",
    ],
)
def test_names_that_cannot_be(line: str) -> None:
    with pytest.raises(MeshwrightError, match="E0213"):
        load_text(f"{MODEL}    {line}\n    x\n", "m.mw")


def test_a_number_carried_through_a_repeat_changes() -> None:
    module = load_text(f"{MODEL}    a = 1\n    repeat r = 3\n        a = a * 2\n    x * a\n", "m.mw").module()
    x = torch.randn(2, 3, 4)
    assert torch.allclose(module(x, torch.zeros(2, 3, dtype=torch.int64)), x * 8)


def test_names_that_differ_by_an_underscore() -> None:
    module = load_text(f"{MODEL}    lambda = x * 2\n    lambda_ = x * 3\n    lambda - lambda_\n", "m.mw").module()
    x = torch.randn(2, 3, 4)
    assert torch.allclose(module(x, torch.zeros(2, 3, dtype=torch.int64)), -x)


def test_too_large() -> None:
    for sizes in ("t: time = 10 ** 12", "t: time = 2 ** 30\n    u = 2 ** 30, v = 2 ** 30"):
        text = f"axes\n    b: batch\n    {sizes}\nmodel m(x[b t]) -> [b t]\n    param W[t u v] ~ ones\n    x\n"
        with pytest.raises(MeshwrightError, match="E0203"):
            load_text(text, "m.mw")
