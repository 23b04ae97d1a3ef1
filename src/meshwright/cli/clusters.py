"""``meshwright clusters``"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from meshwright.cli.tables import show, table


def clusters_command(
    cluster: Annotated[
        str | None, typer.Argument(help="A preset such as h100x64 or local, or a cluster file. Default: list all.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="The number of ranks of 'local'.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List the devices and presets that Meshwright knows, or draw one cluster with its rates."""
    from meshwright.compiler.cluster.cluster_file import read_cluster
    from meshwright.compiler.cluster.drawing import as_json as data
    from meshwright.compiler.cluster.drawing import draw

    if cluster is None:
        if as_json:
            typer.echo(json.dumps(_catalogue(), indent=2))
        else:
            _list()
        return
    found = read_cluster(cluster, ranks)
    typer.echo(json.dumps(data(found), indent=2) if as_json else draw(found), nl=as_json)


def _list() -> None:
    from meshwright.compiler.cluster import catalogue, presets
    from meshwright.compiler.cluster.drawing import node_line
    from meshwright.compiler.cluster.units import amount, flops, rate

    rows = []
    for name in catalogue.names():
        entry = catalogue.entry(name)
        device = entry.device
        best = next((t for t in ("bf16", "f16", "f32") if t in device.flops), "")
        names = ", ".join((name, *entry.aliases))
        rates = f"{best} {flops(device.flops[best])}" if best else ""
        rows.append((names, amount(device.memory), rate(device.bandwidth), rates, node_line(entry.tiers)))
    columns = ("device", "memory", "its rate", "peak", "links for each device, innermost first")
    show(table("Devices", columns, rows, numbers=(1, 2)))
    typer.echo(f"Presets: <device>x<count>, such as {', '.join(presets.EXAMPLES)}; {presets.LOCAL} is this machine.")
    typer.echo("Draw one with 'meshwright clusters h100x64'; measure a machine with 'meshwright calibrate'.")


def _catalogue() -> dict[str, Any]:
    from dataclasses import asdict

    from meshwright.compiler.cluster import catalogue, presets
    from meshwright.compiler.cluster.drawing import device_json

    devices = {
        name: {
            **device_json(catalogue.entry(name).device),
            "description": catalogue.entry(name).description,
            "aliases": list(catalogue.entry(name).aliases),
            "tiers": [asdict(tier) for tier in catalogue.entry(name).tiers],
        }
        for name in catalogue.names()
    }
    return {"devices": devices, "presets": [*presets.EXAMPLES, presets.LOCAL]}
