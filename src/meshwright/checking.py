"""``meshwright.check``: does a model see only what it may see? And later: the other questions of a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.compiler.causality.clock import Clock
from meshwright.compiler.causality.judge import judge
from meshwright.compiler.causality.verdict import Judgement, Verdict, Witness
from meshwright.compiler.diagnostics import Diagnostic

__all__ = ["Checked", "Verdict", "Witness", "check"]


@dataclass(frozen=True)
class Checked:
    """What was found of a model. ``causality`` holds the details of that question."""

    verdict: Verdict
    leaks: frozenset[str]
    assumptions: tuple[str, ...]
    witnesses: tuple[Witness, ...]
    findings: tuple[Diagnostic, ...]
    causality: Judgement

    @property
    def passed(self) -> bool:
        """Whether there is no leak and nothing is unknown."""
        return self.verdict not in (Verdict.LEAK, Verdict.UNKNOWN)

    def headline(self) -> str:
        """The verdict, with the kinds of leak."""
        return str(self.verdict) + (f" ({', '.join(sorted(self.leaks))})" if self.leaks else "")

    def footline(self) -> str:
        """What the verdict rests on."""
        from meshwright.checking_report import ground

        return ground(self)

    def text(self) -> str:
        """The verdict, the witnesses and the assumptions, for a person."""
        from meshwright.checking_report import as_text

        return as_text(self)

    def json(self) -> dict[str, Any]:
        """All of it as plain data."""
        from meshwright.checking_report import as_json

        return as_json(self)

    def sarif(self) -> dict[str, Any]:
        """The findings as a SARIF 2.1.0 log, which code hosts show beside the lines."""
        from meshwright.checking_sarif import as_sarif

        return as_sarif(self.findings)


def check(
    model: Callable[..., Any],
    batch: Any,
    *,
    batch_dim: int | None = 0,
    time_dim: int = 1,
    segments: Any = None,
    seconds: float = 20.0,
) -> Checked:
    """Check that no output sees a later token, another row of the batch, or another document.

    ``model`` is an ``nn.Module`` or any function of tensors; it is checked as it stands (``train()`` or ``eval()``)
    and left as it was. ``batch`` is a tensor, a tuple of positional arguments, or a dict of keyword arguments, with
    token ids or float activations whose dims are ``batch_dim`` (None for none) and ``time_dim``. ``segments`` is the
    name of the input that says for each position ``[rows, length]`` to which document it belongs, or that tensor.
    ``seconds`` bounds the check, between runs of the model. One so slow that no size was analysed and no eight pairs of
    batches compared is given as long again, and is ``UNKNOWN`` then; with a run that never ends nothing can be done.

    Never raises for what the model does, nor for a batch or dims that do not fit: what cannot be run is ``UNKNOWN``,
    with the reason.
    """
    clock = Clock(seconds)
    return checked(judge(model, batch, batch_dim=batch_dim, time_dim=time_dim, segments=segments, clock=clock))


def checked(found: Judgement) -> Checked:
    """A judgement as it is told."""
    return Checked(found.verdict, found.leaks, found.assumptions, found.witnesses, found.findings, found)
