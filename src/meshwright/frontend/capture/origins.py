"""Where a traced node comes from: the user's line and module, and the repeated block around it."""

from __future__ import annotations

import os
import re
import traceback
from functools import lru_cache
from types import TracebackType

import torch
from torch import fx, nn

from meshwright.compiler.diagnostics import Origin

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')
_HERE = os.path.sep + "meshwright" + os.path.sep
_TORCH = os.path.dirname(torch.__file__) + os.path.sep


def is_users(file: str) -> bool:
    """Whether a file is neither torch's nor ours, nor made up at run time."""
    return not file.startswith((_TORCH, "<")) and _HERE not in file


@lru_cache(maxsize=8192)
def _last_frame(stack: str) -> tuple[str, int, str]:
    found = ("", 0, "")
    for file, line, text in _FRAME.findall(stack):
        if is_users(file):
            found = (file, int(line), text.strip())
    return found


def module_path(node: fx.Node, prefix: str) -> str:
    """The path in the user's model of the innermost module that made the node."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = str(entry[0])
    return strip(path, prefix)


def strip(path: str, prefix: str) -> str:
    """A path without the wrapper that capture puts around the user's model."""
    if path == prefix:
        return ""
    return path.removeprefix(prefix + ".")


def node_origin(node: fx.Node, prefix: str) -> Origin:
    """The origin of a node of an exported graph."""
    file, line, text = _last_frame(node.meta.get("stack_trace") or "")
    return Origin(module_path(node, prefix), file, line, text)


def error_origin(trace: TracebackType | None) -> Origin:
    """The innermost line of the user's code in a traceback."""
    found = Origin()
    for frame in traceback.extract_tb(trace):
        if is_users(frame.filename):
            found = Origin("", frame.filename, frame.lineno or 0, (frame.line or "").strip())
    return found


def block_paths(model: nn.Module) -> tuple[str, ...]:
    """The paths of repeated regions: entries of a ModuleList, or of a Sequential of like modules with children."""
    found: list[str] = []
    for path, module in model.named_modules():
        children = dict(module.named_children())
        if isinstance(module, nn.Sequential):
            kinds = {type(child) for child in children.values()}
            if len(kinds) != 1 or len(children) < 2 or not any(True for _ in next(iter(children.values())).children()):
                continue
        elif not isinstance(module, nn.ModuleList):
            continue
        found.extend(f"{path}.{name}" if path else name for name in children)
    return tuple(found)


class Blocks:
    """Finds the nearest repeated region around a module path."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = frozenset(block_paths(model))
        self._known: dict[str, str] = {}

    def around(self, path: str) -> str:
        """``model.layers.3.mlp`` -> ``model.layers.3``; empty when no region is around."""
        found = self._known.get(path)
        if found is None:
            found, at = "", path
            while at:
                if at in self._paths:
                    found = at
                    break
                at = at.rpartition(".")[0]
            self._known[path] = found
        return found
