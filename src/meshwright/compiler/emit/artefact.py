"""The artefact folder: everything that a worker needs to run a compiled step, in files that people can read.

    plan.toml               the plan
    program/*.ir            the step for one device: prologue, micro, update
    rank/*.ir               the same for every rank, with local shapes and collectives
    rank/*.py               rank/*.ir as Python
    rank/stage-1/*          of a pipeline: the passes of each stage, and the rounds of its update
    rank/schedule.txt       of a pipeline: what each rank does in which order
    constants.safetensors   tensors that were evaluated at compile time
    meshwright.json         versions, signatures, shardings, source, training settings, hashes

``rank/*.ir`` is the truth: reading builds the graphs from it and checks that ``rank/*.py`` is what it
prints as, so the Python that a worker calls for prologue and micro is the file that one reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

import meshwright
from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, error
from meshwright.compiler.emit.manifest import (
    FORMAT,
    SourceDescription,
    file_hash,
    program_from_json,
    program_to_json,
    seal,
    sealed,
    source_to_json,
)
from meshwright.compiler.emit.parts import TABLE, compiled_from, graphs_of, structure_to_json, table_of
from meshwright.compiler.emit.python import emit_python
from meshwright.compiler.emit.run import on_device, run_file
from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram
from meshwright.compiler.graph.program import Graph, StepProgram
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.graph.text import print_graph
from meshwright.compiler.graph.text_parser import parse_graph, parse_local_graph
from meshwright.compiler.plan import Plan
from meshwright.compiler.plan_file import plan_to_toml, read_plan
from meshwright.compiler.train_settings import TrainSettings, settings_from_json, settings_to_json

GRAPHS = ("prologue", "micro", "update")
MANIFEST = "meshwright.json"
AGAIN = "compile again: meshwright compile ... -o {folder}"


@dataclass
class Artefact:
    """A compiled step as read from its folder."""

    folder: Path
    rank_program: Compiled
    source: SourceDescription
    train: TrainSettings
    tensors: dict[str, Path] = field(default_factory=dict)
    """Further tensor files by name (``initial``: weights to begin with)."""
    warnings: list[Diagnostic] = field(default_factory=list)


def write_artefact(
    rank_program: Compiled,
    folder: str | Path,
    source: SourceDescription,
    train: TrainSettings,
    tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Path:
    """Write the artefact. ``tensors`` are further tensor files by name.

    Raises E0645 if the folder holds something else.
    """
    folder = Path(folder)
    manifest_path = folder / MANIFEST
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not manifest_path.exists())):
        action = "give -o a new folder, or one that holds an artefact"
        raise error("E0645", f"{folder} holds other files, which compiling would mix with its own", action=action)
    files = _texts(rank_program, source)
    tensors = {"constants": rank_program.program.constants, **(tensors or {})}
    content = {name: text.encode() for name, text in files.items()}
    content |= {f"{name}.safetensors": _tensor_bytes(values) for name, values in tensors.items()}
    manifest = {
        "format": FORMAT,
        "meshwright": meshwright.__version__,
        "torch": torch.__version__,
        "source": source_to_json(source),
        "train": settings_to_json(train),
        "program": program_to_json(rank_program.program),
        **structure_to_json(rank_program),
        "files": {name: file_hash(data) for name, data in sorted(content.items())},
    }
    sealed_text = seal(manifest)
    try:
        manifest_path.unlink(missing_ok=True)  # until the last file is written there is no artefact
        for name, data in content.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        manifest_path.write_text(sealed_text, encoding="utf-8")
    except OSError as fault:
        raise error(
            "E0645", f"cannot write {folder}: {fault.strerror}", action="give -o a folder that can be written"
        ) from None
    return folder


def _texts(rank_program: Compiled, source: SourceDescription) -> dict[str, str]:
    title = _title(source, rank_program.plan)
    files = {"plan.toml": plan_to_toml(rank_program.plan)}
    for name in GRAPHS:
        files[f"program/{name}.ir"] = print_graph(getattr(rank_program.program, name), name, origins=True)
    for name, local in graphs_of(rank_program).items():
        files[f"rank/{name}.ir"] = print_graph(local, _function(name), origins=True)
        files[f"rank/{name}.py"] = emit_python(local, _function(name), title)
    if isinstance(rank_program, PipelineProgram):
        files[f"rank/{TABLE}"] = table_of(rank_program)
    return files


def _function(name: str) -> str:
    """The name of a graph's function: ``forward`` of ``stage-1/forward``."""
    return name.rpartition("/")[2]


def _title(source: SourceDescription, plan: Plan) -> str:
    """What a generated file says that it was made from."""
    return f"{source.place}, plan {plan.name or 'plan.toml'}, mesh {plan.mesh}"


