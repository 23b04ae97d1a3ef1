"""Which declaration counts where a sum over groups of the batch is paid, if a plan declares several meanings.

In the forward pass it is that of the line that needs the sum. A gradient is the sum of what its readers made of a
value, so it is paid as that value was: it has the meaning of what the forward line that it belongs to had read, and
keeps it on its way to where it is paid. Where a gradient owes sums of two meanings at once it cannot be paid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from meshwright.compiler.diagnostics import MeshwrightError, Origin, error
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.mesh import MICRO, Sharding
from meshwright.compiler.passes.declared import Meanings
from meshwright.compiler.plan import Meaning

Lines = Mapping[Meaning, Origin]
"""Meanings, each with a line that has it."""
_Line = tuple[str, str, int]


@dataclass
class ToldApart:
    """What is known of the values of one graph. ``meanings``: what a plan declares."""

    meanings: Meanings
    _carried: dict[fx.Node, Lines] = field(default_factory=dict)
    """Of values of the forward pass that are the same for all samples of a group: what they are made of."""
    _read: dict[_Line, dict[Meaning, Origin]] = field(default_factory=dict)
    """By line: the meanings of such values that it reads."""
    _owed: dict[fx.Node, Lines] = field(default_factory=dict)
    """Of gradients that owe sums over groups."""
    _where: dict[Meaning, Origin] = field(default_factory=dict)
    """By meaning: the first line that has it."""

    def meaning(self, node: fx.Node, user: fx.Node) -> Meaning | None:
        """The meaning by which a value is paid for a reader; None: nothing is declared, so the whole batch is meant.

        Raises E0767 for a gradient that owes sums of two meanings.
        """
        if not self.meanings.mixed:
            return self.meanings.only
        owed = self._owed.get(node, {})
        if len(owed) > 1:
            raise _both(owed, annotation(user).origin)
        return next(iter(owed)) if owed else self.meanings.of(annotation(user).origin)

    def pay(self, made: fx.Node, meaning: Meaning | None, user: fx.Node) -> None:
        """Note that ``made`` was paid by a meaning."""
        if self.meanings.mixed and meaning is not None and _forward(user):
            self._carried[made] = {meaning: annotation(user).origin}
            self._where.setdefault(meaning, annotation(user).origin)

    def made_to_owe(self, made: fx.Node, user: fx.Node, mean: bool = False) -> None:
        """Note that ``made`` owes what was whole before; ``mean``: the mean of what groups had, and it is each group's
        own again where it is paid for samples."""
        meaning = self.meanings.weaker if mean else "global"
        if self.meanings.mixed and meaning is not None and not _forward(user):
            self._owed[made] = {meaning: self._where.get(meaning, annotation(user).origin)}

    def moved(self, made: fx.Node, source: fx.Node, target: Sharding) -> None:
        """Note that ``made`` is a value in another sharding."""
        if source in self._carried and made not in self._carried:
            self._carried[made] = self._carried[source]
        if source in self._owed and self._of_groups(target.owed):
            self._owed[made] = self._owed[source]

    def derive(
        self, made: fx.Node, sources: Iterable[fx.Node], results: Sequence[Sharding | None], varies: bool
    ) -> None:
        """Note what is made of ``sources``; ``varies``: it differs from group to group.

        Raises E0767 for a gradient that does, and may be that of what is global: it would be a mean of groups then.
        """
        if not self.meanings.mixed:
            return
        note, sources = annotation(made), tuple(sources)
        line = (note.origin.module, note.origin.file, note.origin.line)
        known = [r for r in results if r is not None]
        if _forward(made):
            carried = {m: o for s in sources for m, o in self._carried.get(s, {}).items()}
            for meaning, origin in carried.items():
                self._read.setdefault(line, {}).setdefault(meaning, origin)
            if carried and not any(self._of_groups(r.axes) for r in known):
                self._carried[made] = carried
            return
        # where gradients of a value are added up, each was made by a line of its own
        made_here = varies and made.target is not torch.ops.aten.add.Tensor
        if made_here and ("global" in self._read.get(line, {}) or self.meanings.of(note.origin) == "global"):
            weaker = self.meanings.weaker
            assert weaker is not None
            own_line = self._where.get(weaker, note.origin)
            raise _both({"global": self._read.get(line, {}).get("global", note.origin), weaker: own_line}, note.origin)
        if not any(self._of_groups(r.owed) for r in known):
            return
        owed = {m: o for s in sources for m, o in self._owed.get(s, {}).items()}
        declared = self.meanings.of(note.origin)
        own = self._read.get(line) or ({declared: note.origin} if declared is not None else {})
        self._owed[made] = owed or own

    def _of_groups(self, axes: Iterable[str]) -> bool:
        return any(axis == MICRO or axis in self.meanings.batch for axis in axes)


def _both(lines: Lines, origin: Origin) -> MeshwrightError:
    (one, here), (other, there) = sorted(lines.items(), key=lambda item: item[0] != "global")[:2]
    message = f"what is {one} and what is {other} are made of each other here, so that gradients cannot be told apart"
    notes = (f"{one}: {_told(here)}", f"{other}: {_told(there)}")
    return error("E0767", message, origin, f"declare both {one}, or both {other}", notes)


def _forward(node: fx.Node) -> bool:
    """Whether a node does what the forward pass does, if only once more."""
    note = annotation(node)
    return note.phase == "forward" or note.recomputed


def _told(origin: Origin) -> str:
    place = f"{origin.file}:{origin.line}" if origin.file else origin.module
    return place if not origin.text else f"{place} ({origin.text})"
