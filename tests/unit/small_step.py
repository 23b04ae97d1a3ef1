"""A small step and its rank program, written out as text: one weight, sharded at rest over ``data``, two microbatches.

It exercises the readers of rank programs without the passes that make them.
"""

from __future__ import annotations

import torch

from meshwright.compiler.graph.program import Parameter, StepProgram, TensorSpec
from meshwright.compiler.graph.rank_program import Layout, RankProgram
from meshwright.compiler.graph.text_parser import parse_graph, parse_local_graph
from meshwright.compiler.mesh import Mesh, parse_sharding
from meshwright.compiler.plan import Hashes, ParameterPlan, Plan, Storage

PROLOGUE = """
graph prologue
  %mask: bool[8] = input batch "mask"
  %count: i64[] = aten.sum.default(%mask)
  output prologue "count" = %count
"""
# ruff: noqa: E501 (the text of a graph has one op a line)
MICRO = """
graph micro
  %w: f64[6, 4] = input parameter "layer.w"
  %x: f64[8, 4] = input batch "x"
  %bias: f64[6] = input constant "bias"
  %count: i64[] = input prologue "count"
  %t: f64[4, 6] = aten.permute.default(%w, [1, 0])  # layer
  %mm: f64[8, 6] = aten.mm.default(%x, %t)  # layer
  %add: f64[8, 6] = aten.add.Tensor(%mm, %bias)  # layer
  %sum_1: f64[] = aten.sum.default(%add)
  %loss: f64[] = aten.div.Tensor(%sum_1, %count)
  %ones: f64[8, 6] = aten.full.default([8, 6], 1.0, dtype=f64, device=device("cpu"))  # backward layer
  %part: f64[8, 6] = aten.div.Tensor(%ones, %count)  # backward layer
  %t_1: f64[6, 8] = aten.permute.default(%part, [1, 0])  # backward layer
  %grad: f64[6, 4] = aten.mm.default(%t_1, %x)  # backward layer
  output loss "loss" = %loss
  output gradient "layer.w" = %grad
"""
UPDATE = """
graph update
  %w: f64[6, 4] = input parameter "layer.w"
  %g: f64[6, 4] = input gradient "layer.w"
  %m: f64[6, 4] = input state "layer.w/momentum"
  %lr: f64[] = input scalar "0/lr"
  %mul: f64[6, 4] = aten.mul.Tensor(%m, 0.9)  # update
  %m_1: f64[6, 4] = aten.add.Tensor(%mul, %g)  # update
  %step: f64[6, 4] = aten.mul.Tensor(%m_1, %lr)  # update
  %w_1: f64[6, 4] = aten.sub.Tensor(%w, %step)  # update
  output parameter "layer.w" = %w_1
  output state "layer.w/momentum" = %m_1
"""
LOCAL_PROLOGUE = """
local graph prologue
  %mask: bool[4] of [8@data] = input batch "mask"
  %count: i64[] of [] +data = aten.sum.default(%mask)
  %all_reduce: i64[] = all_reduce(%count, ("data",), "sum")
  output prologue "count": [] = %all_reduce
"""
LOCAL_MICRO = """
local graph micro
  %w: f64[3, 4] of [6@data, 4] = input parameter "layer.w"
  %x: f64[2, 4] of [8@micro@data, 4] = input batch "x"
  %bias: f64[6] = input constant "bias"
  %count: i64[] = input prologue "count"
  %all_gather: f64[6, 4] = all_gather(%w, 0, ("data",), 6)  # layer
  %t: f64[4, 6] = aten.permute.default(%all_gather, [1, 0])  # layer
  %mm: f64[2, 6] of [8@micro@data, 6] = aten.mm.default(%x, %t)  # layer
  %add: f64[2, 6] of [8@micro@data, 6] = aten.add.Tensor(%mm, %bias)  # layer
  %sum_1: f64[] of [] +data +micro = aten.sum.default(%add)
  %loss: f64[] of [] +data +micro = aten.div.Tensor(%sum_1, %count)
  %ones: f64[2, 6] of [8@micro@data, 6] = aten.full.default([2, 6], 1.0, dtype=f64, device=device("cpu"))  # backward layer
  %part: f64[2, 6] of [8@micro@data, 6] = aten.div.Tensor(%ones, %count)  # backward layer
  %t_1: f64[6, 2] of [6, 8@micro@data] = aten.permute.default(%part, [1, 0])  # backward layer
  %grad: f64[6, 4] of [6, 4] +data +micro = aten.mm.default(%t_1, %x)  # backward layer
  %reduce_scatter: f64[3, 4] of [6@data, 4] +micro = reduce_scatter(%grad, 0, ("data",))  # backward layer
  output loss "loss": [] +data +micro = %loss
  output gradient "layer.w": [6@data, 4] +micro = %reduce_scatter
"""
LOCAL_UPDATE = """
local graph update
  %w: f64[3, 4] of [6@data, 4] = input parameter "layer.w"
  %g: f64[3, 4] of [6@data, 4] = input gradient "layer.w"
  %m: f64[3, 4] of [6@data, 4] = input state "layer.w/momentum"
  %lr: f64[] = input scalar "0/lr"
  %mul: f64[3, 4] of [6@data, 4] = aten.mul.Tensor(%m, 0.9)  # update
  %m_1: f64[3, 4] of [6@data, 4] = aten.add.Tensor(%mul, %g)  # update
  %step: f64[3, 4] of [6@data, 4] = aten.mul.Tensor(%m_1, %lr)  # update
  %w_1: f64[3, 4] of [6@data, 4] = aten.sub.Tensor(%w, %step)  # update
  output parameter "layer.w": [6@data, 4] = %w_1
  output state "layer.w/momentum": [6@data, 4] = %m_1
"""


def small_step() -> StepProgram:
    """The step for one device."""
    prologue, micro, update = (parse_graph(text)[1] for text in (PROLOGUE, MICRO, UPDATE))
    weight = TensorSpec((6, 4), torch.float64)
    return StepProgram(
        prologue,
        micro,
        update,
        parameters=(Parameter("layer.w", weight, aliases=("head.w",)),),
        buffers={},
        batch={"x": TensorSpec((8, 4), torch.float64), "mask": TensorSpec((8,), torch.bool)},
        batch_dims={"x": 0, "mask": 0},
        state={"layer.w/momentum": weight},
        state_init={"layer.w/momentum": 0.0},
        scalars={"0/lr": 0.1},
        constants={"bias": torch.arange(6, dtype=torch.float64)},
        batch_size=8,
        fingerprint="0123456789abcdef",
    )


def small_rank_program() -> RankProgram:
    """The program of each of two ranks."""
    prologue, micro, update = (parse_local_graph(t)[1] for t in (LOCAL_PROLOGUE, LOCAL_MICRO, LOCAL_UPDATE))
    rest, whole = parse_sharding("[6@data, 4]"), parse_sharding("[6, 4]")
    plan = Plan(
        Mesh((("data", 2),)),
        batch=("data",),
        microbatches=2,
        storage=Storage(("data",), ("data",), ("data",)),
        parameters=(ParameterPlan("layer.w", whole),),
        hashes=Hashes("0123456789abcdef", torch.__version__),
        name="fsdp=2",
    )
    layouts = {"layer.w": Layout(rest, whole, rest, rest)}
    return RankProgram(small_step(), plan, plan.mesh, prologue, micro, update, layouts, {"layer.w/momentum": rest})
