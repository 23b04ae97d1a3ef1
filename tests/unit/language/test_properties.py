"""Random expressions mean what their names say, and no text whatever gives anything but a told error."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.frontend.language import load_text, tree
from meshwright.frontend.language.parser import parse
from meshwright.frontend.language.sizes import number

EXAMPLES = Path(__file__).parents[3] / "examples"
SIZES = {"b": 3, "i": 2, "j": 4, "k": 5, "l": 6}
HEAD = "axes\n    b: batch\n    i = 2, j = 4, k = 5, l = 6\n\n"

NOISE = ("d", "0", "(", ")", "[", '"', "->", "over", "x", "train", "~", "@", "1e999", "none")

axes_lists = st.lists(st.sampled_from(list(SIZES)), min_size=1, max_size=4, unique=True)


def module_of(inputs: list[list[str]], result: list[str], value: str) -> torch.nn.Module:
    declared = ", ".join(f"x{n}[{' '.join(axes)}]" for n, axes in enumerate(inputs))
    return load_text(f"{HEAD}model m({declared}) -> [{' '.join(result)}]\n    {value}\n", "m.mw").module()


def tensors(inputs: list[list[str]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn([SIZES[a] for a in axes], generator=generator, dtype=torch.float64) for axes in inputs]


def spread(x: Tensor, axes: list[str], onto: list[str]) -> Tensor:
    """``x`` with dims in the order ``onto``, repeated along those it lacks."""
    order = [a for a in onto if a in axes]
    x = x.permute([axes.index(a) for a in order])
    for position, axis in enumerate(onto):
        if axis not in axes:
            x = x.unsqueeze(position)
    return x.expand([SIZES[a] for a in onto])


@settings(max_examples=80, deadline=None)
@given(st.lists(axes_lists, min_size=2, max_size=4), st.data())
def test_products_are_einsums(inputs: list[list[str]], data: st.DataObject) -> None:
    names = sorted({a for axes in inputs for a in axes})
    alone = [a for a in names if sum(a in axes for axes in inputs) == 1]
    result = data.draw(st.permutations(names))
    result = [a for a in result if a in alone or data.draw(st.booleans())]
    module = module_of(inputs, result, " * ".join(f"x{n}" for n in range(len(inputs))) + f" -> [{' '.join(result)}]")
    values = tensors(inputs, 0)
    equation = ",".join("".join(axes) for axes in inputs) + "->" + "".join(result)
    assert torch.allclose(module(*values), torch.einsum(equation, *values), atol=1e-10)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(axes_lists, min_size=2, max_size=4), st.lists(st.sampled_from("+-/"), min_size=3, max_size=3), st.data()
)
def test_elementwise_operators_align_by_name(
    inputs: list[list[str]], operators: list[str], data: st.DataObject
) -> None:
    widest = sorted({a for axes in inputs for a in axes})
    inputs = [list(data.draw(st.permutations(widest))), *inputs[1:]]
    result = list(data.draw(st.permutations(widest)))
    text = "x0"
    for n in range(1, len(inputs)):
        text = f"({text} {operators[n - 1]} x{n})"
    values = tensors(inputs, 1)
    known = {f"x{n}": spread(v, axes, result) for n, (v, axes) in enumerate(zip(values, inputs, strict=True))}
    expected = eval(text, {}, known)
    assert torch.allclose(module_of(inputs, result, text)(*values), expected, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(axes_lists, axes_lists, axes_lists, st.data())
def test_sum_of_product_flows_to_the_named_result(
    left: list[str], right: list[str], extra: list[str], data: st.DataObject
) -> None:
    shared = [a for a in left if a in right]
    kept = [a for a in sorted({*left, *right}) if a not in shared or data.draw(st.booleans())]
    if not kept:
        kept = shared[:1]
    extra = [a for a in extra if a in kept]
    inputs = [left, right] + ([extra] if extra else [])
    text = "x0 * x1" + (" - x2" if extra else "") + f" -> [{' '.join(kept)}]"
    values = tensors(inputs, 2)
    expected = torch.einsum(f"{''.join(left)},{''.join(right)}->{''.join(kept)}", values[0], values[1])
    if extra:
        expected = expected - spread(values[2], extra, kept)
    assert torch.allclose(module_of(inputs, kept, text)(*values), expected, atol=1e-10)


numbers = st.recursive(
    st.integers(1, 50).map(str) | st.sampled_from(["a", "c"]),
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
        | inner.map(lambda t: f"-{t}")
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(numbers)
def test_constants_are_those_of_python(text: str) -> None:
    file = parse(f"axes\n    b: batch\nmodel m(x[b]) -> [b]\n    {text}\n", "m.mw")
    assert file.model is not None
    last = file.model.body[0]
    assert isinstance(last, tree.Result)
    try:
        expected = eval(text, {}, {"a": 6, "c": 4})
    except ZeroDivisionError:
        with pytest.raises(MeshwrightError):
            number(last.value, {"a": 6, "c": 4})
        return
    assert number(last.value, {"a": 6, "c": 4}) == pytest.approx(expected)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["gpt.mw", "llama.mw"]), st.integers(1, 3))
def test_a_damaged_file_is_told_never_thrown(seed: int, name: str, faults: int) -> None:
    """Words deleted, doubled, exchanged or replaced anywhere: the file loads or the error has a code and an action."""
    chance = random.Random(seed)
    text = (EXAMPLES / name).read_text()
    for _ in range(faults):
        words = text.replace("\n", " \n ").split(" ")
        at, other = chance.randrange(len(words)), chance.randrange(len(words))
        match chance.randrange(5):
            case 0:
                del words[at]
            case 1:
                words.insert(at, words[other])
            case 2:
                words[at], words[other] = words[other], words[at]
            case 3:
                words[at] = chance.choice(
                    ["d", "0", "(", ")", "[", '"', "->", "over", "x", "train", "~", "@", "1e999", "none"]
                )
            case 4:
                cut = words[at]
                words[at] = cut[: len(cut) // 2]
        text = " ".join(words)
    try:
        load_text(text, name).loss_module("meta")
    except MeshwrightError as fault:
        for diagnostic in fault.diagnostics:
            assert diagnostic.code.startswith("E0") and diagnostic.action
