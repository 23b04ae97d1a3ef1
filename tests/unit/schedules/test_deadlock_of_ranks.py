"""Whole programs of ranks, with every collective and message of a step: right ones pass and run, broken ones are told,
and to look at equal ranks once changes nothing."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from meshwright.compiler.analysis.rank_instructions import rank_instructions
from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.passes.verify_end import verify_end
from meshwright.compiler.schedules.deadlock import check, check_ranks
from meshwright.compiler.schedules.instructions import Collective, Compute, Exchange, Program, Transfer, Wait
from meshwright.compiler.schedules.symmetry import RankPrograms, represented
from tests.parity.harness import captured
from tests.unit.schedules.executor import Executor
from tests.unit.schedules.mutations import MUTATIONS, swap
from tests.unit.schedules.whole import CASES, Case, compiled, everyone_of, programs_of


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if place % 2 else ()) for place, c in enumerate(CASES)], ids=str
)
def test_compiled_programs_come_to_an_end(case: Case) -> None:
    everyone = everyone_of(case)
    assert check(everyone) == check_ranks(programs_of(case)) == []
    assert represented(compiled(case).mesh, everyone) == programs_of(case)
    assert check_ranks(rank_instructions(compiled(case), finite=False)) == []


def test_what_passes_never_hangs() -> None:
    choose = random.Random(3)
    for seed in range(300):
        case = choose.choice(CASES)
        capacity, serial, lazy = choose.choice((0, 0, 1, 3)), choose.random() < 0.7, choose.random() < 0.7
        assert Executor(everyone_of(case), seed, capacity, serial, lazy).run(), case


def runs(programs: tuple[Program, ...], seed: int) -> bool:
    """Whether programs come to an end in the strictest execution."""
    return Executor(programs, seed).run()


def test_a_thousand_mutations_are_all_told() -> None:
    """Two communications in the other order may do no harm: then nothing is told, and the programs run."""
    choose = random.Random(7)
    told: Counter[str] = Counter()
    harmless = 0
    while told.total() < 1000:
        everyone = list(everyone_of(choose.choice(CASES)))
        rank = choose.randrange(len(everyone))
        program = list(everyone[rank])
        mutation = choose.choice(MUTATIONS)
        if not mutation(program, choose):
            continue
        everyone[rank] = tuple(program)
        faults = check(everyone)
        if faults:
            told[faults[0].kind] += 1
        else:
            harmless += 1
            assert mutation is swap
            assert runs(tuple(everyone), harmless)
        if faults and faults[0].kind == "deadlock":
            assert not runs(tuple(everyone), told["deadlock"])
    assert min(told[kind] for kind in ("unready", "unwaited", "unmatched")) > 50
    assert harmless < 10


def reordered(programs: list[Program], choose: random.Random) -> tuple[Program, ...]:
    """A communication or a wait of one rank somewhere else, not far away."""
    rank = choose.randrange(len(programs))
    program = list(programs[rank])
    at = choose.choice([i for i, one in enumerate(program) if not isinstance(one, Compute)])
    program.insert(min(max(at + choose.choice((-1, 1)) * choose.randint(1, 6), 0), len(program) - 2), program.pop(at))
    programs[rank] = tuple(program)
    return tuple(programs)


def test_a_deadlock_is_told_where_there_is_one_and_nowhere_else() -> None:
    """Programs that differ from right ones in the order of what they do: some come to an end, others do not."""
    choose = random.Random(5)
    stuck: Counter[bool] = Counter()
    while min(stuck[True], stuck[False]) < 20:
        programs = reordered(list(everyone_of(choose.choice(CASES))), choose)
        kinds = {fault.kind for fault in check(programs)}
        if kinds <= {"deadlock"}:
            stuck[bool(kinds)] += 1
            assert runs(programs, stuck.total()) == (not kinds)


def mutated(case: Case, choose: random.Random) -> tuple[tuple[Program, ...], object]:
    """The programs of all ranks, those of one, of one coordinate of an axis, or of all that are alike changed in one
    way; and the way."""
    mesh, everyone = compiled(case).mesh, list(everyone_of(case))
    seed = choose.random()
    chosen = mesh.coordinates(choose.randrange(mesh.ranks))
    fixed = choose.sample(mesh.names, choose.randint(0, len(mesh.names)))
    mutation = choose.choice(MUTATIONS)
    for rank in range(mesh.ranks):
        if all(mesh.coordinates(rank)[axis] == chosen[axis] for axis in fixed):
            program = list(everyone[rank])
            mutation(program, random.Random(seed))
            everyone[rank] = tuple(program)
    return tuple(everyone), mutation


def test_equal_ranks_are_looked_at_once_and_nothing_is_missed() -> None:
    choose = random.Random(11)
    apart: Counter[int] = Counter()
    for _ in range(300):
        case = choose.choice(CASES)
        everyone, mutation = mutated(case, choose)
        found = represented(compiled(case).mesh, everyone)
        assert found.everyone() == everyone
        apart[len(found.apart)] += 1
        kinds, few = ({fault.kind for fault in faults} for faults in (check(everyone), check_ranks(found)))
        assert kinds == few, (case, mutation)
    assert len(apart) == 4


def test_sixteen_thousand_ranks() -> None:
    case = CASES[0]
    programs = programs_of(case)
    mesh = Mesh((("pipe", 2), ("data", 1024), ("tensor", 8)))
    assert mesh.ranks == 16384
    large = RankPrograms(mesh, programs.apart, programs.programs)
    assert check_ranks(large) == []
    broken = list(programs.programs[1])
    broken = [i for i in broken if not (isinstance(i, Collective) and i.value.startswith("norm"))]
    faults = check_ranks(replace(large, programs=(programs.programs[0], tuple(broken))))
    assert any(fault.rank == 8192 and "never" not in fault.message for fault in faults)


def test_a_cycle_is_told_with_the_ranks_of_the_mesh() -> None:
    """Stages that reduce over each other's groups in another order than they send."""
    mesh = Mesh((("pipe", 2), ("data", 4)))

    def program(own: int, *order: str) -> Program:
        instructions = {
            "total": Collective((0, 1), "all_reduce(sum) f32 1", "total", ("pipe",)),
            "message": Exchange((Transfer(own == 0, 1 - own, "0F0", 64),)),
        }
        made = Compute("0F0", (), ("total",) if own else ("0F0", "total"))
        waits = {"total": Wait("total"), "message": Wait("0F0")}
        return (made, *(i for name in order for i in (instructions[name], waits[name])))

    right = RankPrograms(mesh, ("pipe",), (program(0, "total", "message"), program(1, "total", "message")))
    assert check_ranks(right) == check(right.everyone()) == []
    wrong = replace(right, programs=(right.programs[0], program(1, "message", "total")))
    (fault,) = check_ranks(wrong)
    assert fault.kind == "deadlock"
    assert fault.message == (
        "rank 0, at instruction 1 (all_reduce(sum) f32 1 of total over (pipe)), the first use of its group, waits for "
        "rank 4; rank 4, at instruction 1 (receive 0F0[64] < 0), the first use of its group, waits for rank 0"
    )


