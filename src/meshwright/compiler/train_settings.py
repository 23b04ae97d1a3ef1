"""How a compiled step is trained: what the artefact tells the worker besides the program. JSON in, JSON out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class DataSettings:
    """Where batches come from.

    ``kind`` is ``bytes``, ``tokens`` or ``random``. ``fields`` says for each batch tensor where in a window of the
    corpus it starts (``{"input_ids": 0, "labels": 1}``); empty: every tensor at 0. Tokens are below ``vocabulary``,
    if that is known.
    """

    kind: Literal["bytes", "tokens", "random"] = "random"
    path: str = ""
    dtype: str = "uint8"
    vocabulary: int | None = None
    fields: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class InitialValue:
    """How a parameter is filled first: ``normal`` with ``(0.02,)``, ``constant`` with ``(0.0,)``, and so on."""

    kind: str
    arguments: tuple[float, ...] = ()


@dataclass(frozen=True)
class TrainSettings:
    """``initial`` is empty where the weights are in a file of the artefact (``initial.safetensors``)."""

    steps: int = 100
    seed: int = 0
    checkpoint_every: int | None = None
    data: DataSettings = field(default_factory=DataSettings)
    initial: Mapping[str, InitialValue] = field(default_factory=dict)


def settings_to_json(settings: TrainSettings) -> dict[str, Any]:
    return asdict(settings)


def settings_from_json(data: Mapping[str, Any]) -> TrainSettings:
    """Raises KeyError, TypeError or AttributeError for what :func:`settings_to_json` has not written."""
    initial = {name: InitialValue(v["kind"], tuple(v["arguments"])) for name, v in data["initial"].items()}
    return TrainSettings(**{**data, "data": DataSettings(**data["data"]), "initial": initial})
