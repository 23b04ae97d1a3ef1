"""Findings as SARIF 2.1.0, which code hosts show beside the lines that they are about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from meshwright import __version__
from meshwright.compiler.diagnostics import Diagnostic, Origin, Span
from meshwright.error_pages import summary_of

ROOT = "%SRCROOT%"
"""By this name SARIF knows the folder that relative places are seen from."""


def as_sarif(
    findings: Sequence[Diagnostic],
    failed: Sequence[Diagnostic] | None = None,
    source: str = "",
    origin: Origin | None = None,
) -> dict[str, Any]:
    """A SARIF 2.1.0 log of one run with one result for each finding.

    ``failed`` says why a check was not made. ``source`` is what was checked: code hosts keep the logs of several apart
    by it. ``origin`` is where that is written: they refuse results of no place, so what is of no other line is told
    there. Files below the working folder are told relative to it, as a repository's are.
    """
    told = [{"descriptor": {"id": f.code}, **_told(f, None)} for f in failed or ()]
    rules = [_rule(code) for code in sorted({f.code for f in (*findings, *(failed or ()))})]
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "meshwright", "version": __version__, "rules": rules}},
        "originalUriBaseIds": {ROOT: {"uri": Path.cwd().as_uri().rstrip("/") + "/"}},
        "results": [{"ruleId": f.code, **_told(f, origin)} for f in findings],
        "invocations": [{"executionSuccessful": failed is None, "toolExecutionNotifications": told}],
    }
    if source:
        run["automationDetails"] = {"id": f"meshwright check {source}/"}
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _rule(code: str) -> dict[str, Any]:
    """A code as a rule, with what its page says of it."""
    page = summary_of(code)
    if page is None:
        return {"id": code}
    command = f"meshwright check --explain {code}"
    return {
        "id": code,
        "shortDescription": {"text": page.title},
        "fullDescription": {"text": page.meaning or page.title},
        "help": {
            "text": f"{page.markdown.replace('**', '')}\n\n{command} prints an example.",
            "markdown": f"{page.markdown}\n\n`{command}` prints an example.",
        },
    }


def _told(finding: Diagnostic, otherwise: Origin | None) -> dict[str, Any]:
    """The level, all that a person is told, and the line, which is ``otherwise`` if it is of none."""
    said = [finding.message, *finding.notes, *([f"help: {finding.action}"] if finding.action else [])]
    return {"level": finding.kind, "message": {"text": "\n".join(said)}, **_locations(finding.place, otherwise)}


def _locations(*places: Span | Origin | None) -> dict[str, Any]:
    """The first that is in a file; code that was made of a text has none."""
    for place in places:
        if place is not None and place.file and not place.file.startswith("<"):
            region = {"startLine": max(place.line, 1)}
            file = _artifact(Path(place.file), Path.cwd())
            return {"locations": [{"physicalLocation": {"artifactLocation": file, "region": region}}]}
    return {}


def _artifact(file: Path, root: Path) -> dict[str, str]:
    """A file relative to the working folder where it lies under it, else by its whole path."""
    whole = root / file
    for path, folder in ((whole, root), (whole.resolve(), root.resolve())):
        if path.is_relative_to(folder) and ".." not in path.parts:
            return {"uri": quote(path.relative_to(folder).as_posix()), "uriBaseId": ROOT}
    return {"uri": whole.resolve().as_uri()}
