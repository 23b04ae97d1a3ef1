"""A finding: a place where half precision costs more than a rounding, what it is predicted to cost, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.compiler.diagnostics import Diagnostic, Origin
from meshwright.compiler.numerics.error_model import UNIT, Addends, one_rounding

KINDS = {
    "E0720": "a sum over ranks in half precision",
    "E0721": "a sum in fp16 that can pass 65504",
    "E0722": "an average in half precision",
    "E0723": "gradients added up over microbatches in half precision",
    "E0724": "a gradient of many terms in half precision",
    "E0725": "an op that accumulates in half precision",
    "E0726": "weights in half precision that lose their updates",
    "E0727": "a counter in half precision",
    "E0728": "a loss in half precision",
    "E0729": "a second moment in half precision",
    "E0730": "rounded to half precision just before a sum",
    "E0731": "rounded to half precision between two sums",
    "E0732": "a sum in half precision that stops growing",
}
"""The kinds of finding, by code."""
REWRITES = {
    "fp32": "take the sum in fp32",
    "all-to-all": "send the addends as they are and add them in fp32 (an all-to-all)",
    "main gradients": "add gradients up in fp32",
    "master weights": "keep the weights in fp32, or a master copy of them",
    "move cast": "round after the sum",
    "divide after": "divide after the sum, in fp32",
    "fp32 state": "keep it in fp32",
    "scale": "scale the loss, so that what does not fit is seen and skipped",
}
"""What can be done, by name."""
BY_PASS = ("fp32", "all-to-all", "main gradients", "move cast", "divide after", "master weights")
"""What ``numerics = "safe"`` does by itself."""
IN_A_PLAN = 'write numerics = "safe" in the plan'
WITHOUT_A_PLAN = "compile with numerics=safe (--plan fsdp=4,numerics=safe, say)"
"""No plan was given: what one device computes stays as it is written until there is one."""
GRAVE = 4.0
"""Roundings from which an error is told when a plan is compiled."""


@dataclass(frozen=True)
class Finding:
    code: str
    message: str
    graph: str
    """``prologue``, ``micro`` or ``update``, of a stage with its number."""
    nodes: tuple[str, ...]
    """The nodes that are alike: one source line in all copies of a block."""
    dtype: str
    """``bf16`` or ``f16``."""
    count: int
    """Addends; 1 where there is no sum."""
    addends: Addends
    error: float
    """Predicted, relative to the value: root mean square; 1 where the value no longer changes, or overflows."""
    rewrite: str
    """A key of ``REWRITES``."""
    origin: Origin
    advice: str = ""
    """What to write, if it is not for ``numerics = "safe"`` to do."""
    planned: bool = True
    """Whether it is of what a plan makes, and not of a step that no plan was given for."""
    source: str = ""
    """Whose measurement it rests on, if it is one."""

    @property
    def roundings(self) -> float:
        """The error in roundings of the dtype; 1 is the floor."""
        return self.error / one_rounding(self.dtype)

    @property
    def grave(self) -> bool:
        """Whether the error is far above that of a rounding."""
        return self.roundings >= GRAVE

    @property
    def diagnostic(self) -> Diagnostic:
        """As it is told."""
        action = self.advice or f"{REWRITES[self.rewrite]}: {IN_A_PLAN if self.planned else WITHOUT_A_PLAN}"
        return Diagnostic(self.code, self.message, self.origin, action, (*self._notes(),))

    def _notes(self) -> Iterable[str]:
        more = f" and {len(self.nodes) - 1} more" if len(self.nodes) > 1 else ""
        yield f"{self.nodes[0]}{more} of {self.graph}, {self.dtype} (u = 2^{_exponent(self.dtype)})"
        if self.count > 1:
            yield f"{self.count} addends, taken as {_told(self.addends)}"
        if self.source:
            yield self.source
        yield f"predicted relative error {self.error:.2g}, where one rounding costs {one_rounding(self.dtype):.2g}"


def grouped(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings of one line that differ by their nodes alone, as one; the gravest first."""
    known: dict[tuple[object, ...], Finding] = {}
    for one in findings:
        key = (one.code, one.graph, one.origin.file, one.origin.line, one.message, one.dtype, one.count)
        before = known.get(key)
        known[key] = one if before is None else replace(before, nodes=(*before.nodes, *one.nodes))
    return tuple(sorted(known.values(), key=lambda f: (-f.roundings, f.code, f.origin.file, f.origin.line)))


def _told(addends: Addends) -> str:
    return "of random signs" if addends == "random signs" else "of one sign"


def _exponent(dtype: str) -> int:
    return round(math.log2(UNIT[dtype]))
