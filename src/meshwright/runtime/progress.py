"""The progress bar of a run on a terminal, or plain lines where there is none."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.runtime.metrics import Metrics


class Reporter(Protocol):
    """Is told of every step."""

    def __enter__(self) -> Reporter: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def step(self, metrics: Metrics) -> None: ...

    def say(self, text: str) -> None: ...


def reporter(first: int, last: int, *, rank: int = 0, every: float = 2.0, console: Console | None = None) -> Reporter:
    """The reporter of the steps ``first`` to ``last`` (exclusive): a bar, plain lines at most every so many seconds,
    or, for other ranks than 0, silence."""
    if rank:
        return Silence()
    shown = console or Console()
    return Bar(first, last, shown) if shown.is_terminal else Lines(first, last, shown, every)


class Silence:
    """Tells nothing."""

    def __enter__(self) -> Silence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def step(self, metrics: Metrics) -> None:
        pass

    def say(self, text: str) -> None:
        pass


class Bar(Silence):
    """A bar with loss, speed, memory and the time that is left."""

    def __init__(self, first: int, last: int, console: Console) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("", total=last, completed=first, text="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, metrics: Metrics) -> None:
        self._progress.update(self._task, completed=metrics.step + 1, text=text_of(metrics))

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


class Lines(Silence):
    """One line per step, but no more often than every so many seconds; the first and the last always."""

    def __init__(self, first: int, last: int, console: Console, every: float) -> None:
        self._first = first
        self._last = last
        self._console = console
        self._every = every
        self._told = float("-inf")
        self._began = time.monotonic()

    def step(self, metrics: Metrics) -> None:
        now = time.monotonic()
        final = metrics.step + 1 == self._last
        if now - self._told < self._every and not final:
            return
        self._told = now
        done = metrics.step + 1 - self._first
        left = (now - self._began) / done * (self._last - metrics.step - 1)
        rest = "" if final else f"  {_duration(left)} left"
        self.say(f"step {metrics.step + 1}/{self._last}  {text_of(metrics)}{rest}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def text_of(metrics: Metrics) -> str:
    """``loss 3.2101  norm 1.20  12.3k tokens/s  512 MiB``."""
    norm = "" if metrics.norm is None else f"  norm {metrics.norm:.3g}"
    return f"loss {metrics.loss:.4f}{norm}  {_short(metrics.tokens_per_second)} tokens/s  {_bytes(metrics.memory)}"


def _short(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}G"


def _bytes(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
