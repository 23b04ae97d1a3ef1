"""The rows on which the constants of the catalogue were fitted, by id."""

from __future__ import annotations

import json
from pathlib import Path

LIST = Path(__file__).parent.parent / "data" / "published" / "fitted.json"
"""``rule`` in words, and ``rows`` by family of devices."""


def _read() -> frozenset[str]:
    if not LIST.exists():
        return frozenset()
    return frozenset(name for names in json.loads(LIST.read_text(encoding="utf-8"))["rows"].values() for name in names)


FITTED = _read()
