"""Read rows of published measurements, and say why one cannot be predicted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.published.fields import count, number, optional, part, source_of, whole
from benchmarks.published.habits import habits_of
from benchmarks.published.rows import Layout, Machine, Row, Shape, Skipped, Unreadable

MOST_DEVICES = 1 << 20
OWN = Path(__file__).parent.parent / "data" / "published" / "measurements.json"
"""The rows that come with the project, each with its source."""


def read(path: Path) -> list[Mapping[str, Any]]:
    """The raw rows of a file. Raises Unreadable if it is no list of objects."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise Unreadable(f"cannot read {path}: {fault.strerror}") from None
    except (ValueError, UnicodeDecodeError) as fault:
        raise Unreadable(f"{path} is no JSON: {fault}") from None
    if isinstance(found, dict):
        found = found.get("rows", found.get("measurements"))
    if not isinstance(found, list):
        raise Unreadable(f"{path} holds no list of rows")
    return found


def parse_all(raw: Iterable[Any]) -> tuple[list[Row], list[Skipped]]:
    """The rows that can be predicted, and the others with the reason."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for position, one in enumerate(raw):
        name = str(one.get("id") or f"row {position}") if isinstance(one, Mapping) else f"row {position}"
        source = source_of(one) if isinstance(one, Mapping) else ""
        try:
            rows.append(parse(one))
        except Unreadable as fault:
            skipped.append(Skipped(name, source, str(fault)))
    return rows, skipped


def parse(raw: Any) -> Row:
    """One row. Raises Unreadable with the reason why it cannot be predicted."""
    if not isinstance(raw, Mapping):
        raise Unreadable("it is no object")
    parallel, model, measured = part(raw, "parallel"), part(raw, "model"), part(raw, "measured")
    extra = part(raw, "extra")
    if extra.get("suspect"):
        raise Unreadable(f"suspect: {extra['suspect']}")
    if number(model, "experts", 0) > 1:
        raise Unreadable("mixture of experts, whose routing the row does not tell")
    if number(parallel, "cp", 1) > 1:
        raise Unreadable("cuts attention over a context axis, for which no preset makes a plan")
    precision = str(parallel.get("precision") or "")
    if "8" in precision:
        raise Unreadable(f"computes in 8 bits ({precision}); programs are captured in 16")
    if not any(word in precision.lower() for word in ("bf16", "fp16", "f16", "bfloat16", "half")):
        raise Unreadable(f"precision {precision or 'not told'}; only 16-bit computation is predicted")
    offload = str(parallel.get("offload") or "none")
    if offload != "none":
        raise Unreadable(f"offloads {offload}")
    text = f"{raw.get('notes') or ''} {raw.get('kind') or ''}".lower()
    if "lora" in text:
        raise Unreadable("trains adapters alone")
    machine = _machine(part(raw, "hardware"))
    shape = _shape(model)
    layout = _layout(parallel, machine, extra, shape)
    habits = habits_of(raw, parallel, extra, measured, shape)
    tier = str(raw.get("tier") or "")
    seconds = _seconds(measured, layout, shape, machine)
    memory = optional(measured, "peak_memory_gib")
    status = str(extra.get("status") or "").lower()
    failed = tier == "F" or "oom" in status
    if tier == "F" and status and not any(word in status for word in ("oom", "memory")):
        raise Unreadable(f"did not run for a reason other than memory: {status}")
    if seconds is None and memory is None and not failed:
        raise Unreadable("nothing was measured that is predicted here")
    formula = bool(extra.get("analytic"))
    return Row(
        id=str(raw.get("id") or ""),
        source=source_of(raw),
        tier=tier,
        shape=shape,
        layout=layout,
        habits=habits,
        machine=machine,
        seconds=None if failed else seconds,
        memory=None if failed else memory,
        fits=None if formula else not failed,
        parameters=optional(model, "params"),
        formula=formula,
    )


def _shape(model: Mapping[str, Any]) -> Shape:
    layers, hidden = count(model, "layers", "the number of layers"), count(model, "hidden", "the width")
    heads, time = count(model, "heads", "the number of heads"), count(model, "seq_len", "the sequence length")
    vocabulary = count(model, "vocab", "the vocabulary")
    if hidden % heads:
        raise Unreadable(f"{heads} heads do not divide the width {hidden}")
    shared = whole(model, "kv_heads", heads)
    if heads % shared:
        raise Unreadable(f"{shared} key/value heads do not divide {heads}")
    family = _family(model, layers, hidden, heads, shared, vocabulary)
    inner = optional(model, "ffn") or (4 * hidden if family == "gpt" else round(8 * hidden / 3 / 256) * 256)
    return Shape(family, layers, hidden, heads, shared, int(inner), vocabulary, time)


def _family(model: Mapping[str, Any], layers: int, hidden: int, heads: int, shared: int, vocabulary: int) -> str:
    """By the name; where it says nothing, by the number of parameters, else by the width of the inner layer."""
    name = str(model.get("name") or "").lower()
    if any(word in name for word in ("llama", "mistral", "qwen", "gemma", "yi-", "deepseek", "olmo", "granite")):
        return "llama"
    if any(word in name for word in ("gpt", "mpt", "opt", "bloom", "megatron", "nemotron", "palm", "gopher", "mt-nlg")):
        return "gpt"
    inner, parameters = optional(model, "ffn"), optional(model, "params")
    if inner and parameters:
        attention = (2 + 2 * shared / heads) * hidden**2
        plain = layers * (attention + 2 * hidden * inner) + vocabulary * hidden
        gated = layers * (attention + 3 * hidden * inner) + 2 * vocabulary * hidden
        return "gpt" if abs(plain - parameters) < abs(gated - parameters) else "llama"
    return "llama" if inner and inner < 4 * hidden else "gpt"


def _machine(hardware: Mapping[str, Any]) -> Machine:
    gpu = hardware.get("gpu")
    if not gpu:
        raise Unreadable("the device is not told")
    devices = count(hardware, "num_gpus", "the number of devices")
    if devices > MOST_DEVICES:
        raise Unreadable(f"the number of devices is {devices}")
    per_node = whole(hardware, "gpus_per_node", min(8, devices))
    return Machine(str(gpu), min(per_node, devices), devices, str(hardware.get("interconnect") or ""))


def _layout(parallel: Mapping[str, Any], machine: Machine, extra: Mapping[str, Any], shape: Shape) -> Layout:
    tensor, pipe = whole(parallel, "tp", 1), whole(parallel, "pp", 1)
    each = tensor * pipe
    cut = f"tensor {tensor}" + (f" times pipeline {pipe}" if pipe > 1 else "")
    if machine.count % each:
        raise Unreadable(f"{cut} does not divide {machine.count} devices")
    data = whole(parallel, "dp", machine.count // each)
    if data * each != machine.count:
        raise Unreadable(f"data {data} times {cut} is not {machine.count} devices")
    microbatch = count(parallel, "microbatch", "the microbatch")
    batch = count(parallel, "global_batch", "the global batch")
    if batch % (microbatch * data):
        raise Unreadable(f"a batch of {batch} is no whole number of microbatches of {microbatch} on {data} ranks")
    fsdp = str(parallel.get("fsdp") or "").upper()
    zero = int(parallel["zero_stage"]) if isinstance(parallel.get("zero_stage"), int) else (3 if fsdp else 0)
    hybrid = "HSDP" in fsdp or "HYBRID" in fsdp
    return Layout(
        data=data,
        tensor=tensor,
        sequence=parallel.get("sp") is True and tensor > 1,
        zero=min(max(zero, 0), 3) if "GRAD_OP" not in fsdp else 3,
        inner_data=max(1, machine.per_node // tensor) if hybrid else 0,
        regather="GRAD_OP" not in fsdp,
        microbatch=microbatch,
        batch=batch,
        **_pipeline(parallel, extra, shape, pipe),
    )


SCHEDULES = {
    "1f1b": "1f1b", "1f1b-i": "interleaved", "zb-h1": "zb-h1", "zb-h2": "zb-h2", "zb-1p": "zb-h1", "zb-2p": "zb-h2",
}  # fmt: skip
"""By a source's name of a schedule the compiler's; those that a search finds under one or two times the memory of 1F1B
by the schedule that is written for as much."""


def _pipeline(parallel: Mapping[str, Any], extra: Mapping[str, Any], shape: Shape, pipe: int) -> dict[str, Any]:
    if pipe == 1:
        return {}
    virtual = whole(parallel, "vpp", 1)
    if pipe * virtual > shape.layers:
        raise Unreadable(f"{pipe * virtual} stages for {shape.layers} layers, so that some have none")
    said = str(extra.get("schedule") or ("1F1B-I" if virtual > 1 else "1F1B")).lower()
    if said not in SCHEDULES:
        raise Unreadable(f"the pipeline schedule {said}")
    return {"pipe": pipe, "virtual": virtual, "schedule": SCHEDULES[said]}


def _seconds(measured: Mapping[str, Any], layout: Layout, shape: Shape, machine: Machine) -> float | None:
    seconds = optional(measured, "iteration_time_s")
    rate = optional(measured, "tokens_per_s_per_gpu")
    if seconds is None and rate is not None:
        seconds = layout.batch * shape.time / (rate * machine.count)
    return seconds
