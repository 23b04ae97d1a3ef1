"""A seeded permutation of ``0 .. n-1`` that needs no storage: a Feistel network with cycle walking.

A Feistel network on two halves of ``k`` bits is a bijection of ``0 .. 4**k - 1`` whatever its round function is.
With the least ``k`` for which that range holds ``n``, a result that is not below ``n`` is fed in again,
and the walk ends below ``n`` after fewer than four turns on average
(Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
"""

from __future__ import annotations

ROUNDS = 6
_MASK = (1 << 64) - 1


def permute(index: int, count: int, *key: int) -> int:
    """Where ``index`` goes in the permutation of ``count`` elements that the key chooses."""
    if not 0 <= index < count:
        raise ValueError(f"{index} is not within 0 .. {count - 1}")
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    keys = [_mixed(*key, number) for number in range(ROUNDS)]
    while True:
        left, right = index >> half, index & low
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & low)
        index = left << half | right
        if index < count:
            return index


def _mixed(*parts: int) -> int:
    state = 0
    for part in parts:
        state = _mix(state ^ (part & _MASK))
    return state


def _mix(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
