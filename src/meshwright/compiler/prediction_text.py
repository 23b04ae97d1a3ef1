"""What was predicted of a plan, in its TOML form: the table ``[predicted]`` and the list ``reasons``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from meshwright.compiler.diagnostics import Span
from meshwright.compiler.plan import Predicted
from meshwright.compiler.prediction import Prediction
from meshwright.compiler.toml_text import TomlText

PREDICTED: dict[str, dict[str, type]] = {
    "predicted": {
        "cluster": str, "step_time": float, "tokens_per_second": float, "mfu": float, "device_memory": int,
        "memory": dict, "compute": dict, "exposed": dict, "other": dict,
    },
}  # fmt: skip
"""The keys of the tables, and their types."""
_TABLES = ("memory", "compute", "exposed", "other")


class Reader(Protocol):
    """What gathers the faults of a document, with its text."""

    toml: TomlText

    def fault(self, code: str, message: str, place: Span, action: str) -> None: ...

    def table(self, kind: str, table: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]: ...


def predicted_of(prediction: Prediction, cluster: str) -> Predicted:
    """What a plan keeps of a prediction."""
    return Predicted(
        cluster=cluster,
        step_time=_short(prediction.seconds),
        tokens_per_second=_short(prediction.tokens_per_second),
        mfu=_short(prediction.mfu),
        device_memory=prediction.device_memory,
        memory=dict(prediction.memory.by_kind),
        compute=_shortened(prediction.compute),
        exposed=_shortened(prediction.exposed),
        other=_shortened(prediction.other),
    )


def _shortened(values: Mapping[str, float]) -> dict[str, float]:
    return {name: _short(value) for name, value in values.items() if value}


def _short(value: float) -> float:
    """Six digits: more would only be harder to read and to compare."""
    return float(f"{value:.6g}")


def predicted_lines(predicted: Predicted) -> list[str]:
    """The tables ``[predicted]`` and ``[predicted.memory]``, ..."""
    lines = [
        "[predicted]  # of one step when the plan was chosen; a run tells the measured values beside them",
        f"cluster = {_key(predicted.cluster)}",
        f"step_time = {_number(predicted.step_time)}".ljust(27) + " # seconds",
        f"tokens_per_second = {_number(predicted.tokens_per_second)}",
        f"mfu = {_number(predicted.mfu)}".ljust(27) + " # share of the peak that the model's own operations reach",
        f"device_memory = {predicted.device_memory}".ljust(27) + " # bytes, with what driver and allocator take",
    ]
    comments = {
        "memory": "bytes of a rank at the peak, by kind",
        "compute": "seconds by kind of kernel",
        "exposed": "seconds that the device waits for messages, by mesh axes",
        "other": "further seconds",
    }
    for name in _TABLES:
        values: Mapping[str, float] = getattr(predicted, name)
        if values:
            lines += ["", f"[predicted.{name}]  # {comments[name]}"]
            lines += [f"{_key(key)} = {_number(value)}" for key, value in values.items()]
    return lines


def read_predicted(reader: Reader, table: dict[str, Any] | None) -> Predicted | None:
    """The table, if there is one. Faults: E0312 and E0313, as of the plan's other tables."""
    if table is None:
        return None
    known = {k: float(v) if PREDICTED["predicted"][k] is float and _numeric(v) else v for k, v in table.items()
             if k in PREDICTED["predicted"]}  # fmt: skip
    found = reader.table("predicted", {**table, **known}, ("predicted",))
    tables = {}
    for name in _TABLES:
        values = found.get(name, {})
        for key, value in values.items():
            if not _numeric(value):
                place = reader.toml.value("predicted", name, key)
                reader.fault("E0313", f"'{key}' must be a number", place, f"write {_key(key)} = 1")
        tables[name] = {key: value for key, value in values.items() if _numeric(value)}
    return Predicted(
        cluster=found.get("cluster", ""),
        step_time=found.get("step_time", 0.0),
        tokens_per_second=found.get("tokens_per_second", 0.0),
        mfu=found.get("mfu", 0.0),
        device_memory=found.get("device_memory", 0),
        memory=tables["memory"],
        compute=tables["compute"],
        exposed=tables["exposed"],
        other=tables["other"],
    )


def read_reasons(reader: Reader, given: list[Any]) -> tuple[str, ...]:
    """The list ``reasons``. Faults: E0313."""
    if not all(isinstance(reason, str) for reason in given):
        reader.fault("E0313", "'reasons' must be a list of texts", reader.toml.value("reasons"), 'write ["..."]')
        return ()
    return tuple(given)


def _numeric(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: float) -> str:
    """As short as it is read back the same; infinities and no-numbers as TOML writes them."""
    return str(value) if isinstance(value, int) else repr(float(value))


def _key(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
