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


def declarations(given: str | Mapping[str, str] | Sequence[Declaration] | None) -> tuple[Declaration, ...]:
    """What was given as declarations: a meaning for all couplings, or one by pattern.

    Raises MeshwrightError E0765 for a word that is no meaning.
    """
    if given is None:
        return ()
    if isinstance(given, str):
        given = {DEFAULT: given}
    if not isinstance(given, Mapping):
        return tuple(given)
    found = []
    for key, word in given.items():
        meaning = _meaning(word)
        if meaning is None:
            raise error("E0765", f"'{word}' is no meaning of a coupling", action=suggestion(str(word), MEANINGS))
        found.append(_declaration(key, meaning))
    return _default_last(found)


def _declaration(key: str, meaning: Meaning) -> Declaration:
    return Declaration(_EVERYTHING if key == DEFAULT else key, meaning)


def _default_last(found: Sequence[Declaration]) -> tuple[Declaration, ...]:
    return tuple(sorted(found, key=lambda entry: entry.pattern == _EVERYTHING))


def _meaning(word: object) -> Meaning | None:
    """The meaning of a word, in which hyphens may stand for spaces."""
    said = word.replace("-", " ") if isinstance(word, str) else word
    return next((meaning for meaning in MEANINGS if meaning == said), None)
