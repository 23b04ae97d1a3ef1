"""Python's collector of cyclic garbage while a program is compiled.

A compilation makes millions of small objects that refer to one another and stay. The collector, which looks for cycles
after every 700 of them, then takes a third of the time and finds nothing: the search for a plan of Llama 3.1 70B on 8
H100 took 15.0 s of a processor with its usual thresholds and 10.4 s with these, in the same memory (722 MiB).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (100_000, 20, 50)


@contextmanager
def rarely() -> Iterator[None]:
    """Within the context, or a function that it decorates, garbage is collected rarely, and what was there before is
    not looked at."""
    before = gc.get_threshold()
    if before[0] == 0 or before[0] >= THRESHOLDS[0]:  # switched off, or rare enough already
        yield
        return
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if ours:
            gc.unfreeze()
