"""The diagnostics of reading ranks: E0790 to E0792, E0794, E0795."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from meshwright.compiler.causality.readings import First
from meshwright.compiler.diagnostics import Diagnostic, InternalError, Origin
from meshwright.compiler.graph.functions import function_name
from meshwright.compiler.graph.program import annotation

TOLD = 8
"""Nodes that are told, at most."""
_WHAT = {"future": "a later token of its row", "batch": "another row of the batch", "": "more"}


@dataclass(frozen=True)
class Difference:
    """The ranks see ``more`` than one device, or ``less``: an output (else a value on the way), and of what."""

    kind: str
    output: str
    source: str
    later: str
    """``future`` or ``batch``, if no output may see it."""
    first: First | None


def difference_finding(found: Difference) -> Diagnostic:
    """E0790 for more, E0791 for less."""
    node = found.first.node if found.first is not None else None
    place = annotation(node).origin if node is not None and annotation(node).origin.file else None
    sees = "sees" if found.kind == "more" else "does not see"
    notes = [f"{found.output} {sees} {found.source}" if found.output else "outputs are the same by other ways"]
    subject = "an output depends" if found.output else "a value depends"
    if node is not None:
        made = node.all_input_nodes[0] if node.target is operator.getitem else node
        notes.append(f"first differs in %{made.name} = {called(made)}")
        alone = found.first.alone if found.first is not None else ()
        if alone:
            shown = ", ".join(f"%{n.name} = {called(n)}" for n in alone[-TOLD:])
            notes.append(f"one device has nothing like what leads there: {shown}")
    if found.kind == "more":
        what, code = f"on its ranks {subject} on {_WHAT[found.later]}, which it does not on one device", "E0790"
    else:
        what, code = f"on its ranks {subject} on less than on one device", "E0791"
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


def stopped_finding(why: str) -> Diagnostic:
    """E0792: the program does not run at all."""
    first = next(iter(why.splitlines()), "")
    action = "compile again: the program was changed"
    return Diagnostic("E0792", "the ranks' program does not run, so nothing can be read off it", None, action, (first,))


def unknown_finding(ops: Mapping[str, Origin]) -> Diagnostic:
    """E0794: outputs depend on the results of ops without a rule, which are taken to depend on all that they get."""
    place = next((origin for origin in ops.values() if origin.file), None)
    what = f"it is not known what outputs of the ranks depend on: no rule for {', '.join(sorted(ops))}"
    notes = ("where outputs depend on it, the ranks were not compared with one device",)
    return Diagnostic(
        "E0794", what, place, "write it in ops that have rules, or add one to compiler/causality/ops", notes
    )


def nowhere_finding() -> Diagnostic:
    """E0794: there is no output to be read."""
    return Diagnostic(
        "E0794",
        "it is not known what outputs of the ranks depend on: no value on the way to the loss begins with rows and "
        "positions",
        None,
        "compute the loss of values whose first dims are rows and positions",
    )


def mended_finding(leaks: Collection[str], why: str = "") -> Diagnostic:
    """E0795: what was compiled leaks, and its source does not; or the step of the source cannot be read: ``why``."""
    kinds = ", ".join(sorted(leaks))
    what = f"what was compiled leaks ({kinds}); its source says something else now"
    note = why or "the source's step, captured anew, does not leak so by the same analysis"
    return Diagnostic("E0795", what, None, "compile again", (note,))


def called(node: fx.Node) -> str:
    """The name of what a node calls."""
    try:
        return function_name(node.target).removesuffix(".default")
    except InternalError:  # a program that was changed may call anything
        return str(getattr(node.target, "__name__", node.target))
