"""The files that ``meshwright check`` writes for other programs: whole ones, also of a check that failed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.output import write
from meshwright.compiler.diagnostics import Diagnostic, Origin, error

if TYPE_CHECKING:
    from meshwright.checking_answers import Answer


@dataclass(frozen=True)
class Reports:
    """Where the reports go; None for those that are not asked for."""

    json: Path | None
    sarif: Path | None
    source: str
    """What is checked."""

    def refuse(self) -> None:
        """Raise MeshwrightError for files that cannot be written: told before minutes of checking, not after them.
        Nothing is written yet."""
        if self.json is not None and self.sarif is not None and self.json.resolve() == self.sarif.resolve():
            action = "give two files, or one of the two options"
            raise error("E0901", f"--json and --sarif name the same file {self.json}", action=action)
        for path, option in ((self.json, "--json"), (self.sarif, "--sarif")):
            if path is not None and (why := _obstacle(path)):
                raise error("E0718", f"cannot write {path}: {why}", action=f"give another {option}")

    def answered(self, answers: Mapping[str, Answer], origin: Origin) -> list[str]:
        """Write what was found, and say what was written. ``origin``: where what was checked is written, for what is of
        no other line. Raises MeshwrightError E0718."""
        from meshwright.checking_sarif import as_sarif

        passed = all(answer.passed for answer in answers.values())
        found = list(dict.fromkeys(finding for answer in answers.values() for finding in answer.findings))
        report = {
            "source": self.source,
            "passed": passed,
            **{name: answer.json() for name, answer in answers.items()},
        }
        return self._write(report, as_sarif(found, source=self.source, origin=origin))

    def failed(self, *why: Diagnostic) -> None:
        """Write that nothing was checked, and why, in the place of what an earlier check has left."""
        from meshwright.checking_sarif import as_sarif

        told = [one.plain() for one in why]
        self._write({"source": self.source, "passed": False, "failed": told}, as_sarif([], why, self.source))

    def _write(self, report: Mapping[str, Any], log: Mapping[str, Any]) -> list[str]:
        made = []
        for path, value, option in ((self.json, report, "--json"), (self.sarif, log, "--sarif")):
            if path is not None:
                new = not path.parent.exists()
                write(path, json.dumps(value, indent=2) + "\n", "E0718", option)
                made.append(f"wrote {path}" + (f", in the new folder {path.parent}" if new else ""))
        return made


def _obstacle(path: Path) -> str:
    """Why a file cannot be written; empty if it seems that it can be."""
    if path.is_dir():
        return "it is a folder"
    if path.exists():
        return "" if os.access(path, os.W_OK) else "it may not be written"
    folder = next(one for one in path.absolute().parents if one.exists())
    if not folder.is_dir():
        return f"{folder.name} is no folder"
    return "" if os.access(folder, os.W_OK) else f"nothing may be written in {folder}"
