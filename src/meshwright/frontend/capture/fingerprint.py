"""A hash of a captured step, by which a plan knows the program that it was made for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from meshwright.compiler.graph.program import Graph, Parameter, StepProgram, TensorSpec
from meshwright.compiler.plan import Hashes


def fingerprint(program: StepProgram) -> str:
    """The first 16 hex digits of a hash of parameters, batch, state and graphs; names of nodes do not count."""
    digest = hashlib.sha256()
    for p in program.parameters:
        digest.update(f"{p.name} {p.spec} {p.trainable} {p.aliases}\n".encode())
    for name, spec in (*program.buffers.items(), *program.batch.items(), *program.state.items()):
        digest.update(f"{name} {spec}\n".encode())
    for name, tensor in program.constants.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for graph in (program.prologue, program.micro, program.update):
        digest.update(_graph(graph).encode())
    return digest.hexdigest()[:16]


def hashes_of(program: StepProgram) -> Hashes:
    """What a plan for a program says that it was made for."""
    return Hashes(program.fingerprint, torch.__version__, outline=outline(program.parameters, program.batch))


def outline(parameters: Iterable[Parameter], batch: Mapping[str, TensorSpec]) -> str:
    """The first 16 hex digits of a hash of parameters and batch alone: what is known of a step of which only the first
    layers were captured."""
    lines = sorted(f"{p.name} {p.spec} {p.trainable} {p.aliases} {p.group}" for p in parameters)
    lines += sorted(f"{name} {spec}" for name, spec in batch.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _graph(graph: Graph) -> str:
    number: dict[fx.Node, int] = {}
    lines = [repr(graph.signature)]
    for node in graph.module.graph.nodes:
        number[node] = len(number)

        def label(n: fx.Node) -> Any:
            return f"%{number[n]}"

        target = "" if node.op == "placeholder" else str(node.target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), label)
        lines.append(f"{node.op} {target} {args} {dict(kwargs)}")
    return "\n".join(lines)
