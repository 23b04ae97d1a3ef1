"""The order of data is a function of seed and step alone; a rank reads only its rows."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy
import pytest
import torch
from torch import fx

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.graph.program import Graph, Signature, StepProgram, TensorSpec
from meshwright.compiler.mesh import Mesh, parse_sharding
from meshwright.runtime.data import CorpusSource, RandomSource, bytes_of, feed_of, tokens_of
from meshwright.runtime.layout import assemble, take_shard
from meshwright.runtime.permutation import permute


def program(rows: int = 8, time: int = 4) -> StepProgram:
    empty = Graph(fx.GraphModule(torch.nn.Module(), fx.Graph()), Signature((), ()))
    batch = {n: TensorSpec((rows, time), torch.int64) for n in ("input_ids", "labels")}
    return StepProgram(empty, empty, empty, (), {}, batch, dict.fromkeys(batch, 0), {}, {}, {}, {}, rows)


def corpus(tmp_path: Path, tokens: int = 257) -> CorpusSource:
    numpy.arange(tokens, dtype="uint16").tofile(tmp_path / "c.bin")
    return CorpusSource(tokens_of(tmp_path / "c.bin", "uint16"), program(), {"input_ids": 0, "labels": 1}, seed=3)


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 100, 1000])
def test_permute_is_a_permutation(count: int) -> None:
    assert sorted(permute(i, count, 5, 0) for i in range(count)) == list(range(count))


def test_permute_depends_on_its_key_and_mixes() -> None:
    first, second = ([permute(i, 1000, 5, turn) for i in range(1000)] for turn in (0, 1))
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 20
    assert sum(abs(b - a) < 10 for a, b in itertools.pairwise(first)) < 60
    mean_step = sum(abs(b - a) for a, b in itertools.pairwise(first)) / 999
    assert 300 < mean_step < 366  # a third of the range for random order


def test_every_pass_sees_each_window_once(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    assert source.windows == 64
    passes = [[source.window_of(step, row) for step in range(8 * p, 8 * p + 8) for row in range(8)] for p in (0, 1)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(64))
    assert passes[0] != passes[1]


def test_labels_are_shifted_in_the_same_window(tmp_path: Path) -> None:
    read = corpus(tmp_path).rows(5)
    ids, labels = read("input_ids", [2, 7]), read("labels", [2, 7])
    assert torch.equal(ids + 1, labels)
    assert torch.equal(ids[0], torch.arange(4) + ids[0, 0])


@pytest.mark.parametrize("kind", ["corpus", "random"])
def test_the_batch_is_the_same_on_every_mesh(kind: str, tmp_path: Path) -> None:
    source = corpus(tmp_path) if kind == "corpus" else RandomSource(program(), seed=3, high={"input_ids": 50})
    whole = source.rows(2)("input_ids", list(range(8)))
    feed = feed_of(source, 2, program())
    for mesh, text in [
        (Mesh((("micro", 1), ("data", 2))), "[8@data, 4]"),
        (Mesh((("micro", 2), ("data", 4))), "[8@micro@data, 4]"),
        (Mesh((("micro", 2), ("data", 2))), "[2*4@data, 4]"),
        (Mesh((("micro", 1), ("data", 3), ("context", 2))), "[8@data, 4@context]"),
    ]:
        sharding = parse_sharding(text)
        for rank in range(mesh.ranks):
            c = mesh.coordinates(rank)
            got = feed("input_ids", sharding, mesh, c)
            assert torch.equal(got, take_shard(whole, sharding, mesh, c))
        assert torch.equal(assemble(lambda c: feed("input_ids", sharding, mesh, c), sharding, mesh), whole)  # noqa: B023 (called at once)


def test_only_the_rows_of_the_rank_are_read(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    asked: list[list[int]] = []

    class Spy:
        def rows(self, step: int):  # type: ignore[no-untyped-def]
            def read(name: str, rows: list[int]) -> torch.Tensor:
                asked.append(rows)
                return source.rows(step)(name, rows)

            return read

    mesh = Mesh((("micro", 2), ("data", 2)))
    c = {"micro": 1, "data": 1}
    feed_of(Spy(), 0, program())("labels", parse_sharding("[8@micro@data, 4]"), mesh, c)
    assert asked == [[6, 7]]


def test_bytes_are_tokens(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"abcdefgh")
    source = CorpusSource(bytes_of(tmp_path / "t.txt"), program(), {"input_ids": 0, "labels": 0})
    assert {bytes(r.tolist()) for r in source.rows(0)("labels", list(range(8)))} == {b"abcd", b"efgh"}


def test_faults_of_data_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="E0610"):
        bytes_of(tmp_path / "missing")
    (tmp_path / "odd").write_bytes(b"abc")
    with pytest.raises(MeshwrightError, match=r"E0612.*3 bytes"):
        tokens_of(tmp_path / "odd", "uint16")
    with pytest.raises(MeshwrightError, match=r"E0612.*'uint61'\n.*did you mean 'uint16'"):
        tokens_of(tmp_path / "odd", "uint61")
    with pytest.raises(MeshwrightError, match=r"E0611.*3 tokens, one sample needs 5"):
        CorpusSource(bytes_of(tmp_path / "odd"), program(), {"input_ids": 0, "labels": 1})
    with pytest.raises(MeshwrightError, match=r"E0608.*'label'"):
        CorpusSource(bytes_of(tmp_path / "odd"), program(), {"input_ids": 0, "label": 1})
    (tmp_path / "ok").write_bytes(bytes(range(64)))
    source = CorpusSource(bytes_of(tmp_path / "ok"), program(), {"input_ids": 0, "labels": 1}, vocabulary=10)
    with pytest.raises(MeshwrightError, match=r"E0613.*vocabulary has 10"):
        source.rows(0)("input_ids", list(range(8)))
