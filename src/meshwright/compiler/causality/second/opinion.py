"""The second reading of a model: at two lengths, with gradients recorded and without, by the same intervals."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from meshwright.compiler.causality.clock import OVER, Clock, TimeIsUp
from meshwright.compiler.causality.feed import Feed, Role, call_with
from meshwright.compiler.causality.outputs import token_outputs
from meshwright.compiler.causality.reading import READS, Plainly
from meshwright.compiler.causality.relation import plainly
from meshwright.compiler.causality.running import asking
from meshwright.compiler.causality.second.knowledge import Knowledge
from meshwright.compiler.causality.second.reader import READ, Reader
from meshwright.compiler.causality.second.seen import SAME, Along, Seen, Span, blank

LOOSE = "rules of ops alone do not bound what is seen"
"""Why nothing was shown, if nothing else is said."""


@dataclass(frozen=True)
class Opinion:
    """What the second reading says: ``CAUSAL``, ``LEAK``, or ``not shown``, and why not."""

    verdict: str
    span: Span | None = None
    """The output at position t depends on positions ``t + low`` to ``t + high``."""
    reason: str = ""
    lengths: tuple[int, ...] = ()
    """At which the model was read: two, unless it has but one."""

    def json(self) -> dict[str, Any]:
        """As plain data; infinite ends are None."""
        span = None if self.span is None else [n if math.isfinite(n) else None for n in self.span]
        return {"verdict": self.verdict, "span": span, "reason": self.reason, "lengths": list(self.lengths)}

    def headline(self) -> str:
        """For people."""
        if self.verdict == "not shown":  # its interval is a bound that the rules could not narrow: no leak
            return f"not settled, which says nothing against the verdict ({self.reason or LOOSE})"
        why = f" ({self.reason})" if self.reason else ""
        if self.span is None:
            return self.verdict + why
        low, high = (_text(n) for n in self.span)
        holds = f"at length{'s' if len(self.lengths) > 1 else ''} {' and '.join(map(str, self.lengths))}"
        return f"{self.verdict} {holds}: position t sees {low} to {high}{why}"


def second_reading(
    function: Callable[..., Any], feeds: Iterable[Feed], weights: frozenset[int], clock: Clock
) -> Opinion:
    """Read a model at the first two lengths at which it runs, if there is time. No exception of the model leaves it."""
    made: dict[int, Opinion] = {}
    for feed in feeds:
        if feed.length < 3 or feed.length in made:
            continue
        try:
            with clock.run(f"the second reading at length {feed.length}", least=True), contextlib.suppress(Exception):
                # of the user's model, at a size that it may not take
                made[feed.length] = _alike(_at(function, feed, weights, grad) for grad in (False, True))
        except TimeIsUp:
            return Opinion("not shown", reason=OVER)
        if len(made) == 2:
            break
    if not made:
        return Opinion("not shown", reason="the model could not be read")
    return replace(_alike(made.values()), lengths=tuple(made))


def _alike(opinions: Iterable[Opinion]) -> Opinion:
    """What they all say."""
    first, *others = opinions
    if all((one.verdict, one.span) == (first.verdict, first.span) for one in others):
        return first
    unknown = next((one for one in (first, *others) if one.verdict == "not shown"), None)
    return unknown or Opinion("not shown", reason="it differs between lengths, or when gradients are recorded")


def _at(function: Callable[..., Any], feed: Feed, weights: frozenset[int], grad: bool) -> Opinion:
    if feed.segments is not None:
        return Opinion("not shown", reason="documents are told by the batch")
    known = Knowledge(set(weights))
    values = [leaf.value.clone() for leaf in feed.leaves]
    values = asking(values) if grad else values
    for leaf, value in zip(feed.leaves, values, strict=True):
        if leaf.role is not Role.GIVEN:
            known.know(value, _given(feed, leaf.role, value))
    with plainly(grad), _Reads(known), Reader(known):
        outputs = token_outputs(call_with(function, feed.filled(values)), feed)
    found = [_seen(known, output.value, output.offset, feed) for output in outputs]
    given = any(leaf.role is Role.GIVEN and leaf.value.dim() > 1 for leaf in feed.leaves)
    return worst_of(found, known, given)


def worst_of(found: Sequence[Opinion], known: Knowledge, given: bool) -> Opinion:
    """What is said of all outputs. ``given``: whether the batch has tensors that may be masks."""
    if known.finite and (known.others or given):
        return Opinion("not shown", reason="rows may be masked entirely, by finite numbers")
    if known.stopped:
        return Opinion("not shown", reason=known.stopped)
    if not found:
        return Opinion("not shown", reason="no output has the rows and positions of the input")
    order = ("CAUSAL", "not shown", "LEAK")
    worst = max(found, key=lambda one: order.index(one.verdict))
    spans = [one.span for one in found if one.span is not None]
    span = (min(s[0] for s in spans), max(s[1] for s in spans)) if spans else None
    return Opinion(worst.verdict, span, worst.reason)


class _Reads(Plainly):
    """Stops a reading where the user's own code reads values off tensors."""

    def __init__(self, knowledge: Knowledge) -> None:
        super().__init__()
        self.knowledge = knowledge

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in READS and any(isinstance(a, Tensor) and self.knowledge.seen(a).depends for a in args[:2]):
            self.knowledge.stop(READ)
        return super().__torch_function__(function, types, args, kwargs)


def _given(feed: Feed, role: Role, value: Tensor) -> Seen:
    made = blank(value.shape)
    parts = made.parts()
    along = [Along(anywhere=True), Along()]
    dims = ((feed.time_dim, 0), (feed.batch_dim, 1))
    for dim, which in dims:
        if dim is None or (role is Role.CONTEXT and which == 0):
            continue
        along[which] = Along({parts[dim][0]: SAME}) if parts[dim] else Along()
        if which == 0 and not parts[dim]:
            along[which] = Along(anywhere=True)
    return Seen(made.dims, along[0], along[1])


def _seen(known: Knowledge, value: Tensor, offset: int, feed: Feed) -> Opinion:
    """Of one output."""
    seen = known.seen(value)
    if not seen.depends:
        return Opinion("CAUSAL", SAME)
    parts = seen.parts()
    time = parts[feed.time_dim]
    length = value.shape[feed.time_dim]
    span = (seen.time.within(time[0], 0, length) if len(time) == 1 else None) or SAME
    if len(time) != 1 and seen.time:
        span = (-math.inf, math.inf)
    span = (span[0] + offset, span[1] + offset)
    rows = parts[feed.batch_dim] if feed.batch_dim is not None else []
    apart = not (seen.row.anywhere or seen.row.fixed) and all(
        p in rows and s == SAME for p, s in seen.row.spans.items()
    )
    if span[1] <= 0 and apart:
        return Opinion("CAUSAL", span)
    reason = "" if apart else "rows are joined"
    return Opinion("LEAK" if seen.exact else "not shown", span, reason)


def _text(number: float) -> str:
    if number == -math.inf:
        return "the first position"
    if number == math.inf:
        return "the last position"
    return "t" if number == 0 else f"t{number:+.0f}"
