"""Reads pins in the words of presets: ``tp=8``, ``fsdp``, ``fsdp=8,ddp=2``, ``micro=4``, ``no sp``, ``selective``.

As in presets, ``recompute`` and ``recompute=2`` (every second block) may also be written ``recompute=full`` and
``recompute=full/2``, ``selective`` also ``recompute=selective``; ``no recompute`` is ``recompute=none``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, Span, error, nearest, suggestion
from meshwright.compiler.plan import Save
from meshwright.compiler.recompute_reader import POLICIES
from meshwright.compiler.schedules.catalogue import modules
from meshwright.compiler.search.candidate import SAVES
from meshwright.compiler.search.pins import Pins
from meshwright.compiler.separability_text import declarations

WORDS = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "fsdp",
    "tp",
    "sp",
    "micro",
    "recompute",
    "selective",
    "prefetch",
    "offload",
    "whole",
    "numerics",
    "pp",
    "schedule",
    "virtual",
    "by-stage",
    "separability",
)
"""The words of a pin; ``no`` before some of them denies them."""
_DENIED: dict[str, dict[str, object]] = {
    "tp": {"tensor": 1},
    "sp": {"sequence": False},
    "recompute": {"save": "all", "every": 1},
    "prefetch": {"prefetch": 0},
    "offload": {"offload": False},
    "pp": {"pipe": 1},
    "by-stage": {"by_stage": False},
}
_LEVELS = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
_SAVE: dict[str, Save] = {word: save for save, word in SAVES.items()}


def parse_pins(texts: Iterable[str], places: Iterable[Span | None] = ()) -> Pins:
    """The pins of some texts, each of which may hold several, separated by commas.

    Raises MeshwrightError: E0430 for a word that is not known, E0431 for its value, E0432 for pins that contradict.
    """
    texts = list(texts)
    where = [*places, *([None] * len(texts))]
    pins = Pins()
    faults: list[Diagnostic] = []
    for text, place in zip(texts, where, strict=False):
        for item in (i.strip() for i in text.split(",") if i.strip()):
            try:
                pins = _joined(pins, _one(item, place), item, place)
            except MeshwrightError as fault:
                faults.extend(fault.diagnostics)
    if not faults and not pins.words and any(t.strip() == "" or not t.replace(",", "").strip() for t in texts):
        faults.append(Diagnostic("E0430", "the pin is empty", where[0], "write tp=8, say"))
    if faults:
        raise MeshwrightError(*faults)
    return _complete(pins)


def _one(item: str, place: Span | None) -> dict[str, object]:
    """The fields that one word fixes."""
    denied = re.fullmatch(r"no[ -]([\w-]+)", item)
    word, equals, value = (denied[1], "", "") if denied else (p.strip() for p in item.partition("="))
    if word not in WORDS:
        raise error("E0430", f"'{word}' is not a word of a pin", place, _instead(word))
    if denied:
        if word not in _DENIED:
            raise error("E0430", f"'no {word}' says nothing", place, f"one can deny {', '.join(_DENIED)}")
        return dict(_DENIED[word])
    match word:
        case "separability":
            return {"separability": declarations(value)}
        case "sp" | "offload" | "by-stage":
            if equals:
                raise error("E0431", f"'{item}': {word} takes no number", place, f"write {word}, or no {word}")
            return {{"sp": "sequence", "offload": "offload", "by-stage": "by_stage"}[word]: True}
        case "recompute" | "selective":
            return _recompute(word, item, value if equals else None, place)
        case "whole":
            if value != "vocabulary":
                message = f"'{item}': what is left whole under tensor parallelism is 'vocabulary'"
                raise error("E0431", message, place, "write whole=vocabulary")
            return {"whole": ("vocabulary",)}
        case "numerics":
            if value not in POLICIES:
                message = f"'{item}': numerics is {', '.join(POLICIES)}"
                raise error("E0431", message, place, f"write numerics={nearest(value, POLICIES) or POLICIES[0]}")
            return {"numerics": value}
        case "prefetch":
            if equals and not re.fullmatch(r"\d{1,2}", value):
                raise error("E0431", f"'{item}' needs a number of blocks", place, "write prefetch, or no prefetch")
            return {"prefetch": int(value) if equals else 1}
        case "micro":
            if not equals:
                raise error("E0431", "'micro' needs the number of microbatches", place, "write micro=4, say")
            return {"microbatches": _number(word, item, value, place)}
        case "tp":
            return {"tensor": _number(word, item, value, place)} if equals else {"tensor_wanted": True}
        case "pp":
            return {"pipe": _number(word, item, value, place)} if equals else {"pipe_wanted": True}
        case "virtual":
            return {"virtual": _number(word, item, value, place)}
        case "schedule":
            return {"schedule": _schedule(item, value, place)}
        case "ddp":
            return {"replica": _number(word, item, value, place)} if equals else {"copies": True}
    found: dict[str, object] = {"storage": _LEVELS[word]}
    return {**found, "data": _number(word, item, value, place)} if equals else found


def _instead(word: str) -> str:
    """A parameter is no word; where it can be said how it lies."""
    if "." not in word:
        return suggestion(word, WORDS)
    return "say how a parameter lies in a plan file, or in the 'parallel' section of a .mw file"


def _number(word: str, item: str, value: str, place: Span | None) -> int:
    if not re.fullmatch("0*[1-9][0-9]{0,8}", value):
        raise error("E0431", f"'{item}' needs a positive whole number", place, f"write {word}=2, say")
    return int(value)


def _schedule(item: str, value: str, place: Span | None) -> str:
    known = modules()
    if value not in known:
        action = suggestion(value, known) if value else f"write schedule={next(iter(known))}, say"
        raise error("E0431", f"'{item}' names no pipeline schedule", place, action)
    return value


def _recompute(word: str, item: str, value: str | None, place: Span | None) -> dict[str, object]:
    """``recompute``, ``selective``, each with or without a number of blocks, or the word after ``recompute=``."""
    save: Save = "matmuls" if word == "selective" else "nothing"
    number = value
    if word == "recompute" and value is not None and not value[:1].isdigit():
        name, slash, every = value.partition("/")
        save = _SAVE.get(name, "all")
        number = every if slash else None
        if name not in _SAVE or (name == "none" and slash):
            action = "write recompute=none, selective, full, or full/2 for every second block"
            raise error("E0431", f"'{item}' is no way to recompute", place, action)
    if number is None:
        return {"save": save}
    if not re.fullmatch("0*[1-9][0-9]{0,3}", number):
        action = f"write {word}=2 for every second block, or {word} for all"
        raise error("E0431", f"'{item}' needs a positive whole number of blocks", place, action)
    return {"save": save, "every": int(number)}


def _joined(pins: Pins, fields: dict[str, object], item: str, place: Span | None) -> Pins:
    for name, value in fields.items():
        before = getattr(pins, name)
        if before is not None and before != value and name not in ("tensor_wanted", "copies", "pipe_wanted"):
            raise error(
                "E0432",
                f"the pins '{pins.word(name)}' and '{item}' contradict each other",
                place or pins.place(name),
                f"keep one of '{pins.word(name)}' and '{item}'",
            )
    known = dict(pins.words) | dict.fromkeys(fields, item)
    spots = dict(pins.places) | dict.fromkeys(fields, place)
    changes: dict[str, object] = {**fields, "words": tuple(known.items()), "places": tuple(spots.items())}
    return replace(pins, **changes)  # type: ignore[arg-type]  # the fields of Pins, by name


def _complete(pins: Pins) -> Pins:
    """What pins imply of one another. Raises E0432 and E0437 for pins that cannot hold together."""
    if pins.tensor_wanted and pins.tensor == 1:
        raise error(
            "E0432", "the pins 'tp' and 'no tp' contradict each other", pins.place("tensor"), "keep one of them"
        )
    if pins.pipe == 1 and (pins.pipe_wanted or pins.schedule or (pins.virtual or 1) > 1):
        name = "pipe_wanted" if pins.pipe_wanted else "schedule" if pins.schedule else "virtual"
        message = f"the pins '{pins.word('pipe')}' and '{pins.word(name)}' contradict each other"
        raise error("E0432", message, pins.place(name), "keep one of them")
    if pins.pipe is None and (pins.schedule or pins.by_stage or (pins.virtual or 1) > 1):
        pins = replace(pins, pipe_wanted=True)
    if pins.sequence and pins.tensor == 1:
        message = (
            f"'sp' needs 'tp', but '{pins.word('tensor')}' leaves no tensor parallelism: it cuts activations over it"
        )
        raise error("E0437", message, pins.place("sequence"), "leave 'sp' out, or write tp=2, say")
    if pins.sequence and pins.tensor is None:
        pins = replace(pins, tensor_wanted=True)
    if pins.whole and pins.tensor == 1:
        message = f"'{pins.word('whole')}' needs 'tp', but '{pins.word('tensor')}' leaves no tensor parallelism"
        raise error("E0437", message, pins.place("whole"), f"leave '{pins.word('whole')}' out, or write tp=2, say")
    if (pins.replica is not None or pins.copies) and pins.data is None and pins.storage is None:
        pins = replace(pins, storage=0)  # ddp alone: plain data parallelism
    if pins.storage == 0 and pins.data is None:
        pins = replace(pins, data=1)
    if pins.save is not None and pins.every is None:
        pins = replace(pins, every=1) if pins.save == "all" else pins
    return pins
