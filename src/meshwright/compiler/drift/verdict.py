"""What was found of a model's drift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.compiler.diagnostics import Diagnostic

TOLERANCE = 1e-9
"""Relative difference in float64 from which two runs are said to compute other things."""
UNKNOWN = "E0777"
"""The code of a comparison that could not be made."""


@dataclass(frozen=True)
class Drift:
    """The differences between training and evaluation, and between the ways to evaluate.

    Errors are root mean squares, relative to that of the logits (or of whatever the model returns for each position).
    """

    findings: tuple[Diagnostic, ...] = ()
    predicted: float = 0.0
    """Between training and evaluation, of all findings together."""
    measured: float | None = None
    """Between training without dropout and evaluation, in the model's own dtypes; None if it could not be run."""
    measured_wide: float | None = None
    """The same in float64: without what is rounding."""
    decoding: float | None = None
    """With a cache, against the whole sequence, in float64; None if the model takes no cache."""
    lengths: float | None = None
    """A prefix alone, against the same positions of the whole, in float64; None if it was not compared."""
    skipped: tuple[str, ...] = ()
    """What was not compared, and why."""

    @property
    def unknown(self) -> bool:
        """Whether the model could not be run."""
        return any(f.code == UNKNOWN for f in self.findings)

    @property
    def passed(self) -> bool:
        """Whether nothing but warnings was found."""
        return all(f.code.startswith("W") for f in self.findings)

    def headline(self) -> str:
        """In one line."""
        if self.unknown:
            return "UNKNOWN"
        return "NO DRIFT" if self.passed else f"DRIFT ({', '.join(sorted({f.code for f in self.findings}))})"

    def footline(self) -> str:
        """The errors of the logits."""
        told = []
        if self.measured is not None and self.measured_wide is not None:
            predicted = _figure(self.predicted)
            wide = _figure(self.measured_wide)
            told.append(f"evaluation {_figure(self.measured)} (predicted {predicted}, in float64 {wide})")
        if self.decoding is not None:
            told.append(f"with a cache {_figure(self.decoding)}")
        if self.lengths is not None:
            told.append(f"at another length {_figure(self.lengths)}")
        return "logits differ: " + ", ".join(told) if told else "nothing was compared"

    def text(self) -> str:
        """For a person."""
        skipped = (f"not compared: {one}" for one in self.skipped)
        return "\n".join([self.headline(), *(f.render() for f in self.findings), self.footline(), *skipped])

    def json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "verdict": self.headline(),
            "predicted": self.predicted,
            "measured": self.measured,
            "measured_wide": self.measured_wide,
            "decoding": self.decoding,
            "lengths": self.lengths,
            "skipped": list(self.skipped),
            "findings": [f.plain() for f in self.findings],
        }


def _figure(value: float) -> str:
    """Rounding is told by its power of ten alone: its digits differ between machines."""
    if value == 0:
        return "0"
    return f"{value:.1e}" if value > 1e-4 else "below 1e-4" if value > 1e-9 else "below 1e-9"
