"""Shadows stand beside memory: views, writes in place, numbers of two parts."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.compiler.causality.memory import Memory
from meshwright.compiler.causality.shadow import Shadow
from meshwright.compiler.causality.words import any_over, members, pack, running, single, softened, unpack, width_of

WIDTH = width_of(70)


def tokens(count: int) -> Shadow:
    words = torch.stack([single(i, WIDTH) for i in range(count)])
    return Shadow(torch.zeros(count, dtype=torch.bool), words)


def seen(words: Tensor) -> list[int]:
    return members(words[: WIDTH // 2])


def test_words_join_along_dims() -> None:
    words = tokens(70).deps
    assert words is not None
    assert seen(any_over(words, (0,))) == list(range(70))
    assert seen(running(words, 0)[4]) == [0, 1, 2, 3, 4]
    assert torch.equal(pack(unpack(words)), words)
    assert members(softened(words[69])) == [69]


def test_a_view_has_the_shadow_of_its_base() -> None:
    memory, value = Memory(WIDTH), torch.zeros(12)
    memory.write(value, tokens(12))
    turned = value.view(3, 4).t()[1:]
    deps = memory.read(turned).deps
    assert deps is not None
    assert [seen(deps[0, k]) for k in range(3)] == [[1], [5], [9]]


def test_a_write_through_a_view_is_seen_in_the_base() -> None:
    memory, value = Memory(WIDTH), torch.zeros(4, 3)
    assert bool(memory.read(value).known.all())
    memory.write(value[:, 1], tokens(4))
    shadow = memory.read(value)
    assert shadow.deps is not None
    assert seen(shadow.deps[2, 1]) == [2] and seen(shadow.deps[2, 0]) == []
    assert shadow.known.tolist() == [[True, False, True]] * 4


def test_a_complex_number_has_two_parts() -> None:
    memory, value = Memory(WIDTH), torch.zeros(6)
    memory.write(value, tokens(6))
    whole = torch.view_as_complex(value.view(3, 2))
    deps = memory.read(whole).deps
    assert deps is not None and seen(deps[1]) == [2, 3]
    memory.write(whole, tokens(3))
    parts = memory.read(value).deps
    assert parts is not None and seen(parts[5]) == [2]


def test_weights_are_never_known() -> None:
    weight = torch.zeros(3)
    memory = Memory(WIDTH, frozenset({weight.untyped_storage().data_ptr()}))
    assert not bool(memory.read(weight).known.any())


def test_a_copy_keeps_its_shadow_when_the_original_is_written() -> None:
    memory, value = Memory(WIDTH), torch.zeros(4, 2)
    memory.write(value[:, 0], tokens(4))
    copy = value.clone()
    memory.write(copy, memory.read(value))
    memory.write(value, Shadow(torch.ones(4, 2, dtype=torch.bool)))
    deps = memory.read(copy).deps
    assert deps is not None and seen(deps[3, 0]) == [3]
    assert not bool(memory.read(copy).known[3, 0])


def test_a_number_is_written_for_itself_alone() -> None:
    memory, number = Memory(WIDTH), torch.tensor(0.0)
    memory.read(number)
    memory.write(number, Shadow(torch.tensor(False), tokens(1).deps[0]))  # type: ignore[index]  # it has sets
    assert not bool(memory.read(number).known)
    assert bool(memory.read(torch.tensor(1.0)).known)