def test_compiling_refuses_ranks_that_would_wait_for_one_another() -> None:
    case = CASES[0]
    pipeline = compiled(case)
    assert isinstance(pipeline, PipelineProgram)
    verify_end(pipeline)
    first, second = (list(program) for program in pipeline.programs)
    places = [i for i, one in enumerate(first) if isinstance(one, Exchange)]
    # what the first rank sends at first, it sends after it has waited for what the second makes of it
    first.insert(places[-1], first.pop(places[0]))
    with pytest.raises(MeshwrightError, match=r"E0507.*would not come to an end: rank 0") as caught:
        verify_end(replace(pipeline, programs=(tuple(first), tuple(second))))
    (diagnostic,) = caught.value.diagnostics
    assert "what is said of a rank holds for all that differ from it along data or tensor alone" in diagnostic.notes


def test_a_table_that_was_written_by_hand_is_told_by_its_circle() -> None:
    program = captured(CASES[0].task)
    plan = preset("pp=2,micro=2", program)
    assert plan.pipeline is not None
    table = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert compile_plan(program, replace(plan, pipeline=replace(plan.pipeline, table=table)), verify=False)
    table = "0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1"
    with pytest.raises(MeshwrightError, match=r"E0507.*rank 0: 0B0 waits for 1I0; rank 1: 1F1 waits for 0F1"):
        compile_plan(program, replace(plan, pipeline=replace(plan.pipeline, table=table)))
