"""The first parameters, buffers and optimizer state of every rank, the same on every mesh.

Weights come from a source that gives one whole tensor at a time; each is cut to the rank's shard right
away, so that a rank never holds more than its shards and one whole tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from meshwright.compiler.analysis.offloading import on_host
from meshwright.compiler.diagnostics import MeshwrightError, error
from meshwright.compiler.graph.pipeline_program import Compiled, copies_of
from meshwright.compiler.graph.program import Parameter, TensorSpec, Value
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.plan import PIPE
from meshwright.runtime.holdings import Held, Holdings, held
from meshwright.runtime.host_memory import HostTensor, host_tensors
from meshwright.runtime.layout import Coordinates, take_shard
from meshwright.runtime.step_executor import RankCommunicator

Weights = Callable[[str, TensorSpec], Tensor]
"""Gives a whole parameter or buffer by name. Raises KeyError for a name that it does not have."""


def materialize(
    rank_program: Compiled,
    weights: Weights,
    ranks: Sequence[Coordinates],
    *,
    device: torch.device | str = "cpu",
    digests: MutableMapping[str, int] | None = None,
    together: bool = False,
) -> list[Holdings]:
    """What the ranks at the given coordinates hold before the first step.

    A tied parameter is asked for by its canonical name and then by its aliases; further copies of it on the same rank
    are the same tensor. What only stages of other ranks need is not asked for, unless all ranks ask ``together`` (one
    gives it to the others). ``digests``, if given, is filled with a checksum of every whole tensor; see
    :func:`check_same_weights`. Optimizer state that the program offloads lies in the memory of the host.
    Raises MeshwrightError E0606 for a weight that is missing or has another shape.
    """
    program = rank_program.program
    copies = copies_of(rank_program)
    aliases = {p.name: p.aliases for p in program.parameters}
    aliases |= {copy: aliases[name] for copy, name in copies.items()}
    result = [Holdings(state=_first_state(rank_program, torch.device(device), at)) for at in ranks]
    begin = _begin_as_weights(rank_program)
    for value, place in held(rank_program).items():
        if value.kind == "state" or not (together or any(place.on(coordinates) for coordinates in ranks)):
            continue
        named = Value(value.kind, copies.get(value.name, value.name))
        whole = _whole(weights, named, aliases.get(value.name, ()), place.spec)
        if digests is not None:
            digests[value.name] = checksum(whole)
        for name, lies in begin.get(value.name, ()):
            for holdings, coordinates in zip(result, ranks, strict=True):
                if name in holdings.state:
                    holdings.state[name].copy_(take_shard(whole, lies.sharding, rank_program.mesh, coordinates))
        for holdings, coordinates in zip(result, ranks, strict=True):
            if not place.on(coordinates):
                continue
            mine = holdings.of(value.kind)
            if named.name in mine:  # stages of one rank that share a weight need no copy of it
                mine[value.name] = mine[named.name]
                continue
            shard = take_shard(whole, place.sharding, rank_program.mesh, coordinates)
            mine[value.name] = shard.to(device)
    return result


def _begin_as_weights(rank_program: Compiled) -> dict[str, list[tuple[str, Held]]]:
    """The optimizer state that begins as its parameter (master copies), by that parameter, and how it lies."""
    found: dict[str, list[tuple[str, Held]]] = {}
    for value, place in held(rank_program).items():
        if value.kind == "state" and rank_program.program.begins_as_its_parameter(value.name):
            found.setdefault(value.name.rpartition("/")[0], []).append((value.name, place))
    return found


def _first_state(rank_program: Compiled, device: torch.device, at: Coordinates) -> dict[str, Tensor]:
    """The optimizer state of one rank before the first step, in the program's order."""
    made: dict[str, Tensor] = {}
    offloaded = {name for graph in rank_program.update_graphs for name in on_host(graph)}
    wanted: dict[str, HostTensor] = {}
    for value, place in held(rank_program).items():
        if value.kind == "state" and place.on(at):
            shape = place.sharding.local_shape(rank_program.mesh)
            fill = rank_program.program.state_init.get(value.name, 0.0)
            if value.name in offloaded:
                wanted[value.name] = HostTensor(shape, place.spec.dtype, fill)
            else:
                made[value.name] = torch.full(shape, fill, dtype=place.spec.dtype, device=device)
    found = made | host_tensors(wanted, device)
    return {name: found[name] for name in rank_program.program.state if name in found}