def _tensor_bytes(values: Mapping[str, Tensor]) -> bytes:
    return safetensors.torch.save({name: t.detach().cpu().clone().contiguous() for name, t in values.items()})


def read_artefact(folder: str | Path, device: torch.device | str = "cpu") -> Artefact:
    """Read an artefact; its graphs run on ``device``.

    Raises MeshwrightError E0640 to E0644 that names the file, what is wrong with it, and what to do.
    """
    folder = Path(folder)
    manifest = _manifest(folder)
    content = {name: _checked(folder, name, digest) for name, digest in manifest["files"].items()}
    text = {name: data.decode() for name, data in content.items() if not name.endswith(".safetensors")}
    try:
        graphs: dict[str, Any] = {n: _global(text, n, folder) for n in GRAPHS}
        source = SourceDescription(**manifest["source"])
        plan = read_plan(text["plan.toml"])
        title = _title(source, plan)
        names = [n[len("rank/") : -len(".ir")] for n in text if n.startswith("rank/") and n.endswith(".ir")]
        locals_ = {name: _local(text, name, folder, title, torch.device(device)) for name in names}
        constants = safetensors.torch.load(content["constants.safetensors"])
        program = StepProgram(**graphs, constants=constants, **program_from_json(manifest["program"]))
        rank_program = compiled_from(program, plan, locals_, manifest, text.get(f"rank/{TABLE}", ""))
        train = settings_from_json(manifest["train"])
    except (KeyError, TypeError, ValueError, AttributeError, safetensors.SafetensorError) as fault:
        message = f"{folder / MANIFEST} does not fit the files beside it ({type(fault).__name__}: {fault})"
        raise error("E0643", message, action=AGAIN.format(folder=folder)) from None
    except MeshwrightError as fault:
        message = f"a file of {folder} cannot be read by this version of Meshwright"
        notes = [d.render() for d in fault.diagnostics]
        raise error("E0643", message, action=AGAIN.format(folder=folder), notes=notes) from None
    artefact = Artefact(folder, rank_program, source, train)
    tensors = [name for name in content if name.endswith(".safetensors") and name != "constants.safetensors"]
    artefact.tensors = {name.removesuffix(".safetensors"): folder / name for name in tensors}
    for name, now in (("torch", torch.__version__), ("meshwright", meshwright.__version__)):
        if manifest[name] != now:
            message = f"{folder} was compiled with {name} {manifest[name]}, this is {name} {now}"
            artefact.warnings.append(Diagnostic("W0640", message, action=AGAIN.format(folder=folder)))
    return artefact


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        what = "is no folder" if not folder.is_dir() else f"holds no artefact (there is no {MANIFEST})"
        raise error("E0640", f"{folder} {what}", action="give the folder that 'meshwright compile ... -o FOLDER' wrote")
    again = AGAIN.format(folder=folder)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise error("E0643", f"{path} cannot be read: {fault}", action=again) from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise error("E0643", f"{path} is not the manifest of an artefact", action=again)
    if manifest.get("format") != FORMAT:
        written = manifest.get("meshwright", "an unknown version")
        raise error("E0644", f"{folder} was written by Meshwright {written} in another format", action=again)
    if not sealed(manifest):
        raise error("E0642", f"{path} was edited or damaged after compilation", action=again)
    return manifest


def _checked(folder: Path, name: str, digest: str) -> bytes:
    """The content of a file that is as it was written."""
    path = folder / name
    again = AGAIN.format(folder=folder)
    try:
        data = path.read_bytes()
    except OSError as fault:
        raise error("E0641", f"{path} is missing or cannot be read: {fault.strerror}", action=again) from None
    if file_hash(data) != digest:
        if name == "plan.toml":
            again = f"compile again with this plan: meshwright compile ... --plan {path} -o {folder}"
        raise error("E0642", f"{path} was edited or damaged after compilation", action=again)
    return data


def _global(text: Mapping[str, str], name: str, folder: Path) -> Graph:
    return parse_graph(text[f"program/{name}.ir"], str(folder / "program" / f"{name}.ir"))[1]


def _local(text: Mapping[str, str], name: str, folder: Path, title: str, device: torch.device) -> LocalGraph:
    """The graph of rank/NAME.ir, whose function is in rank/NAME.py."""
    graph = parse_local_graph(text[f"rank/{name}.ir"], str(folder / f"rank/{name}.ir"))[1]
    source = text[f"rank/{name}.py"]
    if emit_python(graph, _function(name), title) != source:
        message = f"{folder / 'rank' / name}.py is not what {name}.ir prints as"
        raise error("E0642", message, action=AGAIN.format(folder=folder))
    on_device(graph, device)
    run_file(graph, _function(name), source, str(folder / "rank" / f"{name}.py"), device)
    return graph
