"""What a user sees when something is wrong: a diagnostic, or where the report of Meshwright's own fault lies.

Exit codes: 1 for faults of the input, 2 for wrong arguments and for faults of Meshwright.
"""

from __future__ import annotations

import datetime
import platform
import re
import shlex
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup
from typer.exceptions import Abort, TyperException

import meshwright
from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError


class Commands(TyperGroup):
    """The group of all commands; whatever a command raises becomes a message and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        sys.exit(guarded(lambda: super(Commands, self).main(*args, **kwargs)))


def guarded(run: Callable[[], Any]) -> int:
    """Run a command and return its exit code; no exception leaves it."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]  # it takes what it needs
            warnings.filterwarnings("always", message=r"warning\[W")
            found = run()
        return found if isinstance(found, int) else 0
    except MeshwrightError as fault:
        print_diagnostics(*fault.diagnostics)
        return 1
    except (KeyboardInterrupt, Abort):
        print("stopped", file=sys.stderr)
        return 130
    except TyperException as fault:
        return _wrong_arguments(fault)
    except Exception as fault:
        if type(fault).__name__ == "RankFailed":  # imported only with torch
            print_text(str(fault))
            return 1
        return report(fault)


def _wrong_arguments(fault: TyperException) -> int:
    """What typer says of the arguments, or the help text if there are none."""
    if not str(fault):
        fault.show()  # type: ignore[attr-defined]  # typer raises its help text as an exception
        return 2
    message = fault.format_message() if hasattr(fault, "format_message") else str(fault)
    print_diagnostics(Diagnostic("E0901", _sentence(message), action=f"see {_usage(fault)}"))
    return 2


def _usage(fault: TyperException) -> str:
    """The help of the command that was called."""
    path = getattr(getattr(fault, "ctx", None), "command_path", "").split()
    return " ".join(["meshwright", *path[1:], "--help"])


def report(fault: BaseException) -> int:
    """Tell that Meshwright itself is at fault, and leave a file with all that is needed to look into it."""
    lines = [
        f"meshwright {meshwright.__version__}, torch {_version('torch')}, Python {platform.python_version()}",
        f"command: {shlex.join(sys.argv)}",
        "",
        *traceback.format_exception(fault),
    ]
    name = f"meshwright-fault-{datetime.datetime.now():%Y%m%d-%H%M%S}.txt"
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        try:
            (folder / name).write_text("\n".join(lines), encoding="utf-8")
        except OSError:
            continue
        where = str(folder / name)
        break
    else:
        where = "nowhere, since no folder can be written"
    summary = str(fault).splitlines()[0] if str(fault) else ""
    print_diagnostics(
        Diagnostic(
            "E0900",
            f"this is a fault of Meshwright: {type(fault).__name__}: {summary}",
            action="please send that file with the program and the plan",
            notes=(f"what happened is written to {where}",),
        )
    )
    return 2


def print_diagnostics(*diagnostics: Diagnostic) -> None:
    """Print diagnostics to the standard error, in colours on a terminal."""
    print_text("\n".join(d.render() for d in diagnostics))


def print_text(text: str) -> None:
    """Print rendered diagnostics: the code in red or yellow, places in blue, carets in red."""
    styled = Text(text + "\n")
    styled.highlight_regex(r"(?m)^error\[E\d+\]", "bold red")
    styled.highlight_regex(r"(?m)^warning\[[EW]\d+\]", "bold yellow")
    styled.highlight_regex(r"(?m)^ +-->", "bold blue")
    styled.highlight_regex(r"(?m)^ *\d* +\|", "bold blue")
    styled.highlight_regex(r"(?m)(?<=\| ) *\^+$", "bold red")
    styled.highlight_regex(r"(?m)^ += (help|note):", "bold cyan")
    Console(stderr=True, soft_wrap=True, highlight=False).print(styled, end="")


def _show_warning(message: Warning | str, *rest: Any) -> None:
    """Meshwright's own warnings as they are; those of libraries are not for users of a command."""
    if str(message).startswith("warning[W"):
        print_text(str(message))


def _sentence(message: str) -> str:
    message = re.sub(r"\s+", " ", message).strip().rstrip(".")
    return message[:1].lower() + message[1:]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
