"""The pages of codes: those beside the source, or those that were installed."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from meshwright.compiler.diagnostics import error, suggestion


def page_of(code: str) -> str:
    """The page of a code, as Markdown. Raises MeshwrightError E0717 for a code that has none."""
    folders = _folders()
    wanted = code.strip().upper()
    for folder in folders:
        path = folder / f"{wanted}.md"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    known = {path.stem for folder in folders for path in folder.glob("[EW]*.md")}
    raise error("E0717", f"there is no page of '{code}'", action=suggestion(wanted, known) or "see docs/errors")


def _folders() -> list[Path]:
    beside = Path(__file__).resolve().parents[3] / "docs" / "errors"
    installed = Path(sysconfig.get_path("data")) / "share" / "meshwright" / "errors"
    return [folder for folder in (beside, installed) if folder.is_dir()]
