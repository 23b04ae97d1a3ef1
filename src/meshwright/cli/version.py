"""``meshwright version``"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import meshwright


def version_command() -> None:
    """Print the versions of Meshwright, torch and Python."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    print(f"meshwright {meshwright.__version__}\ntorch {torch}\npython {platform.python_version()}")
