"""Why this plan: the chain that an expert would argue, in numbers of the candidates that were priced.

Each step of the chain is one sentence about one family of plans: what it needs, what it costs, and whether that settles
the matter or forces the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from meshwright.compiler.search.bounds import least_bytes, least_memory, least_seconds
from meshwright.compiler.search.candidate import DATA, REPLICA, TENSOR, Candidate
from meshwright.compiler.search.candidates import shapes
from meshwright.compiler.search.differences import differences
from meshwright.compiler.search.explain_pipelines import pipelines
from meshwright.compiler.search.facts import ProgramFacts
from meshwright.compiler.search.prices import Priced
from meshwright.compiler.search.sensitivity import sensitivity
from meshwright.compiler.search.state import Search, family
from meshwright.compiler.search.telling import count, described, memory, percent, seconds


def reasons(found: Search) -> list[str]:
    """The chain of a search that found a plan."""
    best = found.best
    if best is None:
        return []
    chain = [_one_device(found)]
    if found.ranks > 1:
        chain += [_plain(found), *_partly(found), *_full(found), *_batch(found), *_copies(found), *_tensor(found)]
        chain += pipelines(found)
    chain += [
        *_memory_savers(found, best),
        _coupled(found.facts, found.best.candidate if found.best is not None else None),
        _uneven(best, found.facts),
        _pinned(found),
        _choice(found, best),
        *_runner_up(found, best),
    ]
    return [sentence for sentence in (*chain, *sensitivity(found, best)) if sentence]


def runner_up(found: Search) -> Priced | None:
    """The fastest of another family; if there is none, the fastest with another mesh, else the next one."""
    best = found.best
    others = [p for p in found.fitting() if p is not best] if best else []
    tests: list[Callable[[Priced], bool]] = [
        lambda p: best is not None and family(p.candidate) != family(best.candidate),
        lambda p: best is not None and p.candidate.axes != best.candidate.axes,
        lambda p: True,
    ]
    return next((p for test in tests for p in others if test(p)), None)


def _coupled(facts: ProgramFacts, best: Candidate | None) -> str:
    """Why the batch is not cut into microbatches, or where they meet."""
    if facts.coupled:
        return (
            f"The batch is not cut into microbatches: samples couple in {', '.join(facts.coupled)}, and nothing is "
            "declared of what that means there."
        )
    if facts.meets:
        several = best is not None and best.microbatches > 1
        forward = (
            ": all of them go forward before one goes back" if several and best is not None and best.pipe > 1 else ""
        )
        meet = "meet" if several else "would meet"
        return f"Microbatches {meet} in {', '.join(facts.meets)}, which is declared global{forward}."
    return ""


def _one_device(found: Search) -> str:
    facts, device = found.facts, found.cluster.device
    parts = least_memory(Candidate(()), facts)
    kinds = ", ".join(f"{memory(size)} {kind}" for kind, size in parts.items() if size)
    enough = "more than" if facts.model_state > found.capacity else "of"
    least = least_seconds(Candidate(()), facts, device)
    return (
        f"One device: {count(facts.parameters)} parameters need {memory(facts.model_state)} before any activation "
        f"({kinds}), {enough} the {_capacity(found)} of one {device.name}; a step of {facts.batch} samples "
        f"takes {seconds(least)} at its peak rate at least."
    )


def _capacity(found: Search) -> str:
    reserve = f" ({memory(found.limits.reserve)} of it reserved)" if found.limits.reserve else ""
    return f"{memory(found.cluster.device.memory)}{reserve}"


def _plain(found: Search) -> str:
    return _family(found, "Plain data parallelism", lambda c: c.storage == 0 and c.size(TENSOR) == 1 and c.pipe == 1, 0)


def _partly(found: Search) -> Iterable[str]:
    """ZeRO-1 and ZeRO-2, where plain data parallelism did not fit or they were priced."""
    for level, kept in ((1, "optimizer state"), (2, "optimizer state and gradients")):
        test = _is(level, copies=False)
        if _of(found, test) or not _fits_somewhere(found, _is(0, copies=True)):
            yield _family(found, f"ZeRO-{level} ({kept} in shards)", test, level)


def _full(found: Search) -> Iterable[str]:
    yield _family(found, "Full sharding", _is(3, copies=False), 3)


def _is(level: int, *, copies: bool) -> Callable[[Candidate], bool]:
    def test(one: Candidate) -> bool:
        alone = one.size(TENSOR) == 1 and one.pipe == 1
        return one.storage == level and alone and (copies or one.size(REPLICA) == 1)

    return test


def _of(found: Search, test: Callable[[Candidate], bool]) -> list[Priced]:
    """The priced ones of a family: those that fit by time, then the others by memory."""
    members = [p for p in found.priced if test(p.candidate)]
    return sorted(members, key=lambda p: (not found.fits(p), p.seconds if found.fits(p) else p.memory))


def _fits_somewhere(found: Search, test: Callable[[Candidate], bool]) -> bool:
    return any(found.fits(p) for p in _of(found, test))


def _family(found: Search, name: str, test: Callable[[Candidate], bool], level: int) -> str:
    """One sentence on a family: its best priced member, or why none was worth pricing."""
    members = _of(found, test)
    if members:
        return f"{name}: {_verdict(found, members[0])}"
    legal = [Candidate(a, s) for a, s in shapes(found.facts, found.cluster, found.ranks, found.limits.pins)]
    legal = [one for one in legal if test(one) and one.storage == level]
    if not legal:
        return ""
    one = min(legal, key=lambda c: least_bytes(c, found.facts))
    least = least_bytes(one, found.facts)
    if least > found.capacity - found.cluster.device.efficiency.reserve:
        return f"{name} fails: {memory(least)} of model state on every device, which has {_capacity(found)}."
    if found.facts.batch < one.batch_ranks:
        return (
            f"{name} over all {found.ranks} ranks is ruled out by the batch: {found.facts.batch} samples "
            f"for {one.batch_ranks} data ranks ({memory(least)} of model state on each would fit)."
        )
    return ""


def _verdict(found: Search, one: Priced) -> str:
    """What the best member needs and takes."""
    what = _settings(one.candidate)
    if not found.fits(one):
        kinds = sorted(one.prediction.memory.by_kind.items(), key=lambda item: -item[1])[:3]
        largest = ", ".join(f"{memory(size)} {kind}" for kind, size in kinds)
        over = memory(one.memory - found.capacity)
        return f"needs {memory(one.memory)}{what}, {over} too much ({largest})."
    return f"fits with {memory(one.memory)}{what}: {seconds(one.seconds)} a step. {_communication(one)}"


def _settings(one: Candidate) -> str:
    words = [f"{one.microbatches} microbatches"] if one.microbatches > 1 else []
    words += [f"{one.recompute} recomputation"] if one.save != "all" else []
    words += ["offload"] if one.offload else []
    return f" ({', '.join(words)})" if words else ""


def _communication(one: Priced) -> str:
    """Whether the messages hide behind the computation."""
    found = one.prediction
    busy = sum(found.communication.values())
    if not busy:
        return "Nothing is sent."
    compute = sum(found.compute.values())
    exposed = sum(found.exposed.values())
    little = exposed <= 0.02 * found.seconds
    if exposed <= 0.2 * busy:
        hides = "they hide"
    elif exposed <= 0.7 * busy:
        hides = "they hide in part"
    else:
        hides = "they do not hide, but are short" if little else "they do not hide"
    what = "Its gathers and reductions" if one.candidate.storage == 3 else "Its messages"
    return (
        f"{what} take {seconds(busy)} on the links beside {seconds(compute)} of computation: {hides} "
        f"({seconds(exposed)} exposed)."
    )


def _batch(found: Search) -> Iterable[str]:
    """What the batch leaves to each rank, where that is little."""
    facts = found.facts
    each = facts.batch / found.ranks
    if each < 1:
        yield (
            f"The batch limit: {facts.batch} samples over {found.ranks} ranks leave less than one for each, so data "
            f"parallelism alone uses at most {facts.batch} ranks; the others must share a sample."
        )
    elif each <= 2 and facts.cuts and not _fits_somewhere(found, _is(0, copies=True)):
        tokens = f" ({facts.tokens // found.ranks:,} tokens)" if facts.tokens else ""
        yield (
            f"The batch limit: {facts.batch} samples over {found.ranks} ranks leave {each:g} for each{tokens}: that is "
            "all the computation that communication can hide behind."
        )


def _uneven(best: Priced, facts: ProgramFacts) -> str:
    """That ranks compute padding, as the batch does not fill them."""
    one = best.candidate
    ranks = one.batch_ranks * one.microbatches
    rows = -(-facts.batch // ranks)
    if rows * ranks == facts.batch:
        return ""
    times = f" {one.microbatches} microbatches on" if one.microbatches > 1 else ""
    wasted = rows * ranks / facts.batch - 1
    text = f"{facts.batch} samples do not fill{times} {one.batch_ranks} data ranks evenly"
    return f"{text}: {percent(wasted)} of the work is padding."


def _copies(found: Search) -> Iterable[str]:
    """Sharding inside a unit and copies across: where it was priced."""
    hybrid = _of(found, lambda c: c.storage > 0 and c.size(REPLICA) > 1 and c.size(TENSOR) == 1 and c.pipe == 1)
    if hybrid:
        one = hybrid[0]
        data, copies = one.candidate.size(DATA), one.candidate.size(REPLICA)
        yield f"Sharding over {data} ranks with {copies} copies: {_verdict(found, one)}"


def _tensor(found: Search) -> Iterable[str]:
    members = _of(found, lambda c: c.size(TENSOR) > 1 and c.pipe == 1)
    if not members:
        return
    one = members[0]
    degree = one.candidate.size(TENSOR)
    text = f"Tensor parallelism over {degree} ({_tier(found, one.candidate)}): {_verdict(found, one)}"
    without = next(iter(_of(found, lambda c: c.size(TENSOR) == 1 and c.pipe == 1)), None)
    if found.fits(one) and without is not None and found.fits(without):
        more = one.seconds / without.seconds - 1
        relation = f"{percent(more)} slower" if more > 0 else f"{percent(-more)} faster"
        text += f" That is {relation} than the best without it."
    elif found.fits(one):
        text += " Nothing fits without it."
    yield text


def _tier(found: Search, one: Candidate) -> str:
    """The links that the tensor axis crosses."""
    from meshwright.compiler.cluster.crossing import crossings
    from meshwright.compiler.mesh import Mesh

    crossed = crossings(found.cluster, Mesh(one.axes), (TENSOR,))
    return "over " + " and ".join(c.tier.name for c in crossed) if crossed else "within a device"


def _memory_savers(found: Search, best: Priced) -> Iterable[str]:
    """Why there is recomputation, why there are microbatches: the same plan without them."""
    from dataclasses import replace

    one = best.candidate
    lesser = []
    if one.save != "all":
        lesser.append((f"{one.recompute} recomputation", replace(one, save="all", every=1)))
    if one.microbatches > 1:
        lesser.append((f"{one.microbatches} microbatches", replace(one, microbatches=1)))
    if one.offload:
        lesser.append(("offload", replace(one, offload=False)))
    for name, other in lesser:
        priced = next((p for p in found.priced if p.candidate == other), None)
        need = priced.memory if priced else found.estimate(other).memory
        about = "" if priced else "about "
        if need > found.capacity:
            yield f"Without {name} it would need {about}{memory(need)} and not fit."
        elif priced is not None:
            more = priced.seconds / best.seconds - 1
            yield f"Without {name} it would take {percent(more)} longer." if more > 0 else ""


def _pinned(found: Search) -> str:
    words = dict.fromkeys(word for _, word in found.limits.pins.words)
    return f"Pinned: {'; '.join(words)}." if words else ""


def _choice(found: Search, best: Priced) -> str:
    fastest = found.fitting()[0]
    share = best.seconds / fastest.seconds - 1
    simple = f" It is {percent(share)} slower than {fastest.candidate}, and simpler." if share > 1e-3 else ""
    room = found.capacity - best.memory
    return (
        f"So: {described(best.candidate)} ({best.candidate}): {seconds(best.seconds)} a step, "
        f"{percent(best.prediction.mfu)} of the peak, {memory(best.memory)} of memory, {memory(room)} left.{simple}"
    )


def _runner_up(found: Search, best: Priced) -> Iterable[str]:
    second = runner_up(found)
    if second is None:
        return
    lost = differences(best.prediction, second.prediction)
    more = [f"{seconds(s)} {c}" for c, s in lost.by_cause.items() if s > 0.002 * best.seconds][:3]
    less = [f"{seconds(-s)} {c}" for c, s in lost.by_cause.items() if s < -0.002 * best.seconds][:2]
    why = f"more {', '.join(more)}" if more else ""
    why += (", " if why and less else "") + (f"less {', '.join(less)}" if less else "")
    relation = (
        f"{percent(second.seconds / best.seconds - 1)} slower" if lost.seconds > 0 else "no slower, but less simple"
    )
    yield (
        f"Runner-up: {described(second.candidate)} ({second.candidate}): {seconds(second.seconds)} a step, {relation}"
        + (f" ({why})." if why else ".")
    )
