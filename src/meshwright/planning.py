"""From a source and a cluster to a plan: load, capture, fold, search, explain. What ``meshwright plan`` does.

What is priced is what would run: every candidate becomes a plan, the plan a program, and the program is simulated.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwright.compiler.analysis.blocks import fold
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.cluster.presets import LOCAL
from meshwright.compiler.diagnostics import Diagnostic, error
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.facts import program_facts
from meshwright.compiler.passes.realise import Realiser
from meshwright.compiler.plan import Plan, Precision
from meshwright.compiler.prediction import Execution, Prediction
from meshwright.compiler.prediction_text import predicted_of
from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.search.explain import reasons
from meshwright.compiler.search.infeasible import infeasible
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.search.prices import Priced
from meshwright.compiler.search.search import Search, search
from meshwright.compiler.search.why_not import WhyNot, why_not
from meshwright.frontend.pins import section_pins
from meshwright.frontend.source import Source, source_without_weights
from meshwright.frontend.widen import samples_of, widened
from meshwright.prediction_of import predict_step
from meshwright.pricing import Pricer

AUTO = "auto"
"""The word that asks for the planner's choice, where a plan is given by name."""


@dataclass(frozen=True)
class Planned:
    """A plan, what is predicted of it, and why it was chosen."""

    plan: Plan
    """With the prediction and the reasons, for its file."""
    prediction: Prediction
    candidate: Candidate
    reasons: tuple[str, ...]
    alternatives: tuple[Priced, ...]
    """The other candidates that were priced: those that fit, the fastest first, then those that do not."""
    cluster: Cluster
    search: Search = field(repr=False)
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long ``capture``, ``fold`` and ``search`` took."""
    warnings: tuple[Diagnostic, ...] = ()

    def why_not(self, text: str) -> WhyNot:
        """Plan again under the pin ``text`` (``tp=8``), and tell the difference by cause. Raises MeshwrightError for
        a pin that cannot be read or kept."""
        return why_not(self.search, parse_pins([text]))


def plan(
    source: str,
    cluster: str | Path | Cluster,
    *,
    ranks: int | None = None,
    pins: str | Iterable[str] = (),
    batch: int | None = None,
    tokens: int | None = None,
    reserve: int = 0,
    budget: int = 24,
    overrides: Mapping[str, float] | None = None,
    execution: Execution | None = None,
) -> Planned:
    """Choose a plan for a ``.mw`` file or a factory (``package.module:factory``) on a cluster.

    ``cluster`` is a preset (``h100x64``), the path of a cluster file, or a Cluster; ``ranks`` says how many of its
    devices are used (default: all). ``pins`` fix a part of the plan (``tp=8``, ``fsdp``, ``micro=4``, ``no offload``).
    ``batch`` or ``tokens`` replace the global batch of the source, ``reserve`` bytes of every device stay free.
    ``overrides`` replace sizes and settings by name. At most ``budget`` candidates are compiled and simulated.
    Raises MeshwrightError for what cannot be read or captured, for limits that contradict (E043x), and if nothing
    fits (E0440).
    """
    where = cluster_of(cluster, ranks)
    given = parse_pins([pins] if isinstance(pins, str) and pins else list(pins))  # told before anything is captured
    began = time.perf_counter()
    loaded = _sized(source_without_weights(source, overrides), batch, tokens)
    limits = Limits(reserve, section_pins(loaded).joined(given), budget)
    program = loaded.capture()
    captured = time.perf_counter() - began
    found = plan_program(program, where, ranks=ranks, limits=limits, precision=loaded.precision, execution=execution)
    return replace(found, seconds={"capture": captured, **found.seconds}, warnings=loaded.warnings)


def plan_program(
    program: StepProgram,
    cluster: Cluster,
    *,
    ranks: int | None = None,
    limits: Limits | None = None,
    precision: Precision | None = None,
    execution: Execution | None = None,
) -> Planned:
    """Choose a plan for a step that has been captured. ``precision`` is what it was captured in."""
    precision = precision or Precision()
    count = cluster.ranks if ranks is None else ranks
    began = time.perf_counter()
    folded = fold(program)
    facts = program_facts(folded, program, precision)
    middle = time.perf_counter()
    pricer = Pricer(program, folded, precision, cluster, execution or Execution())
    found = search(facts, cluster, count, limits or Limits(), pricer)
    if found.best is None:
        raise infeasible(found)
    best = found.best
    told = tuple(reasons(found))
    made = Realiser(program, precision, facts.blocks).plan(best.candidate)
    made = replace(
        made,
        hashes=replace(made.hashes, cluster=cluster_hash(cluster)),
        predicted=predicted_of(best.prediction, cluster.name),
        reasons=told,
    )
    end = time.perf_counter()
    others = [p for p in found.fitting() if p is not best]
    others += sorted((p for p in found.priced if not found.fits(p)), key=lambda p: p.memory)
    seconds = {"fold": middle - began, "search": end - middle}
    return Planned(made, best.prediction, best.candidate, told, tuple(others), cluster, found, seconds)


def rank_plans(
    program: StepProgram, cluster: Cluster, plans: Sequence[Plan], execution: Execution | None = None
) -> list[tuple[Plan, Prediction]]:
    """Given plans with their predictions, the best first: those that fit by time, then the others by memory."""
    priced = [(one, predict_step(program, one, cluster, execution=execution)) for one in plans]
    return sorted(priced, key=lambda p: (not p[1].fits, p[1].seconds if p[1].fits else p[1].device_memory))


def cluster_hash(cluster: Cluster) -> str:
    """The first 16 hex digits of a hash of all that a cluster says."""
    return hashlib.sha256(repr(cluster).encode()).hexdigest()[:16]


def cluster_of(cluster: str | Path | Cluster, ranks: int | None = None) -> Cluster:
    """A cluster by name, from a file, or as given. ``local`` has as many ranks as are asked for; of any other cluster
    some may be used."""
    if isinstance(cluster, Cluster):
        return cluster
    return read_cluster(cluster, ranks if str(cluster).strip().lower() == LOCAL else None)


def _sized(source: Source, batch: int | None, tokens: int | None) -> Source:
    """The source with the global batch that is asked for. Raises MeshwrightError E0442."""
    if batch is not None and tokens is not None:
        raise error("E0442", "both a number of samples and a number of tokens are given", action="give one of the two")
    if tokens is not None:
        batch = samples_of(source, tokens)
    return source if batch is None else widened(source, batch)
