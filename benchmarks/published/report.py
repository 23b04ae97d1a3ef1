"""The result as a table for people and as JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.published.rows import Skipped
from benchmarks.published.score import (
    Errors,
    Feasibility,
    Scored,
    Sweep,
    by,
    errors,
    feasibility,
    memory_errors,
    spearman,
    sweeps,
)
from benchmarks.published.states import ScoredStates
from meshwright.compiler.cluster.device import Efficiency


def as_json(
    scored: Sequence[Scored],
    held: Sequence[ScoredStates],
    skipped: Sequence[Skipped],
    constants: Mapping[str, Efficiency],
) -> dict[str, Any]:
    """Everything: figures by source and device, sweeps, constants with the rows they were fitted on, and all rows."""
    held_out = [s for s in scored if not s.fitted]
    return {
        "overall": summary(scored),
        "held out": summary(held_out),
        "by source": {source: summary(members) for source, members in by(scored, lambda s: s.row.source).items()},
        "held out by source": {
            source: summary(members) for source, members in by(held_out, lambda s: s.row.source).items()
        },
        "by device": {gpu: summary(members) for gpu, members in by(scored, lambda s: s.row.machine.gpu).items()},
        "model states": [{"id": s.row.id, "bytes": s.row.bytes, "predicted": s.predicted} for s in held],
        "sweeps": [asdict(s) for s in sweeps(scored)],
        "constants": {name: asdict(values) for name, values in constants.items()},
        "fitted on": sorted(s.row.id for s in scored if s.fitted),
        "rows": [_row(s) for s in scored],
        "skipped": [asdict(s) for s in skipped],
    }


def summary(scored: Iterable[Scored]) -> dict[str, Any]:
    """The figures of some rows."""
    members = list(scored)
    time, memory, fits = errors(members), memory_errors(members), feasibility(members)
    groups = sweeps(members)
    rates = [
        (1 / s.row.seconds * s.row.layout.batch * s.row.shape.time / s.row.machine.count,
         1 / s.predicted.seconds * s.row.layout.batch * s.row.shape.time / s.row.machine.count)
        for s in members
        if s.row.seconds
    ]  # fmt: skip
    correlated = [(g.correlation, g.measured) for g in groups if g.correlation is not None]
    total = sum(n for _, n in correlated)
    return {
        "rows": len(members),
        "step time": asdict(time) if time else None,
        "peak memory": asdict(memory) if memory else None,
        "feasibility": {**asdict(fits), "share": fits.right / fits.rows} if fits else None,
        "spearman of rates": spearman(rates),
        "spearman within sweeps": sum(c * n for c, n in correlated) / total if total else None,
        "regret": {
            "sweeps": len(groups),
            "mean": sum(g.regret for g in groups) / len(groups),
            "most": max(g.regret for g in groups),
            "choices that fail": sum(g.picks_failing for g in groups),
        }
        if groups
        else None,
    }


def _row(scored: Scored) -> dict[str, Any]:
    row, predicted = scored.row, scored.predicted
    return {
        "id": row.id,
        "fitted": scored.fitted,
        "measured_s": row.seconds,
        "predicted_s": predicted.seconds,
        "error": scored.error,
        "measured_gib": row.memory,
        "predicted_gib": predicted.memory / 2**30,
        "fits": row.fits,
        "predicted_fits": predicted.fits,
    }


def as_text(
    scored: Sequence[Scored],
    held: Sequence[ScoredStates],
    skipped: Sequence[Skipped],
    constants: Mapping[str, Efficiency],
) -> Iterator[str]:
    """The lines of the report."""
    yield _HEAD
    yield _line("all rows", scored)
    yield _line("  not fitted on", [s for s in scored if not s.fitted])
    for source, members in by(scored, lambda s: s.row.source).items():
        yield _line(source, members)
        yield _line("  not fitted on", [s for s in members if not s.fitted])
    yield ""
    yield "Sweeps (rows that differ in their plan alone)"
    yield f"{'':70} rows failed  Spearman  regret"
    for one in sweeps(scored):
        yield _sweep(one)
    yield ""
    if memory := memory_errors(scored):
        yield f"Peak memory: {memory.rows} rows, median error {memory.median:.1%}, 90th {memory.ninetieth:.1%}"
    if held:
        worst = max(abs(s.error) for s in held)
        yield f"Memory of model states by a formula: {len(held)} rows, largest error {worst:.2%}"
    yield ""
    yield "Constants by device, fitted on half of the rows (listed by --json)"
    for name, values in constants.items():
        yield f"  {name}: " + ", ".join(f"{k} {_short(v)}" for k, v in asdict(values).items())
    yield ""
    yield f"Skipped: {len(skipped)} rows"
    for (source, reason), count in Counter((s.source, s.reason) for s in skipped).most_common():
        yield f"  {count:4}  {source[:40]:40}  {reason}"


_HEAD = f"{'':48} step time: rows median   90th   bias | memory rows: right  wrongly fits/fails | Spearman regret"


def _line(name: str, members: Sequence[Scored]) -> str:
    found = summary(members)
    groups = sweeps(members)
    return f"{name[:48]:48}{_errors(errors(members))} |{_fits(feasibility(members))} | {_sweeps(found, groups)}"


def _errors(found: Errors | None) -> str:
    if found is None:
        return f"{'':16}{'-':>5}{'-':>8}{'-':>7}{'-':>7}"
    return f"{'':11}{found.rows:5}{found.median:8.1%}{found.ninetieth:7.1%}{found.bias:+7.1%}"


def _fits(found: Feasibility | None) -> str:
    if found is None:
        return f"{'-':>12}"
    return f"{found.rows:12}: {found.right / found.rows:6.1%} {found.wrongly_fits:11}/{found.wrongly_fails}"


def _sweeps(found: Mapping[str, Any], groups: Sequence[Sweep]) -> str:
    correlation = found["spearman within sweeps"]
    if not groups:
        return ""
    return f"{'-' if correlation is None else format(correlation, '8.2f')} {found['regret']['mean']:6.1%}"


def _sweep(one: Sweep) -> str:
    correlation = "-" if one.correlation is None else f"{one.correlation:.2f}"
    failing = "  chooses one that fails" if one.picks_failing else ""
    return f"{one.name[:70]:70} {one.measured:4} {one.failed:6} {correlation:>9} {one.regret:7.1%}{failing}"


def _short(value: float) -> str:
    return f"{value:.4g}"
