"""``meshwright plan``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.output import write
from meshwright.cli.settings import Separability, overrides, read_precision, read_separability
from meshwright.cli.tables import show, size, table

if TYPE_CHECKING:
    from meshwright.compiler.search.prices import Priced
    from meshwright.compiler.search.why_not import WhyNot
    from meshwright.planning import Planned


def plan_command(
    source: Annotated[str, typer.Argument(help="A .mw file, or a factory as package.module:factory.")],
    cluster: Annotated[str, typer.Option(help="A preset such as h100x64 or local, or a cluster file.")],
    ranks: Annotated[int | None, typer.Option(help="How many of the cluster's devices are used. Default: all.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The plan file to write.")] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", help="Fix a part of the plan: tp=8, fsdp, micro=4, no offload. May be repeated."),
    ] = None,
    why_not: Annotated[
        list[str] | None, typer.Option("--why-not", help="Also say how a plan with this pin compares. May be repeated.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="The samples of the global batch, instead of the source's.")] = None,
    tokens: Annotated[str | None, typer.Option(help="The global batch in tokens: 131072, 128K, 16M.")] = None,
    reserve: Annotated[str, typer.Option(help="Memory of each device that stays free: 4GiB or 5%, say.")] = "0",
    budget: Annotated[int, typer.Option(min=1, help="How many candidates are compiled and simulated at most.")] = 24,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
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
    """Choose a plan for a cluster, predict its step, and say why. No device of the cluster is needed."""
    chosen, compute, declared = overrides(set_ or []), read_precision(precision), read_separability(separability)
    from meshwright.cli.faults import print_diagnostics
    from meshwright.compiler.plan_file import plan_to_toml
    from meshwright.compiler.search.pin_text import parse_pins
    from meshwright.planning import plan

    for text in why_not or []:
        parse_pins([text])  # what cannot be read is told before anything is searched

    found = plan(
        source,
        cluster,
        ranks=ranks,
        pins=pin or (),
        batch=batch,
        tokens=tokens,
        reserve=reserve,
        budget=budget,
        overrides=chosen,
        precision=compute,
        separability=declared,
    )
    if found.warnings:
        print_diagnostics(*found.warnings)
    others = [found.why_not(text) for text in why_not or []]
    if output is not None:
        write(output, plan_to_toml(found.plan), "E0444")
    if as_json:
        typer.echo(json.dumps(_json(found, others), indent=2))
        return
    for reason in found.reasons:
        typer.echo(f"- {reason}")
    typer.echo("")
    show(_predicted(found), _memory(found), _candidates(found))
    for other in others:
        typer.echo("")
        for sentence in other.sentences:
            typer.echo(f"- {sentence}")
    if output is not None:
        typer.echo(f"written to {output}")


def _predicted(found: Planned) -> Any:
    from meshwright.compiler.search.differences import causes
    from meshwright.compiler.search.telling import percent, seconds

    prediction = found.prediction
    kinds = sorted(prediction.compute.items(), key=lambda item: -item[1])
    parts = [(f"  {kind}", value) for kind, value in kinds if kind != "recomputed" and value]
    lines = [
        line
        for cause, value in causes(prediction).items()
        for line in ((cause, value), *(parts if cause == "compute" else ()))
    ]
    rows = [(cause, seconds(value), percent(value / prediction.seconds)) for cause, value in lines]
    rows.append(("step", seconds(prediction.seconds), "100 %"))
    rate = f"{prediction.tokens_per_second:,.0f} tokens/s, " if prediction.tokens_per_second else ""
    title = f"Predicted on {found.cluster.name}: {rate}{percent(prediction.mfu)} of the peak"
    return table(title, ("cause", "seconds", "of the step"), rows, numbers=(1, 2))


def _memory(found: Planned) -> Any:
    needs = found.prediction.memory
    rows = [(kind, size(needs.by_kind.get(kind, 0)), size(most)) for kind, most in needs.most.items()]
    rows.append(("driver and allocator", size(found.prediction.device_memory - needs.peak), ""))
    rows.append(("total", size(found.prediction.device_memory), ""))
    where = f" of {needs.at.block}" if needs.at.block else ""
    title = f"Memory of a rank; the peak is in {needs.at.graph}, {needs.at.phase}{where} (%{needs.at.item})"
    return table(title, ("kind", "at the peak", "most at any time"), rows, numbers=(1, 2))


def _candidates(found: Planned) -> Any:
    from meshwright.compiler.search.telling import percent, seconds

    fits = found.search.fits
    rows = []
    for one in (found.search.best, *found.alternatives):
        if one is not None:
            exposed = sum(one.prediction.exposed.values())
            rows.append((str(one.candidate), seconds(one.seconds), percent(one.prediction.mfu), seconds(exposed),
                         size(one.memory), "" if fits(one) else "does not fit"))  # fmt: skip
    title = f"Candidates: {len(found.search.priced)} simulated of {found.search.considered} that are legal"
    return table(title, ("plan", "step", "of the peak", "exposed", "memory", ""), rows, numbers=(1, 2, 3, 4))


def _json(found: Planned, others: list[WhyNot]) -> dict[str, Any]:
    from dataclasses import asdict

    assert found.plan.predicted is not None
    return {
        "plan": {
            "name": found.plan.name,
            "mesh": dict(found.plan.mesh.axes),
            "ranks": found.plan.mesh.ranks,
            "microbatches": found.plan.microbatches,
            "batch": found.plan.batch,
            "storage": asdict(found.plan.storage),
            "sequence": found.plan.sequence,
            "recompute": [asdict(r) for r in found.plan.recompute],
            "offload": found.plan.offload,
            "prefetch": found.plan.prefetch,
        },
        "predicted": asdict(found.plan.predicted),
        "reasons": list(found.reasons),
        "candidates": [_priced(one) for one in found.search.priced],
        "considered": found.search.considered,
        "seconds": dict(found.seconds),
        "why_not": [_why_not(other) for other in others],
    }


def _priced(one: Priced) -> dict[str, Any]:
    return {
        "plan": str(one.candidate),
        "seconds": one.seconds,
        "memory": one.memory,
        "exposed": dict(one.prediction.exposed),
        "mfu": one.prediction.mfu,
    }


def _why_not(other: WhyNot) -> dict[str, Any]:
    by = other.differences
    return {
        "pins": other.pins.text,
        "plan": _priced(other.plan) if other.plan is not None else None,
        "seconds_by_cause": dict(by.by_cause) if by is not None else {},
        "memory_by_kind": dict(by.by_kind) if by is not None else {},
        "sentences": list(other.sentences),
    }
