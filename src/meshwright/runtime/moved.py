"""Waits until the bytes of a message have moved, without waiting for the message as a program does."""

from __future__ import annotations

import time

import torch.distributed as dist

SETTLED = 0.004
"""Seconds after which the library's own thread has let go of a message that has moved."""
LONGEST = 10.0
"""Seconds after which a message is taken to have moved."""


def moved(work: dist.Work) -> None:
    """Return when the library holds no more than what it holds until somebody waits for the message.

    What gloo reduces and scatters, it finishes only when it is waited for, and so never says that it is done.
    """
    end = time.monotonic() + LONGEST
    while _tells(work) and not work.is_completed() and time.monotonic() < end:
        time.sleep(SETTLED / 8)
    time.sleep(SETTLED)


def _tells(work: dist.Work) -> bool:
    try:
        work.get_future()
    except RuntimeError:
        return False
    return True
