"""Garbage is collected rarely while a program is compiled, and as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from meshwright.compiler import collector


@pytest.fixture(autouse=True)
def usual_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_thresholds_and_what_is_frozen_come_back_whatever_happens() -> None:
    with pytest.raises(ZeroDivisionError), collector.rarely():
        assert gc.get_threshold() == collector.THRESHOLDS and gc.get_freeze_count() > 0
        with collector.rarely():
            pass
        assert gc.get_threshold() == collector.THRESHOLDS and gc.get_freeze_count() > 0
        raise ZeroDivisionError
    assert gc.get_threshold() == (700, 10, 10) and gc.get_freeze_count() == 0


def test_a_collector_that_is_switched_off_stays_so() -> None:
    gc.set_threshold(0)
    with collector.rarely():
        assert gc.get_threshold()[0] == 0 and gc.get_freeze_count() == 0
