"""N19: each way to cut a step works alone, two together do not.

Reported: a pipeline with context parallelism, a loss that is divided by what a rank has counted for itself (14/3
instead of 4 on four ranks), recomputation under a pipeline; one publishes the losses of a model under 18 layouts.
https://github.com/NVIDIA/Megatron-LM/issues/7452
https://github.com/pytorch/torchtitan/issues/771
https://github.com/pytorch/torchtitan/issues/3029

Here: all of them with one another, on a model whose loss counts another number of words on every rank.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from tests.field.against_one_device import Trained, cluster_of, copies_agree, eager, train
from tests.field.stacks import case

DATA = ("", "ddp=2", "zero1=2", "fsdp=2")
TENSOR = ("", "tp=2", "tp=2,sp")
PIPE = ("pp=2", "pp=2,schedule=zb-v")
OTHERS = ("", "recompute", "prefetch")
COMBINED = [
    (pipe, data, tensor, OTHERS[(i + j + k) % 3])
    for (i, pipe), (j, data), (k, tensor) in product(*map(enumerate, (PIPE, DATA, TENSOR)))
]
"""Every two of these together; recomputation and gathering ahead in turns, so that they meet all others too."""


@cache
def truth() -> Trained:
    return eager(case())


QUICK = [words for number, words in enumerate(COMBINED) if number % 5 in (0, 2)]
"""Of these every way of each."""


def test_the_quick_ones_have_each_way() -> None:
    for here, every in zip(zip(*QUICK, strict=True), (PIPE, DATA, TENSOR, OTHERS), strict=True):
        assert set(here) == set(every)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=",".join(filter(None, words)), marks=() if words in QUICK else pytest.mark.slow)
        for words in COMBINED
    ],
)
def test_together_as_on_one_device(words: tuple[str, ...]) -> None:
    ranks = 2 * (2 if words[1] else 1) * (2 if words[2] else 1)
    cluster = cluster_of(case(), ",".join(filter(None, words)), ranks, 2)
    assert train(cluster, case()).far_from(truth()) < 1e-11
    copies_agree(cluster)


def test_every_two_meet() -> None:
    for one, other in ((a, b) for a in range(4) for b in range(a)):
        values = [sorted({words[place] for words in COMBINED}) for place in (one, other)]
        assert {(words[one], words[other]) for words in COMBINED} == set(product(*values))
