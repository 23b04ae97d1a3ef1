"""Artefacts: written and read back equal, runnable, and clear about damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.emit.artefact import GRAPHS, read_artefact, write_artefact
from meshwright.compiler.emit.manifest import SourceDescription, program_to_json
from meshwright.compiler.emit.python import emit_python
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.pending import Kind, Work, at_once
from meshwright.compiler.graph.text import print_graph
from meshwright.compiler.graph.text_parser import parse_local_graph
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.train_settings import DataSettings, InitialValue, TrainSettings
from tests.unit.small_step import small_rank_program

TRAIN = TrainSettings(3, 1, 5, DataSettings("bytes", "a.bin", fields={"x": 0}), {"w": InitialValue("normal", (0.02,))})
SOURCE = SourceDescription("language", "small.mw", "small", {"t": 16}, "axes\n")


class OneRank:
    """A communicator of a rank whose peer holds the same tensors."""

    mesh = Mesh((("micro", 2), ("data", 2)))

    def coordinate(self, axis: str) -> int:
        return 0

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], reduction: str) -> Tensor:
        return x * 2

    def all_gather(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return torch.cat([x, x])

    def reduce_scatter(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return 2 * x[: x.shape[0] // 2]

    def all_to_all(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return x

    def begin(self, kind: Kind, x: Tensor, axes: tuple[str, ...], reduction: str = "sum") -> Work:
        return at_once(self, kind, x, axes, reduction)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_artefact(small_rank_program(), tmp_path / "build", SOURCE, TRAIN)


def test_reading_gives_what_was_written(folder: Path) -> None:
    written, found = small_rank_program(), read_artefact(folder)
    read = found.rank_program
    assert found.source == SOURCE
    assert found.train == TRAIN
    assert read.plan == written.plan
    assert (read.layouts, read.state, read.mesh) == (written.layouts, written.state, written.mesh)
    assert program_to_json(read.program) == program_to_json(written.program)
    assert read.program.parameters == written.program.parameters
    assert torch.equal(read.program.constants["bias"], written.program.constants["bias"])
    for name in GRAPHS:
        mine, theirs = getattr(read, name), getattr(written, name)
        assert print_graph(mine, name) == print_graph(theirs, name)
        assert (mine.inputs, mine.outputs, mine.signature) == (theirs.inputs, theirs.outputs, theirs.signature)
        assert print_graph(getattr(read.program, name), name) == print_graph(getattr(written.program, name), name)


def test_the_python_file_runs_and_agrees_with_the_graph(folder: Path) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, 4).double(), torch.randn(2, 4).double(), torch.arange(6).double(), torch.tensor(5)]
    with collectives.use(OneRank()):
        expected = small_rank_program().micro.module(*inputs)
        module = read_artefact(folder).rank_program.micro.module
        found = module(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert type(module).forward.__closure__ is not None  # the function of the file, not fx's own
    # it really is the file that runs: a fault inside it shows the file's line
    with collectives.use(OneRank()), pytest.raises(Exception) as caught:
        module(inputs[0], inputs[0], inputs[2], inputs[3])
    assert any(str(entry.path).endswith("rank/micro.py") for entry in caught.traceback)


def test_files_of_generated_python_are_self_contained_and_free_what_is_dead(folder: Path) -> None:
    text = (folder / "rank" / "micro.py").read_text()
    imports = [line for line in text.splitlines() if line.startswith(("import", "from"))]
    assert imports == [
        "import torch",
        "from torch import Tensor",
        "from meshwright.compiler.graph import collectives",
    ]
    assert "    del all_gather\n" in text
    assert "    # backward of layer\n" in text


def test_names_that_mean_something_else_in_the_file_are_changed() -> None:
    text = (
        "local graph micro\n"
        '  %torch: f32[2] = input batch "x"\n'
        '  %collectives: f32[2] = all_reduce(%torch, ("data",), "sum")\n'
        "  %aten: f32[2] = aten.add.Tensor(%collectives, %torch, alpha=inf)\n"
        '  %aten_: f32[2] = aten.full_like.default(%aten, -inf, dtype=f32, device=device("cpu"))\n'
        "  %pair: (f32[], f32[]) = aten.aminmax.default(%aten_)\n"
        "  %getitem: f32[] = operator.getitem(%pair, 0)\n"
        '  output result "a": [2] = %aten_\n'
        '  output result "b": [] = %getitem\n'
        '  output result "c": [] = None\n'
    )
    graph = parse_local_graph(text)[1]
    space: dict[str, object] = {}
    exec(emit_python(graph, "micro"), space)
    function = space["micro"]
    assert callable(function)
    with collectives.use(OneRank()):
        a, b, c = function(torch.ones(2))
    assert torch.equal(a, torch.full((2,), -torch.inf))
    assert (b, c) == (-torch.inf, None)


def test_ops_that_make_tensors_make_them_on_the_given_device(folder: Path) -> None:
    module = read_artefact(folder, device="meta").rank_program.micro.module
    inputs = [torch.empty(s, device="meta", dtype=torch.float64) for s in ((3, 4), (2, 4), (6,))]
    with collectives.use(OneRank()):
        found = module(*inputs, torch.empty((), device="meta"))
    assert all(x.is_meta for x in found)
    assert (module.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default))[0].kwargs[
        "device"
    ] == torch.device("meta")


def test_compiling_again_replaces_an_artefact_but_nothing_else(folder: Path, tmp_path: Path) -> None:
    (folder / "checkpoints").mkdir()
    write_artefact(small_rank_program(), folder, SOURCE, TrainSettings(steps=4))
    assert read_artefact(folder).train == TrainSettings(steps=4)
    assert (folder / "checkpoints").is_dir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    for target in (tmp_path / "mine", tmp_path / "mine" / "thesis.tex"):
        with pytest.raises(MeshwrightError, match="E0645"):
            write_artefact(small_rank_program(), target, SOURCE, TrainSettings())
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["thesis.tex"]


def names(folder: Path) -> list[str]:
    return [*json.loads((folder / "meshwright.json").read_text())["files"], "meshwright.json"]


def test_every_missing_or_edited_file_is_named(folder: Path) -> None:
    assert len(names(folder)) == 12
    for name in names(folder):
        path = folder / name
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(MeshwrightError, match="E0640" if name == "meshwright.json" else "E0641") as caught:
            read_artefact(folder)
        assert name in str(caught.value)
        for damaged in (content[: len(content) // 2], content.replace(b"e", b"f", 1), b"", b"\xff\x00"):
            path.write_bytes(damaged)
            with pytest.raises(MeshwrightError, match=r"E064[23]") as caught:
                read_artefact(folder)
            assert name in str(caught.value)
            assert caught.value.diagnostics[0].action
        path.write_bytes(content)
    read_artefact(folder)


def resealed(folder: Path, change: dict[str, object]) -> None:
    from meshwright.compiler.emit.manifest import seal

    manifest = json.loads((folder / "meshwright.json").read_text())
    del manifest["checksum"]
    (folder / "meshwright.json").write_text(seal({**manifest, **change}))


def test_other_versions(folder: Path) -> None:
    resealed(folder, {"torch": "1.0"})
    (warning,) = read_artefact(folder).warnings
    assert warning.code == "W0640"
    assert "torch 1.0" in warning.message
    resealed(folder, {"format": 99})
    with pytest.raises(MeshwrightError, match="E0644"):
        read_artefact(folder)


@pytest.mark.parametrize("change", [{"layouts": {"w": {}}}, {"source": {}}, {"program": 3}, {"state": {"a": "x"}}])
def test_a_manifest_that_does_not_fit(folder: Path, change: dict[str, object]) -> None:
    resealed(folder, change)
    with pytest.raises(MeshwrightError, match="E0643"):
        read_artefact(folder)
