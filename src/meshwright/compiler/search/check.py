"""Limits that no plan can keep to, told before anything is compiled: the rule, the values, the nearest settings."""

from __future__ import annotations

import math
from collections.abc import Iterable

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.units import amount
from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, Span, error
from meshwright.compiler.schedules.catalogue import may_meet, modules, why_not
from meshwright.compiler.schedules.request import Request
from meshwright.compiler.search.candidates import divides, divisors, microbatch_counts
from meshwright.compiler.search.facts import ProgramFacts
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.pins import Pins


def check_limits(facts: ProgramFacts, cluster: Cluster, ranks: int, limits: Limits) -> None:
    """Raises MeshwrightError with all that contradicts the program or the cluster: E0433 (ranks), E0434 (tensor
    parallelism), E0435 (batch), E0436 (microbatches), E0438 (memory), E0441 (cluster), E0443 (recompute, offload),
    E0502 (stages of a pipeline)."""
    pins = limits.pins
    if ranks < 1 or ranks > cluster.ranks:
        raise error(
            "E0441",
            f"the plan is wanted for {ranks} ranks, the cluster '{cluster.name}' has {cluster.ranks} devices",
            action=f"give --ranks of 1 to {cluster.ranks}, or a larger cluster",
        )
    # what the ranks are divided into is checked once the parts are right, so that one mistake is told once
    divided = _pipe(facts, ranks, pins)
    if divided is None:
        each = ranks // (pins.pipe or 1)
        divided = _tensor(facts, each, pins) or _ranks(each, pins) or _batch(facts, each, pins)
    found = [fault for fault in (_memory(cluster, limits), divided, _blocks(facts, pins)) if fault is not None]
    if found:
        raise MeshwrightError(*found)


def _memory(cluster: Cluster, limits: Limits) -> Diagnostic | None:
    device = cluster.device
    usable = device.memory - device.efficiency.reserve
    if limits.reserve < 0:
        return Diagnostic(
            "E0438", f"the memory reserve is -{amount(-limits.reserve)}", action="give 0 or more, say 4GiB"
        )
    if limits.reserve >= usable:
        message = (
            f"a reserve of {amount(limits.reserve)} leaves nothing of one {device.name}: "
            f"it has {amount(device.memory)}, of which the driver takes {amount(device.efficiency.reserve)}"
        )
        return Diagnostic("E0438", message, action=f"reserve less than {amount(usable)}")
    return None


