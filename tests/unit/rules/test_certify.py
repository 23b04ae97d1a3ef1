"""The certifier finds what is false, and what is forbidden without need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.compiler.graph.calls import describe, overload
from meshwright.compiler.graph.certify import Findings, certify_rule
from meshwright.compiler.rules import rule_of

X = torch.randn(7, 8, dtype=torch.float64)
LN = (X, X.flip(0), [8], X[:, :1] * 0.1, X[:, :1].abs() + 1, X[0], X[1], [True, True, True])
LN_CUBE = (X.expand(9, 7, 8), X.flip(0).expand(9, 7, 8), [8], *[torch.rand(9, 7, 1, dtype=torch.float64)] * 2, *LN[5:])
INDEX = torch.tensor([0, 3, 6, 5])


def found(op: str, args: tuple[Any, ...], **changes: Any) -> Findings:
    """The findings on the op's own rule with some fields changed."""
    target = overload(op)
    rule = rule_of(describe(target, args, {}, target(*args)))
    assert rule is not None
    return certify_rule(op, args, {}, replace(rule, **changes))


FALSE: list[tuple[str, tuple[Any, ...], Mapping[str, Any], str]] = [
    ("aten._softmax.default", (X, 1, False), {"whole": frozenset()}, "cut d1 on 2"),
    ("aten.sum.dim_IntList", (X, [1]), {"reduce": {"d1": "max"}}, "cut d1 on 2"),
    ("aten.sum.dim_IntList", (X, [1]), {"reduce": {}}, "vanishes without being reduced"),
    ("aten.sum.dim_IntList", (X, [1]), {"relations": {}}, "cannot be pointwise"),
    ("aten.sum.dim_IntList", (X, [1]), {"sizes": {"d0": 7, "d1": 9}}, "the rule says"),
    ("aten.amax.default", (X, [1]), {"linear": (frozenset({0}),)}, "not linear in operands [0]"),
    ("aten.add.Tensor", (X, 3), {"linear": (frozenset({0}),)}, "not linear in operands [0]"),
    ("aten.add.Tensor", (X, X), {"linear": (frozenset({0}), frozenset({1}))}, "not linear in operands [0]"),
    ("aten.mul.Tensor", (X, X), {"linear": (frozenset({0, 1}),)}, "not linear in operands [0, 1]"),
    ("aten.cumsum.default", (X, 1), {"relations": {"d1": "suffix"}}, "not suffix"),
    ("aten.slice.Tensor", (X, 0, 1, 7), {"relations": {"d0n": "[0,0]"}}, "not [0,0]"),
    ("aten.view.default", (X, [56]), {"local": None}, "cut f0 on 2"),
    ("aten.add.Tensor", (X, X), {"unread": frozenset({1})}, "operand 1 is read"),
    ("aten.native_layer_norm_backward.default", LN_CUBE, {"dense": frozenset()}, "cut d1 on 2"),
    ("aten.native_layer_norm_backward.default", LN, {"reduce": {}}, "should be the same and differ"),
    ("meshwright.embedding.default", (X, INDEX, 0, -1), {"local": None}, "cut v on 2"),
    ("meshwright.dropout.default", (X, torch.tensor([1, 2]), 0.5, 0, [], []), {"local": None}, "cut d0 on 2"),
]


@pytest.mark.parametrize(("op", "args", "changes", "fault"), FALSE, ids=lambda v: v if isinstance(v, str) else "")
def test_a_false_rule_is_found_out(op: str, args: tuple[Any, ...], changes: Mapping[str, Any], fault: str) -> None:
    assert any(fault in f for f in found(op, args, **changes).faults)


def test_missed_chances_are_told() -> None:
    strict = found("aten.mm.default", (X, X.t()), whole=frozenset("mk"), reduce={}, linear=())
    assert not strict.faults
    assert set(strict.chances) == {
        "whole factor m can be cut",
        "whole factor k can be cut, owing sum",
        "linear in operands [0]",
        "linear in operands [1]",
    }


def test_a_true_rule_has_no_faults_and_is_tried_in_every_cut() -> None:
    true = found("aten.mm.default", (X, X.t()))
    assert true.faults == () and true.chances == ()
    # 3 factors x 3 cuts, 3 pairs, 2 linear groups, 4 operand factors x 3 positions
    assert true.trials == 9 + 3 + 2 + 12
