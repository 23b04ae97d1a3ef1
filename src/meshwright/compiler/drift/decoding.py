"""With a cache, token by token and piece by piece, against the whole sequence at once, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.clock import OVER, TimeIsUp
from meshwright.compiler.causality.feed import Feed, Unfit, call_with
from meshwright.compiler.causality.outputs import token_outputs
from meshwright.compiler.diagnostics import Diagnostic
from meshwright.compiler.drift.cached import Caching, as_keywords, caching_of, visible
from meshwright.compiler.drift.partial import Onset, onset
from meshwright.compiler.drift.recorder import BUDGET
from meshwright.compiler.drift.running import Ran, Stand
from meshwright.compiler.drift.step import Trace
from meshwright.compiler.drift.verdict import TOLERANCE


@dataclass(frozen=True)
class Decoded:
    """The largest difference with a cache; None if there was nothing to compare."""

    error: float | None
    findings: tuple[Diagnostic, ...] = ()
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Apart:
    """A piece of which a position differs."""

    position: int
    error: float
    start: int
    end: int
    trace: Trace


def decode(stand: Stand, feed: Feed) -> Decoded:
    """Compare. Nothing that the model raises leaves it."""
    caching = caching_of(stand.subject.function)
    if caching is None:
        return Decoded(None, (), ("decoding: the model takes no cache",))
    if feed.length < 3 or feed.batch_dim != 0 or feed.time_dim != 1:
        return Decoded(None, (), ("decoding: the batch is not of rows and three or more positions",))
    prefix = max(1, feed.length // 2)
    middle = prefix + max(2, (feed.length - prefix) // 2)
    cuts = {
        "token by token": [prefix, *range(prefix + 1, feed.length + 1)],
        "piece by piece": sorted({prefix, min(middle, feed.length), feed.length}),
    }
    try:
        whole = _whole(stand, feed)
    except TimeIsUp:
        return Decoded(None, (), (f"decoding: {OVER}",))
    except Exception as fault:  # whatever the user's model raises
        return Decoded(None, (), (f"decoding: the model does not run in evaluation: {_told(fault)}",))
    findings: list[Diagnostic] = []
    skipped: list[str] = []
    worst: float | None = None
    for how, ends in cuts.items():
        try:
            error, first = _compare(stand, feed, caching, whole, ends)
        except Unfit as fault:
            return Decoded(worst, tuple(findings), (*skipped, f"decoding: {fault}"))
        except TimeIsUp:
            return Decoded(worst, tuple(findings), (*skipped, f"decoding {how}: {OVER}"))
        except Exception as fault:  # whatever the user's model raises
            skipped.append(f"decoding {how}: the model does not run: {_told(fault)}")
            continue
        worst = error if worst is None else max(worst, error)
        if first is not None:
            findings.append(_finding(how, feed, whole.trace, first))
            break  # pieces fail where tokens do
    return Decoded(worst, tuple(findings), tuple(skipped))


def _whole(stand: Stand, feed: Feed) -> Ran:
    values = stand.inputs([leaf.value for leaf in feed.leaves], True)

    def call(function: Callable[..., Any]) -> Any:
        return call_with(function, as_keywords(function, feed, values, 0, feed.length))

    return stand.run(call, values, lambda r: [_logits(r, feed, feed.length)], training=False, wide=True, budget=BUDGET)


def _logits(returned: Any, feed: Feed, length: int) -> Tensor:
    """``[rows, positions, ...]``: the first output of tokens."""
    found = token_outputs(returned, replace(feed, length=length))
    if not found:
        raise Unfit("nothing that the model returns has the positions of its input")
    return found[0].value


def _compare(stand: Stand, feed: Feed, caching: Caching, whole: Ran, ends: list[int]) -> tuple[float, _Apart | None]:
    """The largest difference, and the first position that has one."""
    expected = _logits(whole.returned, feed, feed.length)
    size = float(torch.where(torch.isfinite(expected), expected, 0.0).abs().max()) or 1.0
    seen = visible(feed)
    worst, first = 0.0, None
    with stand.as_given(False, True):
        cache, start = None, 0
        for end in ends:
            ran = _piece(stand, feed, caching, cache, start, end)
            cache = caching.found_in(ran.returned) if caching.found_in(ran.returned) is not None else cache
            if cache is None:
                raise Unfit(f"the model returns no '{caching.name}'")
            got = _logits(ran.returned, feed, end - start)
            wanted = expected[:, start:end]
            same = torch.isfinite(got) == torch.isfinite(wanted)
            far = torch.where(same, (got - wanted).abs().nan_to_num(nan=0.0), size)
            far = far.reshape(feed.rows, end - start, -1).amax(-1) / size
            far = torch.where(seen[:, start:end], far, 0.0).amax(0)
            worst = max(worst, float(far.max()))
            if first is None and worst > TOLERANCE:
                position = start + int((far > TOLERANCE).nonzero()[0])
                first = _Apart(position, float(far.max()), start, end, ran.trace)
            start = end
    return worst, first


def _piece(stand: Stand, feed: Feed, caching: Caching, cache: Any, start: int, end: int) -> Ran:
    values = stand.inputs([leaf.value for leaf in feed.leaves], True)

    def call(function: Callable[..., Any]) -> Any:
        given = as_keywords(function, feed, values, start, end)
        if caching.asks:
            given["use_cache"] = True
        if cache is not None:
            given[caching.name] = cache
        return call_with(function, given)

    return stand.go(call, values, lambda r: [_logits(r, feed, end - start)], training=False, wide=True, budget=BUDGET)


def _finding(how: str, feed: Feed, whole: Trace, first: _Apart) -> Diagnostic:
    found = onset(whole, feed.length, first.trace, first.start, first.end)
    notes = [
        f"{how}: position {first.position} is the first that differs, by {first.error:.1e} of the largest output",
    ]
    if found is not None:
        notes.append(f"first differs in {found.step.op} of module '{found.step.module}'")
    notes.append(f"likely cause: {_cause(found, first)}")
    place = found.step.place if found else None
    action = "give each position, with a cache, what it is given in the whole sequence"
    return Diagnostic("E0775", _MESSAGE, place, action, tuple(notes))


_MESSAGE = "with a cache the outputs are other ones than those of the whole sequence"


def _cause(found: Onset | None, first: _Apart) -> str:
    """What fits what was seen."""
    if found is None:
        return "not known"
    name = found.step.name
    if found.there is not None and found.constant is None:
        return f"{found.there} of {first.end} positions are there: the cache has lost some that the whole sequence sees"
    if found.constant is not None:
        whole, given = found.constant
        return f"positions or a mask: {given} was given, the whole sequence has {whole}"
    if "conv" in name or "conv" in found.step.module.lower():
        return "the state of a convolution"
    if "embedding" in name:
        return "positions: another row of the table was read"
    if "attention" in name or "softmax" in name or name in ("aten.bmm", "aten.where", "aten.masked_fill"):
        return "the mask, or the keys and values that the cache gives back"
    return "what is kept from one call to the next"


def _told(fault: Exception) -> str:
    return f"{type(fault).__name__}: {str(fault).strip().splitlines()[0] if str(fault).strip() else ''}"[:200]
