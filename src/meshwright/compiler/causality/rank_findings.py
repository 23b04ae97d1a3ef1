"""The diagnostics of reading ranks: E0790 to E0792."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from meshwright.compiler.diagnostics import Diagnostic
from meshwright.compiler.graph.program import annotation

_WHAT = {"future": "a later token of its row", "batch": "another row of the batch", "": "what it must not see"}


@dataclass(frozen=True)
class Difference:
    """An output of the ranks sees ``more`` than on one device, or ``less``."""

    kind: str
    row: int
    time: int
    source: str
    later: str
    """``future`` or ``batch``, if no output may see it."""
    first: fx.Node | None


def difference_finding(found: Difference) -> Diagnostic:
    """E0790 for more, E0791 for less."""
    node = found.first
    place = annotation(node).origin if node is not None and annotation(node).origin.file else None
    at = f"the output at row {found.row}, position {found.time}"
    notes = [f"{at} sees {found.source}" if found.kind == "more" else f"{at} does not see {found.source}"]
    if node is not None:
        notes.append(f"first differs in %{node.name} = {_called(node)}")
    if found.kind == "more":
        what = f"on its ranks an output depends on {_WHAT[found.later]}, which it does not on one device"
        code = "E0790"
    else:
        what, code = "on its ranks an output does not depend on what it depends on on one device", "E0791"
    action = "this is a fault of Meshwright, or of a program that was changed; compile again, and send the artefact"
    return Diagnostic(code, what, place, action, tuple(notes))


def unread_finding(name: str) -> Diagnostic:
    """E0792."""
    return Diagnostic(
        "E0792",
        f"the ranks' program has no value '{name}', which the outputs of one device are read from",
        None,
        "compile again: the program was changed",
    )


def _called(node: fx.Node) -> str:
    name = getattr(node.target, "__name__", "")
    return str(node.target) if "." in str(node.target) and not str(node.target).startswith("<") else str(name)
