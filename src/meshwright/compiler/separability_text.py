"""What couplings of samples mean, as text: the table ``[separability]`` of a plan, an argument, a word of a preset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from meshwright.compiler.diagnostics import error, suggestion
from meshwright.compiler.plan import Declaration, Meaning
from meshwright.compiler.recompute_reader import Reader

MEANINGS: tuple[Meaning, ...] = get_args(Meaning)
DEFAULT = "default"
"""The key that stands for whatever no other fits."""
_EVERYTHING = "**"


def separability_entries(declared: Sequence[Declaration]) -> Iterator[tuple[str, Meaning]]:
    """The keys and words of a table."""
    for entry in declared:
        yield (DEFAULT if entry.pattern == _EVERYTHING else entry.pattern), entry.meaning


def read_separability(reader: Reader, table: Mapping[str, Any]) -> tuple[Declaration, ...]:
    """The table ``[separability]``. Faults: E0765 for a word that is no meaning."""
    found: list[Declaration] = []
    for key, word in table.items():
        meaning = _meaning(word)
        if meaning is None:
            place = reader.toml.value("separability", key)
            reader.fault("E0765", f"'{word}' is no meaning of a coupling", place, suggestion(str(word), MEANINGS))
        else:
            found.append(_declaration(key, meaning))
    return _default_last(found)


Separability = str | Mapping[str, str] | Sequence[str | Declaration]
"""A meaning for all couplings (``global``), or one by pattern: as a mapping, or as text (``aux=global``), of which
several stand in a sequence or between semicolons."""


def declarations(given: Separability | None) -> tuple[Declaration, ...]:
    """What was given as declarations.

    Raises MeshwrightError E0765 for a word that is no meaning, and for a pattern of which two things are said.
    """
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        entries = [given] if isinstance(given, str) else list(given)
        if not all(isinstance(entry, str) for entry in entries):
            return tuple(entry for entry in entries if isinstance(entry, Declaration))
        given = _spoken([str(entry) for entry in entries])
    found = []
    for key, word in given.items():
        meaning = _meaning(word)
        if meaning is None:
            raise error("E0765", f"'{word}' is no meaning of a coupling", action=suggestion(str(word), MEANINGS))
        found.append(_declaration(key, meaning))
    return _default_last(found)


def _spoken(texts: Sequence[str]) -> dict[str, str]:
    """Patterns and words of ``aux=global``; a word alone is for whatever no other fits."""
    found: dict[str, str] = {}
    for text in (part.strip() for one in texts for part in one.split(";")):
        pattern, equals, word = (part.strip() for part in text.rpartition("="))
        key = pattern if equals else DEFAULT
        if key in found:
            what = f"'{key}'" if equals else "whatever nothing else is said of"
            raise error("E0765", f"two meanings are given for {what}", action="give one of them")
        found[key] = word
    return found


def _declaration(key: str, meaning: Meaning) -> Declaration:
    return Declaration(_EVERYTHING if key == DEFAULT else key, meaning)


def _default_last(found: Sequence[Declaration]) -> tuple[Declaration, ...]:
    return tuple(sorted(found, key=lambda entry: entry.pattern == _EVERYTHING))


def _meaning(word: object) -> Meaning | None:
    """The meaning of a word, in which hyphens may stand for spaces."""
    said = word.replace("-", " ") if isinstance(word, str) else word
    return next((meaning for meaning in MEANINGS if meaning == said), None)
