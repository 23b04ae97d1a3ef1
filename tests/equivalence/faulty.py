"""What a fault is, and the cells of the parity tables that faults are put into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.compiler.graph.pipeline_program import Compiled
from tests.models import Variant
from tests.parity.harness import Cell, Task

DROPPED = Variant(dropout=0.1)
SEQUENCE = Cell(Task("gpt.mw", DROPPED), "fsdp=2,tp=2,sp", 4, 2)
TENSOR = Cell(Task("gpt.mw"), "tp=2", 2)
PADDED = Cell(Task("Llama"), "tp=3", 3)
DATA = Cell(Task("gpt.mw"), "ddp=2", 2)
SHARDED = Cell(Task("Llama"), "fsdp=2,tp=2", 4)
STATE = Cell(Task("gpt.mw"), "zero1=2", 2)
GRADIENTS = Cell(Task("gpt.mw"), "zero2=2", 2, 4)
TIED = Cell(Task("Llama", Variant(tied=True)), "fsdp=2", 2)
AHEAD = Cell(Task("Llama"), "fsdp=2,prefetch=1", 2)
HOST = Cell(Task("gpt.mw"), "fsdp=2,offload", 2)
AGAIN = Cell(Task("gpt.mw", DROPPED), "fsdp=2,recompute", 2, 2)
HYBRID = Cell(Task("GPT-2"), "ddp=2,fsdp=2", 4)
PIPED = Cell(Task("gpt.mw", Variant(layers=3)), "pp=2,ddp=2,schedule=1f1b", 4, 4)
APART = Cell(Task("gpt.mw", Variant(layers=3)), "pp=2,schedule=zb-h1", 2, 4)
TIED_PIPE = Cell(Task("gpt.mw", Variant(layers=3)), "pp=2,schedule=gpipe", 2, 2)
MUON = Cell(Task("Llama", optimizer="Muon"), "fsdp=2", 2)


@dataclass(frozen=True)
class Fault:
    """One fault: its class, what it is put into, and how."""

    name: str
    cell: Cell
    put: Callable[[Compiled], None]

    def __str__(self) -> str:
        return self.name


FAULTS: list[Fault] = []


def fault(name: str, cell: Cell) -> Callable[[Callable[[Compiled], None]], Callable[[Compiled], None]]:
    def add(put: Callable[[Compiled], None]) -> Callable[[Compiled], None]:
        FAULTS.append(Fault(name, cell, put))
        return put

    return add
