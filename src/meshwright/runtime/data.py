"""Where batches come from: memory-mapped corpora of bytes or tokens, and random data.

A source gives any rows of the global batch of any step. Which window of the corpus stands in which row is a
function of the seed, the step and the row alone: sample number ``step * rows + row`` is taken from a permutation of all
windows, a new one for each pass over the corpus. So every mesh trains on the same data in the same
order, a rank reads only its rows, and a run resumes by its step number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy
import torch
from torch import Tensor

from meshwright.compiler.diagnostics import error, suggestion
from meshwright.compiler.graph.program import StepProgram
from meshwright.runtime.feed import Rows, batch_by_rows
from meshwright.runtime.permutation import permute
from meshwright.runtime.step_executor import Feed


class Source(Protocol):
    """Gives the batches of a run."""

    def rows(self, step: int) -> Rows:
        """Access to the rows of the global batch of a step."""
        ...


def feed_of(source: Source, step: int, program: StepProgram) -> Feed:
    """What the executor reads the batch of a step through."""
    return batch_by_rows(source.rows(step), program)


@dataclass(frozen=True)
class Corpus:
    """A file of tokens one after another, mapped into memory."""

    path: Path
    tokens: numpy.ndarray[tuple[int], numpy.dtype[numpy.integer]]


def bytes_of(path: str | Path) -> Corpus:
    """A corpus of which every byte is a token: ``bytes("file")``. Raises MeshwrightError E0610."""
    return tokens_of(path, "uint8")


def tokens_of(path: str | Path, dtype: str) -> Corpus:
    """A corpus of integers of a NumPy dtype: ``tokens("file", uint16)``.

    Raises MeshwrightError E0610 if there is no such file, E0612 if it is no file of such integers.
    """
    place = Path(path)
    if not place.is_file():
        raise error("E0610", f"there is no data file '{place}'", action="check the path, or make the file")
    kinds = ("uint8", "uint16", "uint32", "int16", "int32", "int64")
    if dtype not in kinds:
        raise error("E0612", f"tokens cannot be of the type '{dtype}'", action=suggestion(dtype, kinds))
    kind = numpy.dtype(dtype)
    size = place.stat().st_size
    if size % kind.itemsize:
        raise error(
            "E0612",
            f"'{place}' has {size} bytes, which is no whole number of tokens of {kind.itemsize} bytes ({dtype})",
            action="give the dtype with which the file was written",
        )
    if not size:
        raise error("E0611", f"the data file '{place}' is empty", action="give a file with data")
    return Corpus(place, numpy.memmap(place, dtype=kind, mode="r"))


class CorpusSource:
    """Windows of a corpus as the batches of a program.

    ``fields`` says for each batch tensor where in the window it starts: ``{"tokens": 0}``, or
    ``{"input_ids": 0, "labels": 1}`` for labels that are already shifted. Windows do not overlap but for that shift.
    ``vocabulary``, if given, bounds the tokens. Raises MeshwrightError E0611 if the corpus is too short for one window.
    """

    def __init__(
        self,
        corpus: Corpus,
        program: StepProgram,
        fields: Mapping[str, int],
        *,
        seed: int = 0,
        vocabulary: int | None = None,
    ) -> None:
        for name in fields:
            if name not in program.batch:
                raise error("E0608", f"the step has no batch tensor '{name}'", action=suggestion(name, program.batch))
        for name in program.batch:
            if name not in fields:
                raise error(
                    "E0608", f"the data gives no '{name}', which the step reads", action="name it in the data's fields"
                )
        self.corpus = corpus
        self.fields = dict(fields)
        self.seed = seed
        self.vocabulary = vocabulary
        self.batch_size = program.batch_size
        self.lengths = {n: _length(n, program) for n in fields}
        self.stride = max(self.lengths.values())
        self.window = max(start + self.lengths[n] for n, start in fields.items())
        available = len(corpus.tokens)
        if available < self.window:
            raise error(
                "E0611",
                f"'{corpus.path}' has {available} tokens, one sample needs {self.window}",
                action="give more data or a shorter sequence",
            )
        self.windows = (available - self.window) // self.stride + 1

    def window_of(self, step: int, row: int) -> int:
        """The number of the window that stands in a row of the global batch of a step."""
        turn, index = divmod(step * self.batch_size + row, self.windows)
        return permute(index, self.windows, self.seed, turn)

    def rows(self, step: int) -> Rows:
        def read(name: str, rows: list[int]) -> Tensor:
            start, length = self.fields[name], self.lengths[name]
            result = numpy.empty((len(rows), length), dtype=numpy.int64)
            for i, row in enumerate(rows):
                begin = self.window_of(step, row) * self.stride + start
                result[i] = self.corpus.tokens[begin : begin + length]
            self._check(result)
            return torch.from_numpy(result)

        return read

    def _check(self, found: numpy.ndarray[tuple[int, int], numpy.dtype[numpy.int64]]) -> None:
        if self.vocabulary is None or not found.size:
            return
        low, high = int(found.min()), int(found.max())
        if low < 0 or high >= self.vocabulary:
            bad = low if low < 0 else high
            raise error(
                "E0613",
                f"'{self.corpus.path}' has the token {bad}, the vocabulary has {self.vocabulary}",
                action="check the dtype of the file and the model's vocabulary size",
            )


class RandomSource:
    """Random batches: integers below ``high[name]`` or, for floats, from the normal distribution."""

    def __init__(self, program: StepProgram, *, seed: int = 0, high: Mapping[str, int] | None = None) -> None:
        self.program = program
        self.seed = seed
        self.high = dict(high or {})

    def rows(self, step: int) -> Rows:
        def read(name: str, rows: list[int]) -> Tensor:
            spec, dim = self.program.batch[name], self.program.batch_dims[name]
            order = sorted(self.program.batch).index(name)
            if dim is None:
                return self._tensor(name, spec.shape, spec.dtype, (step, order, -1))
            shape = tuple(n for d, n in enumerate(spec.shape) if d != dim)
            parts = [self._tensor(name, shape, spec.dtype, (step, order, row)) for row in rows]
            empty = torch.empty((*shape[:dim], 0, *shape[dim:]), dtype=spec.dtype)
            return torch.stack(parts, dim) if parts else empty

        return read

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, place: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(permute(0, 1 << 62, self.seed, *place))
        if dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        return torch.randint(self.high.get(name, 2), shape, generator=generator, dtype=torch.int64).to(dtype)


def _length(name: str, program: StepProgram) -> int:
    spec, dim = program.batch[name], program.batch_dims[name]
    if dim != 0 or len(spec.shape) != 2 or spec.dtype.is_floating_point:
        raise error(
            "E0608",
            f"'{name}' has the shape {list(spec.shape)} ({spec.dtype}), a corpus gives integers [batch, time]",
            action="feed this step with batches of your own",
        )
    return spec.shape[1]
