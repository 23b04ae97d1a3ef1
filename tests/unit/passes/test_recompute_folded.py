"""A folded step is recomputed as the whole one: the summary of two blocks stands for that of all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.compiler.analysis.blocks import fold
from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.memory import memory
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.passes.treated import one_by_one, present, treatments
from meshwright.compiler.plan import Recompute
from tests.unit.passes.stack import step

ENTRIES = (
    (Recompute("blocks.*"),),
    (Recompute("blocks.*", "matmuls"),),
    (Recompute("blocks.*", every=2),),
    (Recompute("blocks.*.mlp"),),
    (Recompute("blocks.0", "all"), Recompute("blocks.*")),
)


@pytest.mark.parametrize("entries", ENTRIES, ids=lambda e: ",".join(f"{r.pattern}:{r.save}/{r.every}" for r in e))
def test_the_memory_of_the_folded_step(entries: tuple[Recompute, ...]) -> None:
    program = step(7)
    plan = replace(preset("fsdp=2", program, 2), recompute=entries)
    folded = fold(program, treatments(program.micro, entries))
    assert len(folded.program.parameters) <= len(program.parameters)
    fewer = replace(plan, recompute=present(folded.program.micro, one_by_one(program.micro, entries)))
    short = summarize(compile_step(folded.program, fewer), folded.repeats)
    whole = memory(summarize(compile_step(program, plan))).peak
    # the last of seven blocks is one that recomputes; in the folded step the last is of the other kind
    tolerance = 0.02 if all(entry.every == 1 for entry in entries) else 0.1
    assert memory(short).peak == pytest.approx(whole, rel=tolerance)
