"""What a schedule is asked for, and what its passes cost."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Costs:
    """Seconds of the passes of one microbatch through one stage; any unit will do.

    ``stages`` gives those of single stages where they differ. The whole backward pass takes ``input + weight``.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    send: float = 0.0
    """To hand an activation, or its gradient, to the next rank."""
    beside: float | None = None
    """A forward and a whole backward pass that run side by side; default: their sum."""
    stages: tuple[tuple[float, float, float], ...] = ()
    """``(forward, input, weight)`` of each stage, where they differ."""
    rounds: tuple[tuple[int, int], ...] = ()
    """Of each stage, in how many rounds its forward pass goes, and its backward pass; where microbatches meet."""
    kept: float = 1.0
    """What of an activation's memory is still held from the gradient of the input to that of the weights."""

    def of(self, stage: int) -> tuple[float, float, float]:
        """``(forward, input, weight)`` of a stage."""
        return self.stages[stage] if self.stages else (self.forward, self.input, self.weight)


@dataclass(frozen=True)
class Request:
    """A pipeline of ``ranks`` with ``virtual`` stages on each rank, through which ``microbatches`` go in a step."""

    ranks: int
    microbatches: int
    virtual: int = 1
    costs: Costs = field(default_factory=Costs)
    memory: float | None = None
    """The most that a rank holds, in activations of one microbatch of one stage. Only schedules that are found by
    search follow it."""
    together: bool = True
    """Whether all ranks wait for one another before the update. If not, a rank's own span counts: what it waits between
    its first action and its last."""
