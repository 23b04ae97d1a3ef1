"""Options and settings of all tests."""

from __future__ import annotations

import os

# before torch is imported: several processes share the cores, and small tensors gain nothing from threads
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what was got into the golden files")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files shall be renewed instead of compared."""
    return bool(request.config.getoption("--update-golden"))
