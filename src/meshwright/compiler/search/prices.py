"""What the search asks of whoever compiles and simulates candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.prediction import Prediction
from meshwright.compiler.search.candidate import Candidate


class Prices(Protocol):
    """Prices candidates: the candidate becomes a plan, the plan a program, the program is simulated."""

    def price(self, candidate: Candidate, cluster: Cluster | None = None) -> Prediction:
        """One step of the candidate, on another cluster if one is given (the program stays, so that is cheap).

        Raises MeshwrightError if the program cannot be cut so.
        """


@dataclass(frozen=True)
class Priced:
    """A candidate with its prediction."""

    candidate: Candidate
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def memory(self) -> int:
        return self.prediction.device_memory
