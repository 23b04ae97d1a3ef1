"""How large the error of a sum is, relative to the sum, by dtype, number of addends and order of adding.

Errors are root mean squares over many sums, divided by the root mean square of the sums. ``u`` is the largest relative
error of one rounding to nearest. Every formula is compared with measured sums by ``benchmarks/numerics.py`` and
``tests/unit/numerics``: from 2 to 1024 addends they are within a factor of 2.

Sources. One rounding: the error is uniform in half a unit in the last place, and significands are spread like 1/m (N.
J. Higham, Accuracy and Stability of Numerical Algorithms, chapters 2 and 4, for the sums of such errors; Higham and
Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019, for adding them as if independent). Where sums stop
growing: Wang et al., Training Deep Neural Networks with 8-bit Floating Point Numbers, 2018.
"""

from __future__ import annotations

import math
from typing import Literal

UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24, "f64": 2.0**-53}
"""``u`` by the short name of a dtype: half of the distance from 1 to the next number."""
LARGEST = {"bf16": 3.3895313892515355e38, "f16": 65504.0, "f32": 3.4028234663852886e38}
"""The largest finite number."""
ROUNDING = 0.4247
"""The root mean square of one rounding's relative error, in ``u``: ``sqrt(1/3 * mean(1/m^2))`` for ``m`` in [1, 2) of
density ``1 / (m ln 2)``, which is ``sqrt(1/3 * 3/(8 ln 2))``."""

Addends = Literal["random signs", "coherent"]
"""Of random signs, so that a sum of n is ``sqrt(n)`` times an addend; or of one sign and about one size."""
Order = Literal["ring", "tree", "all-to-all"]
"""One after the other, pairwise, or all of them in fp32 and rounded once."""


def one_rounding(dtype: str) -> float:
    """The floor: what a result costs that is computed exactly and kept in the dtype."""
    return ROUNDING * UNIT[dtype]


def error_of_sum(dtype: str, count: int, addends: Addends = "random signs", order: Order = "ring") -> float:
    """The relative error of a sum of ``count`` addends that are numbers of the dtype, each partial sum rounded to it.

    With ``order`` "all-to-all" the sum is taken in fp32 and rounded once.
    """
    if count < 2:
        return 0.0
    if order == "all-to-all":
        return one_rounding(dtype)
    if order == "tree":
        return one_rounding(dtype) * math.sqrt(_tree(count, addends))
    steady = one_rounding(dtype) * math.sqrt(_one_after_the_other(count, addends))
    return steady if addends == "random signs" else math.hypot(steady, bias(dtype, count))


def bias(dtype: str, count: int) -> float:
    """What coherent addends lose, one after the other, beyond errors that cancel: relative to the sum.

    Past ``count * u = 1/4`` an addend is a few units in the last place of the sum, and all are rounded alike; past
    about ``sqrt(2)`` (from 1 to 2, by where the addend lies between two powers of 2) they are rounded away, and the
    sum stays. Between the two the formula is fitted to measured sums of addends that differ by a tenth.
    """
    filled = count * UNIT[dtype]
    if filled <= BIASED:
        return 0.0
    return max(min(filled**2 / 9, filled / 14, 1 / 7), 1 - math.sqrt(2) / filled)


BIASED = 0.25
"""``count * u`` from which coherent sums are biased."""


def stops_growing(dtype: str) -> int:
    """The number of coherent addends after which a sum may not grow any more."""
    return int(1 / UNIT[dtype])


def _one_after_the_other(count: int, addends: Addends) -> float:
    """The sum of the squares of all partial sums but the first, relative to the square of the last.

    Of random signs, the k-th partial sum has the square k: ``(n (n + 1) / 2 - 1) / n``, which is about ``n / 2``, so
    that the error is about ``0.30 u sqrt(n)``. Of one sign k^2, which makes about ``n / 3``.
    """
    if addends == "random signs":
        return (count * (count + 1) / 2 - 1) / count
    return (count * (count + 1) * (2 * count + 1) / 6 - 1) / count**2


def _tree(count: int, addends: Addends) -> float:
    """Each of ``log2 n`` levels rounds all of the sum; the errors of coherent partial sums cancel, so that a level with
    m partial sums counts ``1 / m``."""
    levels = math.log2(count)
    return levels if addends == "random signs" else 2 - 2 / count
