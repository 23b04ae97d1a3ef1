"""The user's line that is running."""

from __future__ import annotations

import linecache
import os
import sys
from types import FrameType

import torch

from meshwright.compiler.diagnostics import Origin

_TORCH = os.path.dirname(torch.__file__) + os.path.sep
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.path.sep


def user_place() -> Origin:
    """The innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE, "<")):
            line = frame.f_lineno
            return Origin("", file, line, linecache.getline(file, line).strip())
        frame = frame.f_back
    return Origin()
