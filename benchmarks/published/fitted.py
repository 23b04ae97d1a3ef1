"""The rows on which the constants of the catalogue were fitted, by id, and what was fitted besides."""

from __future__ import annotations

import json
from pathlib import Path

LIST = Path(__file__).parent.parent / "data" / "published" / "fitted.json"
"""``rule`` in words, ``rows`` by family of devices or by network, and ``rates`` of networks that no row tells, by
framework, in bytes per second and device."""


def _read() -> tuple[frozenset[str], dict[str, float]]:
    if not LIST.exists():
        return frozenset(), {}
    found = json.loads(LIST.read_text(encoding="utf-8"))
    return frozenset(name for names in found["rows"].values() for name in names), dict(found.get("rates", {}))


FITTED, RATES = _read()
