"""What a plan declares of the ops that couple samples: which of its entries fits, and what that asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath

from torch import fx

from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.plan import Declaration, Meaning, pattern_expression


def names_of(origin: Origin, kind: str = "") -> tuple[str, ...]:
    """What an op is called in declarations: its module, its line under every tail of the file's path, its kind."""
    parts = PurePath(origin.file).parts if origin.file else ()
    lines = ["/".join(parts[at:]).removeprefix("//") for at in range(len(parts))]
    return (origin.module, kind, *(f"{path}:{origin.line}" for path in lines))


def meaning_of(declared: Sequence[Declaration], names: Iterable[str]) -> Meaning | None:
    """The meaning that the first fitting entry declares; None where no entry fits."""
    called = tuple(names)
    for entry in declared:
        expression = pattern_expression(entry.pattern)
        if any(expression.fullmatch(name) for name in called):
            return entry.meaning
    return None


def may_meet(declared: Sequence[Declaration], node: fx.Node) -> bool:
    """Whether microbatches may meet at a node: its line or module is declared to be global. Gradients meet where what
    they belong to has met."""
    note = annotation(node)
    if note.phase != "forward":
        return bool(declared)
    return meaning_of(declared, names_of(note.origin)) == "global"
