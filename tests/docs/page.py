"""Runs the example on a documentation page and returns what a user would be shown.

The fenced blocks of a page run in order in an empty folder, up to the first ``text`` block: what they print.

- a block with a file name after its language (```` ```mw gpt.mw ````) is written to that file;
- ``python`` is executed as ``example.py``; what it prints counts;
- ``console`` runs each line that begins with ``$ meshwright`` in this process;
- a page with files alone loads its ``.mw`` file or reads its ``.toml`` file as a plan.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from meshwright.compiler.diagnostics import MeshwrightError

_BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    file: str | None
    text: str


@dataclass(frozen=True)
class Page:
    path: Path
    blocks: tuple[Block, ...]

    @property
    def shown(self) -> str:
        """What the page says is printed."""
        return next(b.text for b in self.blocks if b.language == "text")

    def with_shown(self, text: str) -> str:
        """The source of the page with another ``text`` block."""
        source = self.path.read_text(encoding="utf-8")
        return source.replace(f"```text\n{self.shown}```", f"```text\n{text}```", 1)


def read_page(path: Path) -> Page:
    found = _BLOCK.findall(path.read_text(encoding="utf-8"))
    blocks = tuple(Block(language, file or None, text) for language, file, text in found)
    if not any(b.language == "text" for b in blocks):
        raise ValueError(f"{path} has no text block that shows the message")
    return Page(path, blocks)


def printed(page: Page, folder: Path) -> str:
    """Run the example in ``folder`` and return the errors and warnings it gives, one after another."""
    said: list[str] = []
    ran = False
    files: list[str] = []
    with contextlib.chdir(folder), _gathered(said):
        for block in page.blocks:
            if block.language == "text":
                break
            if block.file is not None:
                Path(block.file).parent.mkdir(parents=True, exist_ok=True)
                Path(block.file).write_text(block.text, encoding="utf-8")
                files.append(block.file)
            elif block.language == "python":
                said.extend(filter(None, [_run_python(block.text)]))
                ran = True
            elif block.language == "console":
                _run_commands(block.text, said)
                ran = True
        if not ran:
            for file in files:
                _read(file)
    return "".join(line.rstrip() + "\n" for text in said for line in text.rstrip("\n").split("\n"))


@contextlib.contextmanager
def _gathered(said: list[str]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except MeshwrightError as fault:
            said.append(str(fault))
    said[:0] = [str(w.message) for w in caught if str(w.message).startswith("warning[W")]


def _run_python(text: str) -> str:
    """Run the block from a file, so that errors can show its lines. Returns what it printed."""
    file = Path("example.py").resolve()
    file.write_text(text, encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, str(file), "exec"), {"__name__": "example"})
    return printed.getvalue()


def _read(file: str) -> None:
    import meshwright
    from meshwright.compiler.plan_file import read_plan

    if file.endswith(".mw"):
        meshwright.load(file)
    elif file.endswith(".toml"):
        read_plan(Path(file))


def _run_commands(text: str, said: list[str]) -> None:
    from meshwright.cli import app

    for line in text.splitlines():
        if line.startswith("$ meshwright "):
            said.append(CliRunner().invoke(app, shlex.split(line)[2:]).output)
