"""``drift``: runs a model in all the ways in which it is used, and says where they part."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.clock import OVER, Clock, TimeIsUp
from meshwright.compiler.causality.feed import Feed, Unfit, call_with, read_feed
from meshwright.compiler.causality.fitting import action_of
from meshwright.compiler.causality.outputs import required_outputs, token_outputs
from meshwright.compiler.diagnostics import Diagnostic
from meshwright.compiler.drift.aligning import apart
from meshwright.compiler.drift.carrying import Changing, disturbing
from meshwright.compiler.drift.chance import LEAST, Noise, averages, told_of
from meshwright.compiler.drift.decoding import Decoded, decode
from meshwright.compiler.drift.difference import Difference, joined
from meshwright.compiler.drift.lengths import Compared, compare_lengths
from meshwright.compiler.drift.modes import Modes, differences
from meshwright.compiler.drift.recorder import BUDGET
from meshwright.compiler.drift.running import Ran, Stand, standing
from meshwright.compiler.drift.verdict import UNKNOWN, Drift

_CARRIED = 24
"""Findings whose error is carried to the logits by a run of its own; of any further one it is taken as it is."""


def drift(
    model: Callable[..., Any], batch: Any, *, batch_dim: int | None = 0, time_dim: int = 1, seconds: float = 60.0
) -> Drift:
    """Compare a model in training with itself in evaluation, with a cache, and at another length.

    ``model`` is an ``nn.Module``, or a function of tensors that closes over one; it is left as it was. ``batch`` is a
    tensor, a tuple of positional arguments, or a dict of keyword arguments, with the dims ``batch_dim`` and
    ``time_dim``. Dropout is off in all runs. ``seconds`` bounds the comparisons, between runs of the model: what there
    is no time for is in ``skipped``. Never raises for what the model does, nor for a batch or dims that do not fit:
    what cannot be run is told as E0777, with the reason.
    """
    return drift_within(Clock(seconds), model, batch, batch_dim, time_dim)


def drift_within(clock: Clock, model: Callable[..., Any], batch: Any, batch_dim: int | None, time_dim: int) -> Drift:
    """The same, in the time that a clock says."""
    try:
        feed = read_feed(model, batch, batch_dim, time_dim, None)
        with standing(model, clock) as stand:
            return _of(stand, feed)
    except Unfit as fault:
        return _unknown(str(fault), fault.action)
    except TimeIsUp:
        action = "give it more seconds, or a smaller model or batch"
        return _unknown(f"its {clock.seconds:g} seconds were over before it had run in both modes", action)


def _of(stand: Stand, feed: Feed) -> Drift:
    runs: dict[tuple[bool, bool], Ran] = {}
    for training in (True, False):
        for wide in (False, True):
            try:
                runs[training, wide] = _run(stand, feed, training, wide)
            except Exception as fault:  # whatever the user's model raises
                mode = "training" if training else "evaluation"
                told = str(fault).strip().splitlines()[0][:200] if str(fault).strip() else ""
                return _unknown(f"the model does not run in {mode}: {type(fault).__name__}: {told}", action_of(fault))
    outputs = {which: [o.value for o in required_outputs(ran.returned, feed)] for which, ran in runs.items()}
    for wide in (True, False):
        if not any(bool(torch.isfinite(value).any()) for value in outputs[False, wide]):
            return _unknown("no number that the model returns is finite", "give weights and a batch of finite numbers")
    modes = Modes(
        runs[True, False].trace,
        runs[False, False].trace,
        runs[True, True].trace.by_key(),
        runs[False, True].trace.by_key(),
        _apart(outputs[True, True], outputs[False, True]) or 0.0,
    )
    found, noise, noises = differences(modes)
    found = [
        _carried(stand, feed, one, outputs[False, True]) if i < _CARRIED else _plainly(one)
        for i, one in enumerate(found)
    ]
    biased, uncompared = _biased(stand, feed, noises, outputs[False, True])
    found, noise = [*found, *biased], [*noise, *uncompared]
    chance = _in_evaluation(modes)
    if chance:
        why = "evaluation draws by chance, so that no two runs of it agree"
        decoded, compared = Decoded(None, (), (f"decoding: {why}",)), Compared(None, (), (f"lengths: {why}",))
    else:
        decoded, compared = decode(stand, feed), compare_lengths(stand, feed)
    known = {(d.place.file, d.place.line) for d in found}
    alone = [finding for where, finding in chance.items() if where not in known]
    return Drift(
        (*(one.diagnostic for one in found), *alone, *decoded.findings, *compared.findings),
        math.sqrt(sum(one.predicted**2 for one in found)),
        _apart(outputs[True, False], outputs[False, False]),
        modes.end,
        decoded.error,
        compared.error,
        (*dict.fromkeys(noise), *decoded.skipped, *compared.skipped),
    )


def _run(stand: Stand, feed: Feed, training: bool, wide: bool, disturbed: Any = None, seed: int = 0) -> Ran:
    values = stand.inputs([leaf.value for leaf in feed.leaves], wide)

    def call(function: Callable[..., Any]) -> Any:
        return call_with(function, feed.filled(values))

    return stand.run(
        call,
        values,
        lambda returned: _outputs(returned, feed),
        training=training,
        wide=wide,
        budget=BUDGET if wide and disturbed is None else 0,
        around=disturbed,
        least=disturbed is None and not seed,
        seed=seed,
    )


def _outputs(returned: Any, feed: Feed) -> list[Tensor]:
    return [o.value for o in token_outputs(returned, feed)]


def _apart(first: list[Tensor], second: list[Tensor]) -> float | None:
    """The largest relative difference of the outputs that both have."""
    far = [apart(a.detach(), b.detach()) for a, b in zip(first, second, strict=False)]
    known = [f for f in far if f is not None]
    return max(known) if known else None


def _carried(stand: Stand, feed: Feed, one: Difference, expected: list[Tensor]) -> Difference:
    """A difference with what it does to the logits."""
    errors = {key: error for key, error in one.at if error}
    if not errors:
        return one
    try:
        ran = _run(stand, feed, False, True, lambda where: disturbing(where, errors))
    except TimeIsUp:
        return _plainly(one)
    except Exception:  # of the user's model: an index or a size that the noise has made impossible
        return _plainly(one)
    return replace(one, predicted=_apart(_outputs(ran.returned, feed), expected) or 0.0)


def _biased(
    stand: Stand, feed: Feed, noises: list[Noise], expected: list[Tensor]
) -> tuple[list[Difference], list[str]]:
    """What training draws by chance, where its average does something else to the logits; and what was not compared."""
    found = []
    try:
        made = averages(noises, lambda seed: _run(stand, feed, True, True, seed=seed).trace.by_key()) if noises else {}
        for number, average in made.items():
            noise = noises[number]
            changes = {noise.evaluation: average.of}
            ran = _run(stand, feed, False, True, lambda where, c=changes: Changing(where, c))
            predicted = _apart(_outputs(ran.returned, feed), expected) or 0.0
            if predicted > LEAST:
                step = noise.result
                sides = told_of(noise)
                found.append(Difference("E0785", step.place, step.module, *sides, (), average.told, predicted))
    except TimeIsUp:
        return found, [f"the average of what training draws by chance: {OVER}"]
    except Exception as fault:  # whatever the user's model raises with other draws
        return found, [f"the average of what training draws by chance: {type(fault).__name__}"]
    return joined(found), []


def _plainly(one: Difference) -> Difference:
    return replace(one, predicted=math.sqrt(sum(error**2 for _, error in one.at)))


def _in_evaluation(modes: Modes) -> dict[tuple[str, int], Diagnostic]:
    """By line, what evaluation draws by chance: a dropout that was not told that training is over."""
    made = {}
    for step in modes.evaluation.computing():
        if step.random:
            made[step.place.file, step.place.line] = Diagnostic(
                "E0771",
                "evaluation draws by chance",
                replace(step.place, module=step.module),
                "give F.dropout training=self.training",
                (f"in evaluation: {step.op}",),
            )
    return made


def _unknown(reason: str, action: str = "") -> Drift:
    action = action or "give a batch that the model takes, and say its dims"
    return Drift((Diagnostic(UNKNOWN, f"drift is not known: {reason}", None, action),))