def _pipe(facts: ProgramFacts, ranks: int, pins: Pins) -> Diagnostic | None:
    """There are enough ranks and blocks for the stages, and the schedule has so many of them."""
    if not pins.pipelined:
        return None
    name = next((n for n in ("pipe", "schedule", "virtual", "pipe_wanted") if pins.word(n) != n), "pipe")
    word, place = pins.word(name), pins.place(name)
    if facts.depth < 2:
        message = f"'{word}' asks for a pipeline, but the program has no repeated blocks to make stages of"
        return Diagnostic("E0502", message, place, "leave it out")
    virtual = pins.virtual or 1
    valid = [n for n in divisors(ranks) if n > 1 and n * virtual <= facts.depth]
    nearby = f"use pp={_nearest(pins.pipe or 2, valid)}" if valid else "leave it out"
    if pins.pipe is not None and ranks % pins.pipe:
        return Diagnostic("E0433", f"{ranks} ranks cannot be divided by {pins.word('pipe')}", place, nearby)
    if pins.pipe is not None and pins.pipe * virtual > facts.depth:
        each = f" with {virtual} stages on each rank" if virtual > 1 else ""
        message = f"'{word}'{each} needs {pins.pipe * virtual} stages, and there are only {facts.depth} blocks"
        return Diagnostic("E0502", message, place, nearby)
    if not valid:
        message = f"'{word}' asks for a pipeline, but none divides both {ranks} ranks and {facts.depth} blocks"
        return Diagnostic("E0502", message, place, nearby)
    if pins.schedule is not None:
        ways = [pins.virtual] if pins.virtual else range(1, facts.depth // (pins.pipe or valid[0]) + 1)
        reasons = [why_not(pins.schedule, Request(pins.pipe or valid[0], 2, v)) for v in ways]
        if all(reasons):
            message = f"the schedule {pins.schedule} {reasons[0]}"
            action = "leave 'virtual' out" if pins.virtual else "take another schedule"
            return Diagnostic("E0502", message, pins.place("schedule"), action)
    return None


def _tensor(facts: ProgramFacts, ranks: int, pins: Pins) -> Diagnostic | None:
    degree, place = pins.tensor, pins.place("tensor")
    if ((degree or 1) == 1 and not pins.tensor_wanted) or pins.placed is not None:
        return None
    word = (
        pins.word("tensor")
        if degree
        else pins.word("tensor_wanted" if pins.word("tensor_wanted") != "tensor_wanted" else "sequence")
    )
    if not facts.cuts:
        message = (
            f"'{word}': tensor parallelism finds nothing to cut: no attention heads, no inner width, no vocabulary"
        )
        return Diagnostic("E0434", message, place, "leave it out and use fsdp")
    valid = [n for n in divisors(ranks) if n > 1 and divides(facts, n)]
    nearby = (
        f"use tp={_nearest(degree or 2, valid)}"
        if valid
        else "leave tp out: no degree above 1 divides the ranks and the sizes"
    )
    if degree is None:
        if valid:
            return None
        message = f"'{word}' asks for tensor parallelism, but no degree divides both {ranks} ranks and {_sizes(facts)}"
        return Diagnostic(
            "E0434", message, place, "leave it out and use fsdp, or name a degree that pads, such as tp=2"
        )
    if facts.heads and degree > facts.heads:
        return Diagnostic("E0434", f"'{word}': there are only {facts.heads} attention heads to cut", place, nearby)
    groups = facts.key_value_heads or facts.heads
    if facts.heads and facts.heads % degree:
        message = f"'{word}': {facts.heads} attention heads cannot be cut into {degree} equal parts"
        return Diagnostic("E0434", message, place, nearby)
    if facts.heads and groups % degree and degree % groups:
        message = (
            f"'{word}': {groups} key/value heads neither divide by {degree} nor can be shared by {degree} ranks evenly"
        )
        return Diagnostic("E0434", message, place, nearby)
    inner = facts.cuts.get("inner")
    if inner and inner % degree:
        message = f"'{word}': the inner width {inner} cannot be cut into {degree} equal parts"
        return Diagnostic("E0434", message, place, nearby)
    if divides(facts, degree):
        return None
    return Diagnostic("E0434", f"'{word}': {_sizes(facts)} is too little to cut over {degree} ranks", place, nearby)


def _sizes(facts: ProgramFacts) -> str:
    return ", ".join(f"{name} {size}" for name, size in facts.cuts.items())


def _ranks(ranks: int, pins: Pins) -> Diagnostic | None:
    """The product of the pinned degrees divides the ranks, or is their number if all are pinned."""
    pinned = {n: s for n, s in (("replica", pins.replica), ("data", pins.data), ("tensor", pins.tensor)) if s}
    words = {name: pins.word(name) for name in pinned if pins.word(name) != name}
    product = 1
    for size in pinned.values():
        product *= size
    together = " * ".join(f"{words.get(n, n)}" for n in pinned if n in words)
    place = next((p for n in words if (p := pins.place(n)) is not None), None)
    if ranks % product:
        return Diagnostic(
            "E0433",
            f"{ranks} ranks cannot be divided by {together}" + (f" = {product}" if len(words) > 1 else ""),
            place,
            _fix(ranks, pinned, words, place),
        )
    if len(pinned) == 3 and product != ranks:
        message = f"the pinned sizes {together} make {product} ranks, not {ranks}"
        return Diagnostic("E0433", message, place, _fix(ranks, pinned, words, place))
    sharded = pins.storage or 0
    if sharded and ranks // (pins.tensor or 1) // (pins.replica or 1) == 1:
        word = pins.word("storage")
        message = f"'{word}' has a single rank to shard over: {ranks} ranks in all" + (
            f", of which {together} takes all" if together and ranks > 1 else ""
        )
        return Diagnostic("E0433", message, pins.place("storage"), f"leave '{word}' out, or plan for more ranks")
    return None


def _fix(ranks: int, pinned: dict[str, int], words: dict[str, str], place: Span | None) -> str:
    """Change the last pinned size to what the others leave room for."""
    if place is not None:
        return f"let the sizes of the mesh multiply to {ranks}, or plan for {math.prod(pinned.values())} ranks"
    name = next(reversed(words)) if words else next(iter(pinned))
    others = 1
    for other, size in pinned.items():
        others *= size if other != name else 1
    if ranks % others:
        return f"choose sizes whose product divides {ranks}: {_listed(divisors(ranks))}"
    left = divisors(ranks // others) if len(pinned) < 3 else [ranks // others]
    return f"write {words[name].partition('=')[0]}={_nearest(pinned[name], left)}, or plan for another number of ranks"


def _batch(facts: ProgramFacts, ranks: int, pins: Pins) -> Diagnostic | None:
    """Every rank along the batch's axes gets a sample of every microbatch."""
    tensor = pins.tensor or (max((n for n in divisors(ranks) if divides(facts, n)), default=1))
    least = (pins.replica or 1) * (pins.data or 1)
    least = max(least, ranks // tensor)
    micro = pins.microbatches
    if micro is not None and micro > 1 and facts.coupled:
        message = (
            f"'{pins.word('microbatches')}': the batch cannot be cut, its samples couple in {', '.join(facts.coupled)}"
        )
        action = "declare what that means (separability=global, say), or use micro=1"
        return Diagnostic("E0436", message, pins.place("microbatches"), action)
    if pins.pipelined and micro != 1 and facts.coupled:
        message = f"'{pins.word('pipe')}': a pipeline cannot run, for samples couple in {', '.join(facts.coupled)}"
        action = "declare what that means (separability=global, say), or use micro=1, or no pp"
        return Diagnostic("E0766", message, pins.place("pipe"), action)
    if pins.schedule is not None and micro != 1 and facts.meets:
        virtual = pins.virtual or modules()[pins.schedule].VIRTUAL
        if not may_meet(pins.schedule, Request(pins.pipe or 2, 2 * (pins.pipe or 2), virtual)):
            message = (
                f"'{pins.word('schedule')}': microbatches meet in {', '.join(facts.meets)}, and it does not let them"
            )
            action = "leave the schedule out, or take gpipe or breadth-first"
            return Diagnostic("E0766", message, pins.place("schedule"), action)
    if micro is not None and facts.batch % micro:
        message = (
            f"'{pins.word('microbatches')}': a batch of {facts.batch} samples cannot be cut into {micro} microbatches"
        )
        valid = [m for m in divisors(facts.batch) if facts.batch // m >= least] or [1]
        return Diagnostic("E0436", message, pins.place("microbatches"), f"use micro={_nearest(micro, valid)}")
    if facts.batch < least:
        known = f" with {pins.word('tensor')}" if pins.tensor and pins.word("tensor") != "tensor" else ""
        message = (
            f"a global batch of {facts.batch} samples cannot be cut over {least} data ranks ({ranks} ranks{known})"
        )
        action = f"use a batch of at least {least}" + _fewer(facts, ranks, pins)
        return Diagnostic("E0435", message, pins.place("tensor"), action)
    if micro is not None and facts.batch // micro < least:
        message = (
            f"'{pins.word('microbatches')}' leaves {facts.batch // micro} samples for {least} data ranks: "
            f"the batch has {facts.batch}"
        )
        valid = microbatch_counts(facts.batch, least)
        return Diagnostic("E0436", message, pins.place("microbatches"), f"use micro={_nearest(micro, valid)}")
    return None


def _fewer(facts: ProgramFacts, ranks: int, pins: Pins) -> str:
    """Tensor degrees, other pins or numbers of ranks that the batch does allow."""
    for name, other in ((pins.word("data"), pins.replica), (pins.word("replica"), pins.data)):
        if "=" in name and (other or 1) <= facts.batch:
            return f", or {name.partition('=')[0]}={max(n for n in divisors(ranks) if n * (other or 1) <= facts.batch)}"
    degrees = [n for n in divisors(ranks) if divides(facts, n) and ranks // n <= facts.batch]
    if degrees and pins.tensor:
        return f", or tp={degrees[0]}"
    most = facts.batch * (pins.tensor or max((n for n in divisors(ranks) if divides(facts, n)), default=1))
    return f", or at most {most} ranks"


def _blocks(facts: ProgramFacts, pins: Pins) -> Diagnostic | None:
    if pins.save not in (None, "all") and not facts.blocks:
        message = f"'{pins.word('save')}': the program has no repeated blocks to recompute"
        return Diagnostic("E0443", message, pins.place("save"), "leave it out")
    if pins.every and facts.depth and pins.every > facts.depth:
        message = f"'{pins.word('every')}': there are only {facts.depth} blocks"
        return Diagnostic("E0443", message, pins.place("every"), f"use a number of at most {facts.depth}")
    if pins.offload and not facts.state:
        message = "'offload': the optimizer has no state to keep in the host's memory"
        return Diagnostic("E0443", message, pins.place("offload"), "leave 'offload' out")
    return None


def _nearest(wanted: int, valid: Iterable[int]) -> int:
    return min(valid, key=lambda n: (abs(n - wanted), n))


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")
