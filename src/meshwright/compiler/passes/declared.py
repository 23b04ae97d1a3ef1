"""What a plan declares of the ops that couple samples: which of its entries fits, and what that asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from torch import fx

from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.mesh import MICRO
from meshwright.compiler.plan import Declaration, Meaning, pattern_expression


def names_of(origin: Origin, kind: str = "") -> tuple[str, ...]:
    """What an op is called in declarations: its module, its line under every tail of the file's path, its kind."""
    parts = PurePath(origin.file).parts if origin.file else ()
    paths = [origin.file, *("/".join(parts[at:]) for at in range(1, len(parts)))] if parts else []
    return (origin.module, kind, *(f"{path}:{origin.line}" for path in paths))


def meaning_of(declared: Sequence[Declaration], names: Iterable[str]) -> Meaning | None:
    """The meaning that the first fitting entry declares; None where no entry fits."""
    called = tuple(names)
    for entry in declared:
        expression = pattern_expression(entry.pattern)
        if any(expression.fullmatch(name) for name in called):
            return entry.meaning
    return None


@dataclass(frozen=True)
class Meanings:
    """What a plan declares, as propagation asks for it. ``batch``: the axes of ranks that cut the batch."""

    declared: tuple[Declaration, ...] = ()
    batch: tuple[str, ...] = ()

    def may_couple(self, node: fx.Node) -> bool:
        """Whether something is declared of what a node of the forward pass couples. Gradients follow what they belong
        to."""
        note = annotation(node)
        if note.phase != "forward":
            return bool(self.declared)
        return meaning_of(self.declared, names_of(note.origin)) is not None

    @property
    def groups(self) -> frozenset[str]:
        """The axes that cut the batch into groups of which each stands for the whole batch; none: all is global."""
        meanings = {entry.meaning for entry in self.declared}
        if "per data rank" in meanings:
            return frozenset({MICRO, *self.batch})
        return frozenset({MICRO}) if "per microbatch" in meanings else frozenset()


NOTHING = Meanings()
GLOBAL = Meanings((Declaration("**", "global"),))
"""Everything means the whole batch."""
