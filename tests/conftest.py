"""Options and settings of all tests."""

from __future__ import annotations

import gc
import os
import sys
import tempfile

# before torch is imported: several processes share the cores, and small tensors gain nothing from threads
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path

import pytest

gc.set_threshold(100_000, 20, 50)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what was got into the golden files")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files shall be renewed instead of compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="module", autouse=True)
def what_is_kept_is_no_garbage() -> Iterator[None]:
    """A worker keeps gigabytes of captured programs for further tests: each collection that looked through them, those
    that tests of memory ask for above all, would take seconds."""
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(autouse=True)
def temporary_folder_kept() -> Iterator[None]:
    """What an example sets as the folder for temporary files does not reach the tests after it."""
    before = tempfile.tempdir
    yield
    tempfile.tempdir = before


@pytest.fixture
def imports_forgotten(tmp_path: Path) -> Iterator[None]:
    """Modules that a test imports from its own folder are not those of the next test, whatever their names."""
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
