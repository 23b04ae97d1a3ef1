"""The words of a preset, taken apart: what is malformed, unknown or said twice is told here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from meshwright.compiler.diagnostics import error, suggestion
from meshwright.compiler.plan import PIPE, Save

AXES = {"ddp": "replica", "zero1": "data", "zero2": "data", "zero3": "data", "fsdp": "data", "tp": "tensor"}
AXES |= {"pp": PIPE}
SAVES: dict[str, Save] = {"recompute": "nothing", "selective": "matmuls"}
_FLAGS = ("sp", "micro", "recompute", "selective", "prefetch", "offload", "virtual")
_NUMBERED = ("micro", "recompute", "selective", "prefetch", "virtual")
_NAMED = {"schedule": "1f1b", "numerics": "safe", "separability": "global"}
"""Words that take a word, each with one that it may take."""
_WHAT = {
    "schedule": "the name of a schedule",
    "numerics": "a policy",
    "separability": "what couplings of samples mean",
}
_PLANNED = {
    "by-stage": "how much a stage must recompute is found with the memory of a cluster",
    "whole": "which tensors are left whole is chosen among those that can be cut",
}
_OF_PIPELINES = ("schedule", "virtual")


@dataclass(frozen=True)
class Words:
    """What a preset says."""

    text: str
    """All of it; the words that take a word come last."""
    sizes: dict[str, int]
    """By word, the ranks of its axis."""
    flags: dict[str, int]
    """The other words with their numbers; 1 where a number is left out, 0 where there is none."""
    named: dict[str, str]
    """``schedule``, ``numerics`` and ``separability``, as far as they are there."""


def words_of(text: str, ranks: int | None = None) -> Words:
    """The words of a preset for so many ranks. Raises E0307 for words that are not known, sizes that do not fit the
    ranks, axes named twice, and words that need another."""
    named: dict[str, str] = {}
    rest = text
    for word in _NAMED:
        rest, said = _take(word, rest)
        if said:
            named[word] = said
    whole = ",".join(filter(None, [rest, *(f"{word}={said}" for word, said in named.items())]))
    sizes, flags = _parse(rest, whole, named, ranks)
    if sizes.get("pp", 1) == 1:
        for word in (w for w in _OF_PIPELINES if w in named or w in flags):
            message = f"'{word}' needs 'pp', above 1: it says how a pipeline runs"
            raise error("E0307", message, None, f"give pp=2, say, or leave '{word}' out")
    return Words(whole, sizes, flags, named)


def _take(word: str, text: str) -> tuple[str, str]:
    """The text without the word ``word=...``, and what it says; empty if it is not there."""
    said = r"[^,]+?" if word == "separability" else r"[\w-]+"  # patterns of names have dots, stars and semicolons
    found = re.search(rf"(?:^|(?<=,))\s*{word}\s*=\s*({said})\s*(?:,|$)", text)
    if found is None:
        return text, ""
    rest = (part.strip(" ,") for part in (text[: found.start()], text[found.end() :]))
    return ",".join(filter(None, rest)), found[1]


def _parse(
    rest: str, text: str, named: dict[str, str], ranks: int | None
) -> tuple[dict[str, int], dict[str, int]]:  # fmt: skip
    """Sizes of axes, and the other words that are no ``named`` ones, of the ``rest`` of a text."""
    sizes: dict[str, int] = {}
    flags: dict[str, int] = {}
    open_word = ""
    for item in _items(rest):
        word, number = _word_and_number(item)
        if word in sizes or word in flags or (word in AXES and AXES[word] in {AXES[w] for w in sizes}):
            raise error("E0307", f"the preset '{text}' names the axis of '{word}' twice", None, "name each axis once")
        if word in _FLAGS:
            flags[word] = number
        elif number:
            sizes[word] = number
        else:
            if open_word:
                raise error("E0307", f"both '{open_word}' and '{word}' leave their sizes out", None, "give one a size")
            open_word = word
            sizes[word] = 0
    if not sizes:
        raise error("E0307", f"the preset '{text}' names no axis", None, _with_an_axis(flags, named, ranks))
    _fit(text, sizes, open_word, ranks)
    if flags.keys() >= SAVES.keys():
        message = "'recompute' and 'selective' exclude each other: both say what blocks keep"
        raise error("E0307", message, None, "leave one of the two out")
    if "sp" in flags and "tp" not in sizes:
        raise error("E0307", "'sp' needs 'tp': it cuts activations over the tensor axis", None, "add tp=2, say")
    return sizes, flags


def _with_an_axis(flags: dict[str, int], named: dict[str, str], ranks: int | None) -> str:
    """What to write instead of a preset that has these words and no axis."""
    if not flags and not named:
        return "write fsdp, or ddp=2,tp=2"
    axes = ["tp" if "sp" in flags else "fsdp"]
    if any(word in flags or word in named for word in _OF_PIPELINES):
        least = next((n for n in range(2, ranks + 1) if ranks % n == 0), 2) if ranks is not None else 2
        axes.append(f"pp={least}")
    if ranks is None:
        axes[0] += "=2"
    numbered = [f"{flag}={n}" if flag in ("micro", "virtual") or n > 1 else flag for flag, n in flags.items()]
    return f"write {','.join([*axes, *numbered, *(f'{word}={said}' for word, said in named.items())])}"


def _items(text: str) -> list[str]:
    """The words of a preset, each with its number if it has one. Raises E0307 if no comma is between two."""
    items = [item for item in (re.sub(r"\s*=\s*", "=", i.strip()) for i in re.split("[,*]", text)) if item]
    parts = [part for item in items for part in re.split(r"[\s;+&]+", item) if part]
    if parts != items:
        message = f"words of the preset '{text}' are not separated by commas"
        raise error("E0307", message, None, f"write {','.join(parts)}" if parts else "write fsdp, or ddp=2,tp=2")
    return items


def _word_and_number(item: str) -> tuple[str, int]:
    """A word that is known, and its number; 0 if it has none."""
    word, equals, number = _in_words_of_the_field(item).partition("=")
    if word in _NAMED:
        raise error("E0307", f"'{item}' needs {_WHAT[word]}", None, f"write {word}={_NAMED[word]}, say")
    if word in _PLANNED:
        message = f"'{word}' is a word of the planner's, not of a preset: {_PLANNED[word]}"
        raise error("E0307", message, None, "let the planner choose (plan auto), or give the plan file that it writes")
    if word not in AXES and word not in _FLAGS:
        known = [*AXES, *_FLAGS, *_NAMED]
        raise error("E0307", f"'{word}' is not a word of a preset", None, suggestion(word, known))
    if word == "sp" and equals:
        raise error("E0307", f"'{item}': sp takes no number, it follows tp", None, "write sp")
    if word == "offload" and equals:
        raise error("E0307", f"'{item}': offload takes no number", None, "write offload")
    if word == "micro" and not number:
        raise error("E0307", "'micro' needs the number of microbatches", None, "write micro=4, say")
    if equals and not re.fullmatch("0*[1-9][0-9]{0,8}", number):
        raise error("E0307", f"'{item}' needs a positive whole number", None, f"write {word}=2, say")
    return word, int(number or (1 if word in _NUMBERED else 0))


def _in_words_of_the_field(item: str) -> str:
    """``recompute=selective`` as ``selective``, ``recompute=full/2`` as ``recompute=2``; anything else as it is."""
    found = re.fullmatch(r"recompute=(selective|full)(?:/(.+))?", item)
    if found is None:
        return item
    word = "selective" if found[1] == "selective" else "recompute"
    return f"{word}={found[2]}" if found[2] else word


def _fit(text: str, sizes: dict[str, int], open_word: str, ranks: int | None) -> None:
    """Give the word without a size the ranks that the others leave. Raises E0307 if the sizes do not fit."""
    given = math.prod(n for n in sizes.values() if n)
    if open_word and ranks is None:
        message = f"'{open_word}' has no size, and the number of ranks is not known"
        raise error("E0307", message, None, f"give a size ({open_word}=4) or the number of ranks")
    if open_word and ranks is not None:
        if ranks % given:
            message = f"'{open_word}' cannot get a size: {ranks} ranks cannot be divided by {given}"
            raise error("E0307", message, None, f"choose sizes whose product is {ranks}")
        sizes[open_word] = ranks // given
    elif ranks is not None and given != ranks:
        action = f"start {given} ranks, or choose sizes whose product is {ranks}"
        raise error("E0307", f"the preset '{text}' is for {given} ranks, not {ranks}", None, action)
