"""What the checker hands to the builder: one block per function or repeated body."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.compiler.diagnostics import Span


@dataclass(frozen=True)
class Initial:
    """How a parameter is filled: ``normal(std)``, ``uniform(low, high)``, ``constant(value)``."""

    kind: str
    arguments: tuple[float, ...]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a block: named axes, their sizes, first values."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    initial: Initial
    span: Span


@dataclass(frozen=True)
class Child:
    """A block inside a block; with ``count``, that many of them in a list."""

    attribute: str
    block: Block
    count: int | None = None


@dataclass(frozen=True)
class Block:
    """A module to be: inputs of its forward, parameters, children, and its forward as lines of Python.

    Each line carries the line of the file that it came from, so that traces show the file.
    """

    name: str
    line: int
    inputs: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    children: tuple[Child, ...]
    lines: tuple[tuple[int, str], ...]
