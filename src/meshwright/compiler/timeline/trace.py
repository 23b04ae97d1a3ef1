"""Export of a timeline for Perfetto (ui.perfetto.dev) and chrome://tracing: the trace event format, as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.compiler.diagnostics import error
from meshwright.compiler.prediction import Prediction, Span

_FIRST = ("step", "compute", "waiting")


def write_trace(prediction: Prediction, path: str | Path) -> None:
    """Write the spans of a prediction made with ``spans``. Raises MeshwrightError E0473 if that is not possible."""
    text = json.dumps({"traceEvents": trace_events(prediction), "displayTimeUnit": "ms"})
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as fault:
        raise error(
            "E0473", f"cannot write {path}: {fault.strerror}", action="give --trace a file in a folder that exists"
        ) from None


def trace_events(prediction: Prediction) -> list[dict[str, Any]]:
    """Every resource is a thread; microseconds; memory by kind is a counter."""
    names = list(dict.fromkeys(s.resource for s in prediction.spans if s.resource != "memory"))
    names.sort(key=lambda n: _FIRST.index(n) if n in _FIRST else len(_FIRST))
    threads = {name: number for number, name in enumerate(names, 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "one rank, predicted"}}
    ]
    for name, number in threads.items():
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
    events.extend(_counter(s) if s.resource == "memory" else _event(s, threads[s.resource]) for s in prediction.spans)
    return events


def _event(span: Span, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 1,
        "tid": thread,
        "name": span.name,
        "cat": span.phase or span.resource,
        "ts": span.start * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "args": {k: v for k, v in {"phase": span.phase, "block": span.block, **span.notes}.items() if v},
    }


def _counter(span: Span) -> dict[str, Any]:
    values = {kind: int(size) for kind, size in span.notes.items()}
    return {"ph": "C", "pid": 1, "name": "memory", "ts": span.start * 1e6, "args": values}
