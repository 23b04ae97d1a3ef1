"""A step whose stages lie on the ranks of an axis: the schedule says in which order passes run, its simulation when.

All passes of a stage take as long for every microbatch. The step ends when the last rank has updated its weights;
prologue and update are those of the rank that takes longest for them. A prediction tells the times of the busiest rank,
whose waiting for the others is the *bubble*, and the memory of the fullest one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from meshwright.compiler.cluster.collectives import message_cost
from meshwright.compiler.cluster.kernels import peak
from meshwright.compiler.plan import PIPE
from meshwright.compiler.prediction import Flow, Prediction, Span, StagePrediction
from meshwright.compiler.schedules.table import Schedule
from meshwright.compiler.summary import PASSES
from meshwright.compiler.timeline.clock import CONTENTION, LAUNCH, TRANSFER
from meshwright.compiler.timeline.predict import main_dtype
from meshwright.compiler.timeline.rank_memory import RankMemory, actions, stages_by_rank
from meshwright.compiler.timeline.stage import Spent, StageUse
from meshwright.compiler.timeline.staged import Flowing, Staged

BUBBLE = "bubble"


def predict(staged: Staged, flow: Flowing, *, spans: bool = False) -> Prediction:
    """Predict a step of a pipeline under a schedule that was simulated with its costs."""
    summary, cluster = staged.pricers[0].summary, staged.pricers[0].cluster
    uses, schedule, count = staged.uses, flow.schedule, summary.microbatches
    stages_of = stages_by_rank(schedule)
    busy = [_busy(uses, rank, stages_of[rank], count, schedule) for rank in range(schedule.ranks)]
    updates = [sum(uses[s].update.seconds for s in stages) for stages in stages_of]
    prologue = staged.pricers[0].prologue()
    busiest = max(range(schedule.ranks), key=lambda rank: busy[rank])
    spent: defaultdict[tuple[str, str], float] = defaultdict(float)
    for stage, share in _shares(busiest, stages_of[busiest], schedule):
        for passed in uses[stage].passes.values():
            _add(spent, passed.spent, share * count)
        _add(spent, uses[stage].update.spent)
    _add(spent, prologue.spent)
    # the loss, and the norms of the gradients, are told to all stages
    telling = 2 * message_cost(cluster, staged.mesh, (PIPE,), "all-reduce", 8).seconds
    spent["exposed", PIPE] += telling
    spent["communication", PIPE] += telling + 2 * staged.costs.send * count * len(stages_of[busiest])
    waiting = max(0.0, flow.seconds - busy[busiest]) + max(updates) - updates[busiest]
    spent["other", BUBBLE] += waiting
    seconds = prologue.seconds + flow.seconds + max(updates) + telling
    groups: dict[str, dict[str, float]] = {g: {} for g in ("compute", "exposed", "communication", "other")}
    for (group, name), value in spent.items():
        groups[group][name] = value
    ranks = [RankMemory(staged, schedule, rank) for rank in range(schedule.ranks)]
    most = [rank.peak() for rank in ranks]
    fullest = ranks[most.index(max(most))].memory()
    device_memory = max(rank.needed(cluster.device.efficiency) for rank in ranks)
    items = [item for kind in PASSES for item in summary.passes[kind].items]
    able = staged.mesh.ranks * peak(cluster.device, main_dtype(items)) * seconds
    return Prediction(
        seconds=seconds,
        compute=groups["compute"],
        exposed=groups["exposed"],
        communication=groups["communication"],
        other={LAUNCH: 0.0, TRANSFER: 0.0, CONTENTION: 0.0, BUBBLE: 0.0, **groups["other"]},
        memory=fullest,
        device_memory=device_memory,
        fits=device_memory <= cluster.device.memory,
        mfu=summary.model_flops / able if able else 0.0,
        tokens_per_second=summary.tokens / seconds if seconds else 0.0,
        spans=tuple(_spans(flow, prologue.seconds)) if spans else (),
        flow=Flow(
            schedule=schedule.name,
            stages=tuple(_stages(staged, uses, schedule)),
            bubble=waiting / seconds,
            memory=tuple(most),
        ),
    )


def _shares(rank: int, stages: Sequence[int], schedule: Schedule) -> Iterator[tuple[int, float]]:
    """The stages of a rank, each with the share of the microbatches that it computes: where they go in two directions,
    each of two ranks has some of them."""
    directions = len(schedule.placement)
    for stage in stages:
        yield stage, sum(place[stage] == rank for place in schedule.placement) / directions


def _busy(uses: Sequence[StageUse], rank: int, stages: Sequence[int], count: int, schedule: Schedule) -> float:
    return sum(share * count * sum(uses[stage].costs) for stage, share in _shares(rank, stages, schedule))


def _add(spent: defaultdict[tuple[str, str], float], more: Spent, times: float = 1.0) -> None:
    for key, seconds in more.items():
        spent[key] += seconds * times


def _stages(staged: Staged, uses: Sequence[StageUse], schedule: Schedule) -> Iterator[StagePrediction]:
    flights = _in_flight(schedule)
    for stage, (shape, use) in enumerate(zip(staged.shapes, uses, strict=True)):
        rank = schedule.placement[0][stage]
        yield StagePrediction(rank, sum(n for _, n in shape.blocks), *use.costs, flights[stage])


def _in_flight(schedule: Schedule) -> Counter[int]:
    """By stage, the most microbatches that are between their forward pass and the end of their backward pass."""
    most: Counter[int] = Counter()
    for row in schedule.rows:
        now: Counter[int] = Counter()
        for action in actions(row):
            now[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most[action.stage] = max(most[action.stage], now[action.stage])
    return most


def _spans(flow: Flowing, begin: float) -> Iterator[Span]:
    """Every action on its rank."""
    phases = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
    for rank, (row, times) in enumerate(zip(flow.played.rows, flow.run.times, strict=True)):
        for step, (start, end) in zip(row, times, strict=True):
            name = "+".join(map(str, step))
            notes = {"stage": ", ".join(str(a.stage) for a in step)}
            yield Span(f"pipe {rank}", name, begin + start, begin + end, phases[step[0].kind[0]], "", notes)
