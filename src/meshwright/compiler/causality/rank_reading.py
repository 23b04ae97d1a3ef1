"""What was read off the programs of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.compiler.causality.second.opinion import Opinion
from meshwright.compiler.causality.verdict import Verdict
from meshwright.compiler.diagnostics import Diagnostic


@dataclass(frozen=True)
class RankReading:
    """What the programs of all ranks let be seen."""

    verdict: Verdict
    alone: Verdict
    """That of the same step on one device, by the same analysis."""
    leaks: frozenset[str]
    ranks: int
    outputs: int
    """Positions whose logits or losses were read."""
    miniature: bool
    findings: tuple[Diagnostic, ...] = ()
    notes: tuple[str, ...] = ()
    second: Opinion | None = None
    """What the second reading says of the ranks; it changes nothing of the verdict."""

    @property
    def passed(self) -> bool:
        """Whether all outputs are known to see what they see on one device."""
        return not self.findings

    def headline(self) -> str:
        """The verdict beside that of one device."""
        leaks = f" ({', '.join(sorted(self.leaks))})" if self.leaks else ""
        ranks = f"{self.ranks} ranks{' of the miniature' if self.miniature else ''}"
        return f"{self.verdict}{leaks} on {ranks}, {self.alone} on one device; {self.outputs} outputs read"

    def json(self) -> dict[str, Any]:
        """What is not in the findings, as plain data."""
        return {
            "verdict": str(self.verdict),
            "alone": str(self.alone),
            "leaks": sorted(self.leaks),
            "ranks": self.ranks,
            "outputs": self.outputs,
            "miniature": self.miniature,
            "second": self.second.json() if self.second is not None else None,
        }

    def footline(self) -> str:
        """What the reading rests on: notes, and the second one."""
        second = [f"second reading: {self.second.headline()}"] if self.second is not None else []
        return "\n".join((*second, *self.notes))
