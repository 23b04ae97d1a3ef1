"""Asks the analysis again: of float64, of an input that was taken as given, without what no run has moved."""

from __future__ import annotations

from torch import Tensor

from meshwright.compiler.causality.analysing import Analysis, related
from meshwright.compiler.causality.feed import Feed
from meshwright.compiler.causality.relation import Relation
from meshwright.compiler.causality.resizing import resized
from meshwright.compiler.causality.running import Subject


def wide_pairs(subject: Subject, analysis: Analysis) -> dict[str, bool]:
    """By kind that is flagged without a choice: whether the analysis flags it in float64 too, at the same size."""
    made: dict[str, bool] = {}
    for relation, feed in zip(analysis.relations, analysis.related, strict=True):
        hard = [kind for kind, flag in relation.flags.items() if flag.hard and kind not in made]
        if not hard:
            continue
        try:
            other = related(subject, feed, wide=True)
        except Exception:  # whatever the user's model raises; then nothing is known of its way in float64
            continue
        for kind in hard:
            both = other.pairs.get((kind, True))
            made[kind] = both is not None and bool((both | ~relation.pairs[kind, True]).all())
    return made


def read_by_others(subject: Subject, analysis: Analysis) -> list[str]:
    """Names of inputs that are taken as given for what they hold, and that are seen from where they must not be."""
    made = []
    subject.draw(1.0, 1.0, 7)
    for feed in analysis.related[:1]:
        for leaf in feed.leaves:
            if not leaf.guessed:
                continue
            try:
                other = related(subject, feed.asking_for(leaf.name))
            except Exception:  # whatever the user's model raises
                continue
            if other.pairs:
                made.append(leaf.name)
    return made


def unexercised(subject: Subject, relation: Relation, feed: Feed, kind: str, tries: int = 9) -> bool:
    """Whether a kind is flagged only by way of elements that stood on a plateau in all runs."""
    alive: list[Tensor] = []
    for number in range(tries):
        subject.draw(*((1.0, (1.0, 4.0, 12.0)[number % 3], 50 + number) if subject.own else (0.0, 1.0, number)))
        other = resized(feed, feed.rows, feed.length, {}, 60 + number)
        try:
            met = related(subject, other).alive
        except Exception:  # whatever the user's model raises with these weights
            continue
        if not alive:
            alive = met
        elif [a.shape for a in alive] != [m.shape for m in met]:
            return False  # its way depends on tokens, so that runs cannot be laid over one another
        else:
            alive = [a | m for a, m in zip(alive, met, strict=True)]
    dead = [~a for a in alive]
    if not any(bool(d.any()) for d in dead):
        return False
    subject.draw(1.0, 1.0, 7)
    try:
        cut = related(subject, feed, dead=dead)
    except Exception:  # whatever the user's model raises
        return False
    kept = cut.pairs.get((kind, True))
    flagged = relation.pairs.get((kind, True))
    return flagged is not None and (kept is None or bool((flagged & ~kept).any()))
