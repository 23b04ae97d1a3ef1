"""Says, while a command waits for a run of the user's model, which run that is: one that never ends is then known."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from meshwright.compiler.causality.clock import Clock

PATIENCE = 5.0
"""Seconds of one run before anything is said."""
_LOOK = 0.2


@contextlib.contextmanager
def told(question: str, clock: Clock, patience: float = PATIENCE) -> Iterator[None]:
    """Meanwhile runs that take long are told on the standard error: as a moving status on a terminal, else in a line
    after ``patience`` seconds, and each time that a run has taken twice as long."""
    done = threading.Event()
    teller = threading.Thread(target=_tell, args=(question, clock, patience, done), daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _tell(question: str, clock: Clock, patience: float, done: threading.Event) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    said, due = "", patience
    with contextlib.ExitStack() as stack:
        status = None
        while not done.wait(min(_LOOK, patience)):
            what, seconds = clock.doing or ("", 0.0)
            if seconds < patience:
                said, due = "", patience
                if status is not None:
                    status.update(escape(question))
                continue
            text = escape(f"{question}: running {what}: {seconds:.0f} s so far")
            if console.is_terminal:
                if status is None:
                    status = stack.enter_context(console.status(text))
                status.update(text)
            elif what != said or seconds >= due:
                said, due = what, 2 * max(due, seconds)
                console.print(text)
