"""Examples of element-wise ops: ``(op, arguments, keyword arguments)``."""

import torch


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.5


A, B = (7, 8), (9, 7, 8)
GRAD = (x(*A), x(*A))

EXAMPLES = [
    ("aten.add.Tensor", (x(*B), x(*A)), {"alpha": 2}),
    ("aten.add.Tensor", (x(*A), 0), {}),
    ("aten.add.Tensor", (x(*A), 3), {}),
    ("aten.add.Scalar", (x(*A), 3), {}),
    ("aten.add.Tensor", (x(7, 1), x(8)), {}),
    ("aten.sub.Tensor", (x(*B), x(7, 1)), {}),
    ("aten.rsub.Scalar", (x(*A), 1), {}),
    ("aten.mul.Tensor", (x(*B), x(8)), {}),
    ("aten.mul.Tensor", (x(*B), x()), {}),
    ("aten.mul.Scalar", (x(*A), 3), {}),
    ("aten.div.Tensor", (x(*B), positive(*A)), {}),
    ("aten.div.Scalar", (x(*A), 3), {}),
    ("aten.div.Tensor_mode", (x(*A), positive(*A)), {"rounding_mode": "floor"}),
    ("aten.true_divide.Tensor", (x(*A), positive(*A)), {}),
    ("aten.positive.default", (x(*A),), {}),
    ("aten.neg.default", (x(*A),), {}),
    ("aten.pow.Tensor_Scalar", (x(*A), 2), {}),
    ("aten.rsqrt.default", (positive(*A),), {}),
    ("aten.exp.default", (x(*A),), {}),
    ("aten.tanh.default", (x(*A),), {}),
    ("aten.gelu.default", (x(*A),), {}),
    ("aten.silu.default", (x(*A),), {}),
    ("aten.sigmoid.default", (x(*A),), {}),
    ("aten.clamp.default", (x(*A), 0.0, 1.0), {}),
    ("aten.maximum.default", (x(*A), x(*A)), {}),
    ("aten.lt.Tensor", (x(*A), x(8)), {}),
    ("aten.logical_and.default", (mask(*A), mask(*A)), {}),
    ("aten.gelu_backward.default", GRAD, {"approximate": "tanh"}),
    ("aten.silu_backward.default", GRAD, {}),
    ("aten.sigmoid_backward.default", GRAD, {}),
    ("aten.tanh_backward.default", GRAD, {}),
    ("aten.threshold_backward.default", (*GRAD, 0), {}),
    ("aten.hardtanh_backward.default", (*GRAD, -1, 1), {}),
    ("aten.leaky_relu_backward.default", (*GRAD, 0.1, False), {}),
    ("aten.elu_backward.default", (x(*A), 1.0, 1.0, 1.0, False, x(*A)), {}),
    ("aten.softplus_backward.default", (*GRAD, 1.0, 20.0), {}),
    ("aten.hardswish_backward.default", GRAD, {}),
    ("aten.hardsigmoid_backward.default", GRAD, {}),
    ("aten.native_dropout_backward.default", (x(*A), mask(*A), 2.0), {}),
    ("aten.log_sigmoid_backward.default", (x(*A), x(*A), positive(*A)), {}),
    ("aten.log_sigmoid_forward.default", (x(*A),), {}),
    ("aten.where.self", (mask(*A), x(*B), x()), {}),
    ("aten.where.ScalarOther", (mask(*A), x(*B), 0), {}),
    ("aten.where.ScalarOther", (mask(*A), x(*B), 1), {}),
    ("aten.where.ScalarSelf", (mask(*A), 0, x(*B)), {}),
    ("aten.where.Scalar", (mask(*A), 0, 1), {}),
    ("aten.masked_fill.Scalar", (x(*B), mask(7, 1), 0), {}),
    ("aten.masked_fill.Scalar", (x(*B), mask(7, 1), 2), {}),
    ("aten.masked_fill.Tensor", (x(*B), mask(7, 1), x()), {}),
    ("aten.isin.Tensor_Scalar", (x(*A), 1.0), {}),
    ("aten.polar.default", (x(*A), x(*A)), {}),
    ("aten.clone.default", (x(*A),), {}),
    ("aten.detach.default", (x(*A),), {}),
    ("aten.alias.default", (x(*A),), {}),
    ("aten.contiguous.default", (x(*A),), {}),
    ("aten.lift_fresh_copy.default", (x(*A),), {}),
    ("aten.lift_fresh.default", (x(*A),), {}),
    ("aten.view.dtype", (x(*A), torch.int64), {}),
    ("aten._to_copy.default", (x(*A),), {"dtype": torch.float32}),
    ("aten._to_copy.default", (x(*A),), {"dtype": torch.int64}),
    ("aten._to_copy.default", (mask(*A),), {"dtype": torch.float64}),
    ("aten.to.dtype", (x(*A), torch.float64), {}),
    ("prims.convert_element_type.default", (x(*A), torch.float32), {}),
    ("aten.copy.default", (x(*B), x(*A)), {}),
    ("aten.fill.Scalar", (x(*A), 3), {}),
    ("aten.fill.Tensor", (x(*A), x()), {}),
    ("aten.zero.default", (x(*A),), {}),
]
