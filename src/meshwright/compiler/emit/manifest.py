"""``meshwright.json``: what an artefact is made of, as JSON, with the hash of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from meshwright.compiler.graph.dtypes import dtype_named, short_name
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import Parameter, StepProgram, TensorSpec
from meshwright.compiler.graph.rank_program import Layout
from meshwright.compiler.mesh import Sharding, parse_sharding

FORMAT = 2
"""The version of the artefact's layout; another one is refused."""


@dataclass(frozen=True)
class SourceDescription:
    """Where a program comes from, so that it can be told and built again."""

    kind: Literal["language", "factory", "module"]
    place: str
    """``gpt.mw``, ``package.module:factory``, or the class of a module."""
    name: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Axis sizes and settings given on the command line."""
    text: str = ""
    """The whole ``.mw`` text."""


def program_to_json(program: StepProgram) -> dict[str, Any]:
    """All of a StepProgram but its graphs and constants."""
    return {
        "parameters": [
            {"name": p.name, **_spec(p.spec), "trainable": p.trainable, "aliases": list(p.aliases), "group": p.group}
            for p in program.parameters
        ],
        "buffers": {name: _spec(spec) for name, spec in program.buffers.items()},
        "batch": {
            name: {**_spec(spec), "batch_dim": program.batch_dims.get(name)} for name, spec in program.batch.items()
        },
        "state": {name: {**_spec(spec), "init": program.state_init.get(name)} for name, spec in program.state.items()},
        "scalars": program.scalars,
        "batch_size": program.batch_size,
        "fingerprint": program.fingerprint,
    }


def program_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a StepProgram that :func:`program_to_json` wrote."""
    return {
        "parameters": tuple(
            Parameter(p["name"], _to_spec(p), p["trainable"], tuple(p["aliases"]), p["group"])
            for p in data["parameters"]
        ),
        "buffers": {name: _to_spec(spec) for name, spec in data["buffers"].items()},
        "batch": {name: _to_spec(spec) for name, spec in data["batch"].items()},
        "batch_dims": {name: spec["batch_dim"] for name, spec in data["batch"].items()},
        "state": {name: _to_spec(spec) for name, spec in data["state"].items()},
        "state_init": {name: spec["init"] for name, spec in data["state"].items() if spec["init"] is not None},
        "scalars": dict(data["scalars"]),
        "batch_size": data["batch_size"],
        "fingerprint": data["fingerprint"],
    }


def shardings_to_json(rank_program: Compiled) -> dict[str, Any]:
    """How parameters and optimizer state lie."""
    layouts = {
        name: {kind: str(getattr(layout, kind)) for kind in ("rest", "compute", "gradient", "state")}
        for name, layout in rank_program.layouts.items()
    }
    return {"layouts": layouts, "state": {name: str(s) for name, s in rank_program.state.items()}}


def shardings_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layouts": {
            name: Layout(**{kind: parse_sharding(text) for kind, text in layout.items()})
            for name, layout in data["layouts"].items()
        },
        "state": {name: parse_sharding(text) for name, text in data["state"].items()},
    }


def source_to_json(source: SourceDescription) -> dict[str, Any]:
    return asdict(source)


def seal(manifest: Mapping[str, Any]) -> str:
    """The manifest as text, with a checksum of itself."""
    body = {**manifest, "checksum": _checksum(manifest)}
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


def sealed(manifest: Mapping[str, Any]) -> bool:
    """Whether the checksum is that of the rest."""
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return bool(manifest.get("checksum") == _checksum(rest))


def file_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _checksum(manifest: Mapping[str, Any]) -> str:
    return file_hash(json.dumps(manifest, sort_keys=True).encode())


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"type": f"{short_name(spec.dtype)}{Sharding.whole(spec.shape)}"}


def _to_spec(data: Mapping[str, Any]) -> TensorSpec:
    dtype, bracket, sizes = data["type"].partition("[")
    return TensorSpec(parse_sharding(bracket + sizes).shape, dtype_named(dtype))
