"""From a source and a cluster to a plan: load, capture, fold, search, explain. What ``meshwright plan`` does.

What is priced is what would run: every candidate becomes a plan, the plan a program, and the program is simulated.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwright.arguments import checked_precision
from meshwright.compiler import collector
from meshwright.compiler.analysis.blocks import Folded, Unknown, fold
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.cluster.kernels import rated
from meshwright.compiler.cluster.presets import LOCAL
from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, error
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.declared import meaning_of
from meshwright.compiler.passes.facts import program_facts
from meshwright.compiler.passes.master_weights import as_policy
from meshwright.compiler.passes.realise import Realiser
from meshwright.compiler.passes.separability import check_fits, couplings
from meshwright.compiler.passes.separability.findings import called
from meshwright.compiler.plan import Declaration, Numerics, Plan, Precision
from meshwright.compiler.prediction import Execution, Prediction
from meshwright.compiler.prediction_text import predicted_of
from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.search.explain import reasons
from meshwright.compiler.search.facts import ProgramFacts
from meshwright.compiler.search.infeasible import infeasible
from meshwright.compiler.search.limits import Limits, reserve_bytes, token_count
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.search.prices import Priced
from meshwright.compiler.search.search import search
from meshwright.compiler.search.state import Search
from meshwright.compiler.search.why_not import WhyNot, why_not
from meshwright.compiler.separability_text import Separability, declarations
from meshwright.frontend.capture.fingerprint import outline
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
        """Plan again under the pin ``text`` (``tp=8``), and tell the difference by cause, or why no plan keeps to it.
        Raises MeshwrightError for a pin that cannot be read."""
        return why_not(self.search, parse_pins([text]))


def plan(
    source: str,
    cluster: str | Path | Cluster,
    *,
    ranks: int | None = None,
    pins: str | Iterable[str] = (),
    batch: int | None = None,
    tokens: int | str | None = None,
    reserve: int | str = 0,
    budget: int = 24,
    overrides: Mapping[str, float] | None = None,
    precision: Precision | str | None = None,
    execution: Execution | None = None,
    separability: Separability | None = None,
) -> Planned:
    """Choose a plan for a ``.mw`` file or a factory (``package.module:factory``) on a cluster.

    ``cluster`` is a preset (``h100x64``), the path of a cluster file, or a Cluster; ``ranks`` says how many of its
    devices are used (default: all). ``pins`` fix a part of the plan (``tp=8``, ``fsdp``, ``micro=4``, ``no offload``).
    ``batch`` or ``tokens`` (a number, or ``16M`` in powers of 1,024) replace the global batch of the source;
    ``reserve`` of every device stays free (bytes, or ``4GiB``, ``5%``). ``overrides`` replace sizes and settings by
    name, ``precision`` (``"bf16"``, say) that of the source. ``separability`` declares what couplings of samples mean
    in microbatches (see :func:`meshwright.parallelize`). At most ``budget`` candidates are compiled and simulated.
    Raises MeshwrightError for what cannot be read or captured, for limits that contradict (E043x), and if nothing
    fits (E0440).
    """
    where = cluster_of(cluster, ranks)
    # told before anything is captured
    given = parse_pins([pins] if isinstance(pins, str) and pins else list(pins))
    free = reserve_bytes(reserve, where.device.memory)
    size = None if tokens is None else token_count(tokens)
    began = time.perf_counter()
    loaded = _sized(source_without_weights(source, overrides), batch, size)
    loaded.precision = checked_precision(precision) or loaded.precision
    declared = declarations(separability) or given.separability or loaded.separability
    given = replace(given, separability=declared or None)
    limits = Limits(free, section_pins(loaded).joined(given), budget)
    folded = loaded.capture_folded()
    captured = time.perf_counter() - began
    try:
        found = plan_folded(folded, where, ranks=ranks, limits=limits, precision=loaded.precision, execution=execution)
    except Unknown:  # some plan treats a layer that was not captured as none that was
        found = plan_program(
            loaded.capture(), where, ranks=ranks, limits=limits, precision=loaded.precision, execution=execution
        )
    return replace(found, seconds={"capture": captured, **found.seconds}, warnings=(*loaded.warnings, *found.warnings))


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
    began = time.perf_counter()
    folded = fold(program)
    middle = time.perf_counter()
    found = plan_folded(folded, cluster, ranks=ranks, limits=limits, precision=precision, execution=execution)
    return replace(found, seconds={"fold": middle - began, **found.seconds})


@collector.rarely()
def plan_folded(
    folded: Folded,
    cluster: Cluster,
    *,
    ranks: int | None = None,
    limits: Limits | None = None,
    precision: Precision | None = None,
    execution: Execution | None = None,
) -> Planned:
    """Choose a plan for the step that was folded. Raises :class:`Unknown` if it was captured by its first layers, and
    what the others do under some plan cannot be told from them."""
    precision = precision or Precision()
    count = cluster.ranks if ranks is None else ranks
    began = time.perf_counter()
    limits = limits or Limits()
    source = folded.source or folded.program
    if not folded.absent:  # else modules may be named that were left out of the step
        check_fits(source, limits.pins.separability or ())
    folded = _as_policy(folded, limits.pins.numerics)
    facts = _coupled(program_facts(folded, precision), folded.program, limits.pins.separability or ())
    pricer = Pricer(folded, precision, cluster, execution or Execution(), limits.pins, limits.reserve)
    found = search(facts, cluster, count, limits, pricer)
    told_of = [*_slow(facts.dtype, cluster), *pricer.told]
    if found.best is None:
        fault = infeasible(found).diagnostics[0]
        raise MeshwrightError(replace(fault, notes=(*fault.notes, *(d.message for d in told_of))))
    best = found.best
    told = tuple(reasons(found))
    pipeline = pricer.pipelined(best.candidate).pipeline if best.candidate.pipe > 1 else None
    realiser = Realiser(source, precision, facts.blocks, folded.names(), limits.pins)
    made = realiser.plan(best.candidate, pipeline, pricer.recomputed(best.candidate))
    hashes = replace(made.hashes, cluster=cluster_hash(cluster))
    if folded.absent:
        hashes = replace(hashes, model="", outline=outline(folded.parameters(), source.batch))
    made = replace(
        made,
        hashes=hashes,
        predicted=predicted_of(best.prediction, cluster.name),
        reasons=told,
    )
    end = time.perf_counter()
    others = [p for p in found.fitting() if p is not best]
    others += sorted((p for p in found.priced if not found.fits(p)), key=lambda p: p.memory)
    seconds = {"search": end - began}
    return Planned(
        made, best.prediction, best.candidate, told, tuple(others), cluster, found, seconds, warnings=tuple(told_of)
    )


def _as_policy(folded: Folded, numerics: Numerics | None) -> Folded:
    """What is priced, with the master weights that a pinned policy keeps; the plan is of the step as it was given."""
    source = None if folded.source is None else as_policy(folded.source, numerics)
    return replace(folded, program=as_policy(folded.program, numerics), source=source)


def _coupled(facts: ProgramFacts, program: StepProgram, declared: Sequence[Declaration]) -> ProgramFacts:
    """The facts with what couples the samples of the step."""
    undeclared, meets = [], []
    for coupling in couplings(program):
        meaning = meaning_of(declared, coupling.names)
        name = f"{called(coupling)} ({coupling.kind})"
        if meaning is None:
            undeclared.append(name)
        elif meaning == "global":
            meets.append(name)
    return replace(facts, coupled=tuple(dict.fromkeys(undeclared)), meets=tuple(dict.fromkeys(meets)))


def _slow(dtype: str, cluster: Cluster) -> Iterator[Diagnostic]:
    """That a device does not compute in a dtype at speed."""
    device = cluster.device
    if dtype not in device.flops:
        fast = [word for word, name in (("bf16", "bf16"), ("fp16", "f16")) if name in device.flops]
        action = f"compute in {fast[0]}" if fast else "take a device that has a rate for it"
        message = f"a {device.name} has no rate for {dtype}: it is priced at that of {rated(device, dtype)}"
        yield Diagnostic("W0431", message, action=action)


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
