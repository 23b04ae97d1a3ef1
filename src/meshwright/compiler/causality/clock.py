"""How long a check may take, and which run of the model it is in: a run that never ends can at least be told."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

OVER = "the time was over"
"""Why something was not compared."""


MORE_TIME = "give it more seconds, or a smaller model or batch"
"""What to do about it."""


LEAST_SECONDS = 2.0
"""Allowed for the least without which nothing can be said, if the check has fewer."""


class TimeIsUp(BaseException):
    """No further run is begun. No ``Exception``: it is not the model's, whose exceptions are caught run by run."""


class Clock:
    """``seconds`` is what a check has; for the least without which nothing can be said it may take as long again."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self._begun = time.monotonic()
        self.end = self._begun + seconds
        self._last = self.end + max(seconds, LEAST_SECONDS)
        self._doing: tuple[str, float] | None = None

    @property
    def over(self) -> str:
        """What is said when it is."""
        return f"the {self.seconds:g} seconds of the check were over"

    @property
    def late(self) -> bool:
        """Whether the seconds are over."""
        return time.monotonic() > self.end

    @property
    def left(self) -> float:
        """Seconds; none if they are over."""
        return max(0.0, self.end - time.monotonic())

    @property
    def gone(self) -> float:
        """Seconds since it was begun."""
        return time.monotonic() - self._begun

    @property
    def passed(self) -> float:
        """How much of the time is over, of 1."""
        return self.gone / max(self.seconds, 1e-9)

    @property
    def doing(self) -> tuple[str, float] | None:
        """What is being run, and for how many seconds; None between runs."""
        now = self._doing
        return None if now is None else (now[0], time.monotonic() - now[1])

    @contextlib.contextmanager
    def run(self, what: str, *, least: bool = False) -> Iterator[None]:
        """One run of the model. Raises TimeIsUp if it is too late to begin; ``least``: only if it is twice as late."""
        if time.monotonic() > (self._last if least else self.end):
            raise TimeIsUp
        before, self._doing = self._doing, (what, time.monotonic())
        try:
            yield
        finally:
            self._doing = before
