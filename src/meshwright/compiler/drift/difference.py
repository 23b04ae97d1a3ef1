"""One difference between the two graphs, before its error is known."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.compiler.diagnostics import Diagnostic, Origin
from meshwright.compiler.drift.step import Key

KINDS = {
    "E0770": "computed in another dtype in evaluation than in training",
    "E0771": "evaluation computes with other ops than training",
    "E0772": "evaluation adds up in another way than training",
    "E0773": "a constant is another one in evaluation than in training",
    "E0785": "what training draws by chance is on average another value than evaluation uses",
    "W0774": "training normalises by statistics of the batch, evaluation by running ones",
    "W0785": "ops that one of training and evaluation alone has change nothing on this batch",
}
"""What a difference is, by code."""
ACTIONS = {
    "E0770": "write the dtype of the op in both modes alike",
    "E0771": "compute the same in both modes, or make sure that the difference is meant",
    "E0772": "reduce over the same dims in both modes, or hold both to the tolerance of their rounding",
    "E0773": "take the constant from the configuration, for both modes",
    "E0785": "divide what is kept by the probability to keep it, as torch.nn.Dropout does",
    "W0774": "evaluate with statistics that have settled, or normalise each row by itself",
    "W0785": "compute the same in both modes, or give a batch on which they matter",
}
"""What can be done, by code."""


@dataclass(frozen=True)
class Difference:
    """``training`` and ``evaluation`` tell both sides; ``at`` are ops of the evaluation with the error made there."""

    code: str
    place: Origin
    module: str
    training: str
    evaluation: str
    at: tuple[tuple[Key, float], ...]
    """Relative to the result of the op: root mean square."""
    why: str = ""
    """On what the error rests."""
    predicted: float = 0.0
    """Relative error of the logits."""

    @property
    def diagnostic(self) -> Diagnostic:
        """As it is told."""
        notes = [f"in training: {self.training}", f"in evaluation: {self.evaluation}"]
        error = max((e for _, e in self.at), default=0.0)
        if self.why:
            notes.append(f"{self.why}: relative error {error:.1e} at the op" if self.at else self.why)
        notes.append(f"predicted relative error of the logits: {self.predicted:.1e}")
        place = replace(self.place, module=self.module)
        return Diagnostic(self.code, KINDS[self.code], place, ACTIONS[self.code], tuple(notes))


def joined(differences: list[Difference]) -> list[Difference]:
    """Those of one code and one line as one, with the errors of all: the copies of a block are alike."""
    known: dict[tuple[str, str, int], Difference] = {}
    for one in differences:
        key = (one.code, one.place.file, one.place.line)
        before = known.get(key)
        known[key] = one if before is None else replace(before, at=before.at + one.at)
    return list(known.values())
