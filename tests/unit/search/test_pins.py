"""Pins: what each word fixes, and how those of a file and of the command line meet."""

from __future__ import annotations

import pytest

from meshwright.compiler.diagnostics import MeshwrightError, Span
from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.search.pins import Pins


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tp=8", {"tensor": 8}), ("tp", {"tensor_wanted": True}), ("no tp", {"tensor": 1}), ("no-tp", {"tensor": 1}),
        ("ddp", {"storage": 0, "data": 1}), ("ddp=4", {"replica": 4, "storage": 0, "data": 1}),
        ("fsdp", {"storage": 3}), ("zero3=8", {"storage": 3, "data": 8}), ("ddp=2,fsdp", {"replica": 2, "storage": 3}),
        ("ddp,zero1", {"copies": True, "storage": 1}), ("sp", {"sequence": True, "tensor_wanted": True}),
        ("no sp", {"sequence": False}), ("micro=4", {"microbatches": 4}), ("recompute", {"save": "nothing"}),
        ("recompute=2", {"save": "nothing", "every": 2}), ("recompute=full/2", {"save": "nothing", "every": 2}),
        ("selective", {"save": "matmuls"}), ("recompute=selective", {"save": "matmuls"}),
        ("recompute=none", {"save": "all", "every": 1}), ("no recompute", {"save": "all", "every": 1}),
        ("prefetch", {"prefetch": 1}), ("prefetch=2", {"prefetch": 2}), ("no prefetch", {"prefetch": 0}),
        ("offload", {"offload": True}), ("no offload", {"offload": False}),
        ("whole=vocabulary", {"whole": ("vocabulary",)}),
    ],
)  # fmt: skip
def test_words(text: str, expected: dict[str, object]) -> None:
    pins = parse_pins([text])
    for name in ("replica", "data", "tensor", "storage", "sequence", "microbatches", "save", "every", "prefetch",
                 "offload", "whole"):  # fmt: skip
        assert getattr(pins, name) == expected.get(name), name
    assert pins.tensor_wanted == expected.get("tensor_wanted", False)
    assert pins.copies == (text in ("ddp", "ddp,zero1"))


def test_the_words_of_a_candidate_are_pins_that_allow_it() -> None:
    for one in (
        Candidate((("data", 64),), 3, prefetch=1),
        Candidate((("replica", 2), ("data", 8), ("tensor", 4)), 3, True, 4, "matmuls", 1, 1),
        Candidate((("replica", 8),), 0, microbatches=2, save="nothing", every=2),
        Candidate((("data", 8),), 1, offload=True),
    ):
        assert parse_pins([one.text]).allow(one), one.text


def test_pins_of_a_file_and_of_the_command_line_are_joined() -> None:
    place = Span("gpt.mw", 30, 5, 4, "    mesh tensor = 2")
    joined = parse_pins(["tp=2"], [place]).joined(parse_pins(["micro=4"]))
    assert (joined.tensor, joined.microbatches) == (2, 4)
    assert joined.text == "tp=2,micro=4"
    assert joined.place("tensor") == place
    with pytest.raises(MeshwrightError) as fault:
        parse_pins(["tp=2"], [place]).joined(parse_pins(["tp=4"]))
    assert fault.value.diagnostics[0].code == "E0432"
    assert fault.value.diagnostics[0].place == place


def test_nothing_pinned() -> None:
    assert Pins().allow(Candidate((("data", 8),), 3))
    assert parse_pins([]) == Pins()
