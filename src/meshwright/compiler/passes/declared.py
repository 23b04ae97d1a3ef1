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

    def of(self, origin: Origin) -> Meaning | None:
        """What is declared of a line."""
        return meaning_of(self.declared, names_of(origin))

    @property
    def mixed(self) -> bool:
        """Whether not all couplings have one meaning; what nothing is declared of is global over data ranks."""
        meanings = {entry.meaning for entry in self.declared}
        rest = any(entry.pattern == "**" for entry in self.declared)
        return len(meanings) > 1 or (self.weaker is not None and not rest)

    @property
    def only(self) -> Meaning | None:
        """The meaning of all couplings, where they have one."""
        return self.declared[0].meaning if self.declared and not self.mixed else None

    @property
    def weaker(self) -> Meaning | None:
        """The first meaning that is declared and is not global."""
        return next((entry.meaning for entry in self.declared if entry.meaning != "global"), None)

    def groups(self, meaning: Meaning | None) -> frozenset[str]:
        """The axes that cut the batch into groups of which each stands for the whole batch; none: it is the whole."""
        if meaning == "per data rank":
            return frozenset({MICRO, *self.batch})
        return frozenset({MICRO}) if meaning == "per microbatch" else frozenset()


NOTHING = Meanings()
GLOBAL = Meanings((Declaration("**", "global"),))
"""Everything means the whole batch."""
