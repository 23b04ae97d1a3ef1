"""The rows on which the constants of the catalogue were fitted, by id."""

from __future__ import annotations

import json
from pathlib import Path

LIST = Path(__file__).parent.parent / "data" / "published" / "fitted.json"


def _read() -> frozenset[str]:
    return frozenset(json.loads(LIST.read_text(encoding="utf-8"))) if LIST.exists() else frozenset()


FITTED = _read()