def _whole(weights: Weights, value: Value, aliases: Sequence[str], spec: TensorSpec) -> Tensor:
    for name in (value.name, *aliases):
        try:
            whole = weights(name, spec).detach()
        except KeyError:
            continue
        if tuple(whole.shape) != spec.shape:
            raise error(
                "E0606",
                f"the weight '{name}' has the shape {list(whole.shape)}, the model needs {list(spec.shape)}",
                action="give the weights of the model that was compiled",
            )
        if whole.is_meta:
            raise error(
                "E0606",
                f"the weight '{name}' is on the meta device and has no values",
                action="give real weights: a file, a function that makes them, or a model with values",
            )
        return whole.to(spec.dtype)
    raise error(
        "E0606",
        f"there are no values for the {value.kind} '{value.name}'",
        action="give a source of weights that has it",
    )


def from_module(module: nn.Module) -> Weights:
    """The weights of a module, by their names in it."""
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return lambda name, spec: tensors[name]


def seeded(seed: int, make: Callable[[str, TensorSpec, torch.Generator], Tensor]) -> Weights:
    """Weights made one by one, each from a random generator of its own that depends on seed and name alone."""

    def weights(name: str, spec: TensorSpec) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) << 32 | (seed & 0xFFFFFFFF))
        return make(name, spec, generator)

    return weights


def from_safetensors(path: str | Path) -> Weights:
    """The weights of a ``.safetensors`` file, or of all those in a folder. Read one tensor at a time.

    Raises MeshwrightError E0606 if there is no such file or it cannot be read.
    """
    place = Path(path)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    where: dict[str, Path] = {}
    for file in files:
        if not file.is_file():
            raise error("E0606", f"there is no weights file '{file}'", action="check the path")
        try:
            with safe_open(file, framework="pt") as opened:
                where.update(dict.fromkeys(opened.keys(), file))
        except (SafetensorError, OSError) as broken:
            raise error(
                "E0606", f"'{file}' is not a readable safetensors file: {broken}", action="copy it again"
            ) from broken
    if not where:
        raise error(
            "E0606", f"there are no weights in '{place}'", action="give a .safetensors file or a folder of them"
        )

    def weights(name: str, spec: TensorSpec) -> Tensor:
        with safe_open(where[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    return weights


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's elements."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def check_same_weights(
    digests: Mapping[str, int],
    communicator: RankCommunicator,
    axes: tuple[str, ...],
    device: torch.device | str = "cpu",
) -> None:
    """Compare the checksums of whole weights over the ranks that hold the same. Raises MeshwrightError E0607 on every
    such rank. ``axes`` are all axes of the mesh; ranks that differ on ``pipe`` hold different weights.
    """
    axes = tuple(axis for axis in axes if axis != PIPE)
    if not axes or not digests:
        return
    own = torch.tensor([list(digests.values())], dtype=torch.int64, device=device)
    table = communicator.all_gather(own, axes)
    for column, name in enumerate(digests):
        values = table[:, column]
        if bool((values != values[0]).any()):
            index = int((values != values[0]).nonzero()[0])
            mesh = Mesh(communicator.mesh.axes[1:])
            group = mesh.group(communicator.rank, axes)
            raise different_weights(name, group[0], group[index])


def different_weights(name: str, first: int, rank: int) -> MeshwrightError:
    """E0607: a rank has begun with other weights than the first of those that hold them."""
    return error(
        "E0607",
        f"rank {first} and rank {rank} begin with different values of '{name}'",
        action="make the weights from one file or one seed on every rank",
    )


def names_of(parameter: Parameter) -> tuple[str, ...]:
    """All names of a parameter: the canonical one and its aliases."""
    return (parameter.name, *parameter.aliases)
