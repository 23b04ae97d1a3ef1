"""The pages of codes: those beside the source, or those that were installed."""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from functools import cache
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


@dataclass(frozen=True)
class Summary:
    """What a page says without its example, as Markdown without links."""

    title: str
    meaning: str
    """Why it is told."""
    action: str
    """What to do."""

    @property
    def markdown(self) -> str:
        """Both, as paragraphs."""
        return "\n\n".join(filter(None, [self.meaning, self.action]))


@cache
def summary_of(code: str) -> Summary | None:
    """The summary of a code's page; None where there is no page."""
    found = [path for folder in _folders() if (path := folder / f"{code}.md").is_file()]
    if not found:
        return None
    text = re.sub(r"```.*?```", "", found[0].read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)  # a page is read where its neighbours are not
    head, *paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip()))
    action = next((part for part in paragraphs if part.startswith("**What to do.**")), "")
    return Summary(head.partition(": ")[2], paragraphs[0] if paragraphs and paragraphs[0] != action else "", action)


def _folders() -> list[Path]:
    beside = Path(__file__).resolve().parents[2] / "docs" / "errors"
    installed = Path(sysconfig.get_path("data")) / "share" / "meshwright" / "errors"
    return [folder for folder in (beside, installed) if folder.is_dir()]
