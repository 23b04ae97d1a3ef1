"""What the relation checker says of a program: findings with the node, the user's line, and what must be there."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.compiler.diagnostics import Diagnostic, Origin

WRONG = "E0740"
"""A value of the ranks' program is not the one that the step for one device computes."""
UNDECIDED = "E0741"
"""It cannot be told."""
OUTPUT = "E0742"
"""A result of the step (a gradient, an updated weight) is another value, or lies in another way, or is missing."""
SCHEDULE = "E0743"
"""A pipeline's passes do not each run once for every microbatch."""


@dataclass(frozen=True)
class Finding:
    """One place where a program stops being equivalent. ``node`` is its name in ``graph``."""

    code: str
    graph: str
    node: str
    message: str
    found: str = ""
    expected: str = ""
    origin: Origin | None = None

    def diagnostic(self) -> Diagnostic:
        """As it is told to a person."""
        notes = [f"at '{self.node}' of {self.graph}"] if self.node else [f"in {self.graph}"]
        notes += [f"found {self.found}"] if self.found else []
        notes += [f"expected {self.expected}"] if self.expected else []
        action = (
            "verify it by numbers: meshwright verify --miniature"
            if self.code == UNDECIDED
            else "this is a fault of Meshwright; please send the artefact, and use another plan meanwhile"
        )
        return Diagnostic(self.code, self.message, self.origin, action, tuple(notes))
