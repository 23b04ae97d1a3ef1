"""The page on the language: its file loads, its Python runs, and it names every function there is."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.frontend.language import load_text
from meshwright.frontend.language.functions import builtins
from meshwright.frontend.language.functions.pointwise import pointwise_names
from meshwright.frontend.language.sizes import FUNCTIONS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "language.md").read_text()


def test_the_file_on_the_page_trains() -> None:
    (text,) = re.findall(r"```mw\n(.*?)```", PAGE, re.DOTALL)
    file = load_text(text, "small.mw")
    module = file.loss_module()
    loss = module(**file.example_batch())
    loss.backward()
    assert all(p.grad is not None for p in module.parameters())


def test_the_python_on_the_page_runs() -> None:
    (text,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(text.replace('"examples/gpt.mw"', repr(str(ROOT / "examples" / "gpt.mw"))), names)
    assert float(names["loss"].detach()) > 0  # type: ignore[attr-defined]  # a tensor


def test_every_function_is_on_the_page() -> None:
    words = set(re.findall(r"\w+", PAGE))
    missing = {*builtins(), *pointwise_names(), *FUNCTIONS} - words
    assert not missing
