"""``meshwright simulate``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.settings import Separability, overrides, read_precision, read_separability
from meshwright.cli.stages import stages_of
from meshwright.cli.tables import described, show, size, table

if TYPE_CHECKING:
    from meshwright.compiler.prediction import Prediction
    from meshwright.simulation import Simulated


def simulate_command(
    source: Annotated[
        str, typer.Argument(help="An artefact folder, a .mw file, or a factory as package.module:factory.")
    ],
    plan: Annotated[
        str | None,
        typer.Option(
            help="A preset such as fsdp=2,tp=2, a plan file, or auto. Default: what the source says, else fsdp."
        ),
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="A preset such as h100x64, or a cluster file; it need not exist. local: this machine.")
    ] = "local",
    fusion: Annotated[
        str,
        typer.Option(help="none: every op is a kernel; kernels: as written by hand; compiled: chains are fused."),
    ] = "none",
    trace: Annotated[
        Path | None, typer.Option(help="A file for the timeline, to be opened with ui.perfetto.dev.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    batch: Annotated[int | None, typer.Option(help="The samples of the global batch, instead of the source's.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="bf16, or 'bf16 compute, fp32 weights, fp32 reductions', instead of the source's."),
    ] = None,
    separability: Separability = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="name=value: the size of an axis, or a setting such as batch. May be repeated."),
    ] = None,
) -> None:
    """Predict time and memory of a step on a cluster. No device of it is needed."""
    chosen, compute, declared = overrides(set_ or []), read_precision(precision), read_separability(separability)
    from meshwright.cli.faults import print_diagnostics
    from meshwright.compiler.timeline import write_trace
    from meshwright.simulation import simulate

    found = simulate(
        source,
        plan,
        cluster,
        overrides=chosen,
        batch=batch,
        precision=compute,
        separability=declared,
        fusion=fusion,
        spans=trace is not None,
    )
    if found.warnings:
        print_diagnostics(*found.warnings)
    if trace is not None:
        write_trace(found.prediction, trace)
    if as_json:
        typer.echo(json.dumps(_json(found), indent=2))
        return
    for note in found.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{found.place} on {found.cluster.name}\n{described(found.plan, found.program)}\n{_line(found)}\n")
    prediction = found.prediction
    shown = [_time(prediction), _communication(prediction), *stages_of(prediction.flow, times=True), _memory(found)]
    show(*(one for one in shown if one.row_count))
    if trace is not None:
        typer.echo(f"the timeline is written to {trace}")


def _line(found: Simulated) -> str:
    """The prediction in one line."""
    prediction, device = found.prediction, found.cluster.device
    rate = f"{prediction.tokens_per_second:,.0f} tokens/s, " if prediction.tokens_per_second else ""
    needs, has = size(prediction.device_memory), size(device.memory)
    room = f"it fits: {needs} of {has}" if prediction.fits else f"it does not fit: {needs}, a device has {has}"
    return f"step {_seconds(prediction.seconds)}, {rate}{prediction.mfu:.1%} of the peak; {room}"


def _time(prediction: Prediction) -> Any:
    parts = [(f"compute: {kind}", s) for kind, s in sorted(prediction.compute.items(), key=lambda item: -item[1])]
    parts += [(f"waiting for messages over {axes}", s) for axes, s in prediction.exposed.items()]
    parts += [(_CAUSES.get(cause, cause), s) for cause, s in prediction.other.items()]
    rows = [(name, _seconds(s), f"{s / prediction.seconds:.1%}") for name, s in parts if s]
    rows.append(("step", _seconds(prediction.seconds), "100.0%"))
    return table("Time of a step", ("part", "time", "share"), rows, numbers=(1, 2))


_CAUSES = {
    "launch": "waiting for the host to launch kernels",
    "transfer": "waiting for transfers from and to the host",
    "contention": "kernels slowed by messages beside them",
    "bubble": "waiting for other pipeline stages",
}


def _communication(prediction: Prediction) -> Any:
    rows = [
        (axes, _seconds(s), _seconds(prediction.exposed.get(axes, 0.0))) for axes, s in prediction.communication.items()
    ]
    return table("Communication", ("axes", "on the links", "exposed"), rows, numbers=(1, 2))


def _memory(found: Simulated) -> Any:
    needs = found.prediction.memory
    rows = [(kind, size(needs.by_kind.get(kind, 0)), size(most)) for kind, most in needs.most.items()]
    rows.append(("driver and allocator", size(found.prediction.device_memory - needs.peak), ""))
    rows.append(("total", size(found.prediction.device_memory), ""))
    where = f" of {needs.at.block}" if needs.at.block else ""
    title = f"Memory of a rank; the peak is in {needs.at.graph}, {needs.at.phase}{where} (%{needs.at.item})"
    return table(title, ("kind", "at the peak", "most at any time"), rows, numbers=(1, 2))


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3f} {unit}"
    return f"{value * 1e6:.1f} us"


def _json(found: Simulated) -> dict[str, Any]:
    from dataclasses import asdict

    prediction = asdict(found.prediction)
    del prediction["spans"]
    return {
        "source": found.place,
        "plan": {
            "name": found.plan.name,
            "mesh": dict(found.plan.mesh.axes),
            "ranks": found.plan.mesh.ranks,
            "microbatches": found.plan.microbatches,
        },
        "cluster": {"name": found.cluster.name, "device": found.cluster.device.name, "ranks": found.cluster.ranks},
        "fusion": found.execution.fusion,
        "prediction": prediction,
    }
