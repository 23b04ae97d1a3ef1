"""Examples of taking dims apart and putting them together."""

import torch


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


END = 9223372036854775807

EXAMPLES = [
    ("aten.slice.Tensor", (x(7, 24), 1, 8, 16), {}),
    ("aten.slice.Tensor", (x(7, 32), -1, 8, -8), {}),
    ("aten.slice.Tensor", (x(7, 8), 0, 0, END), {}),
    ("aten.slice.Tensor", (x(7, 8), 0, 1, END), {}),
    ("aten.slice.Tensor", (x(7, 8), 0, 0, -1), {}),
    ("aten.slice.Tensor", (x(7, 16), 1, 1, END, 2), {}),
    ("aten.slice.Tensor", (x(7, 9), 1, 0, END, 2), {}),
    ("aten.narrow.default", (x(7, 24), 1, 8, 8), {}),
    ("aten.slice_backward.default", (x(7, 8), [7, 24], 1, 8, 16, 1), {}),
    ("aten.slice_backward.default", (x(7, 7), [7, 8], 1, 1, END, 1), {}),
    ("aten.slice_backward.default", (x(7, 8), [7, 8], 0, 0, END, 1), {}),
    ("aten.slice_backward.default", (x(7, 8), [7, 16], 1, 1, END, 2), {}),
    ("aten.slice_scatter.default", (x(7, 24), x(7, 8), 1, 8, 16), {}),
    ("aten.slice_scatter.default", (x(7, 8), x(7, 7), 1, 1), {}),
    ("aten.slice_scatter.default", (x(7, 16), x(7, 8), 1, 0, END, 2), {}),
    ("aten.select.int", (x(7, 8, 9), 1, -1), {}),
    ("aten.unbind.int", (x(7, 3, 8), 1), {}),
    ("aten.select_backward.default", (x(7, 9), [7, 8, 9], 1, 0), {}),
    ("aten.select_scatter.default", (x(7, 8, 9), x(7, 9), 1, 2), {}),
    ("aten.split.Tensor", (x(7, 24), 8, 1), {}),
    ("aten.split.Tensor", (x(10, 7), 4), {}),
    ("aten.split.sizes", (x(7, 24), [8, 16], 1), {}),
    ("aten.split_with_sizes.default", (x(7, 32), [16, 8, 8], -1), {}),
    ("aten.split_with_sizes.default", (x(7, 8), [3, 5], -1), {}),
    ("aten.split_with_sizes_copy.default", (x(7, 32), [16, 8, 8], -1), {}),
    ("aten.split_copy.Tensor", (x(7, 24), 8, 1), {}),
    ("aten.chunk.default", (x(7, 24), 3, 1), {}),
    ("aten.cat.default", ([x(7, 8), x(7, 8), x(7, 8)], -1), {}),
    ("aten.cat.default", ([x(7, 16), x(7, 8)], 1), {}),
    ("aten.cat.default", ([x(7, 9), x(7, 8)], 1), {}),
    ("aten.cat.default", ([x(7, 9), x(0)], 1), {}),
    ("aten.concat.default", ([x(7, 8), x(7, 8)], -1), {}),
    ("aten.stack.default", ([x(7, 8), x(7, 8)], 1), {}),
    ("aten.constant_pad_nd.default", (x(7, 8), [0, 1], 0.0), {}),
    ("aten.constant_pad_nd.default", (x(7, 8), [-1, 2, 1, 0], -100.0), {}),
    ("aten.constant_pad_nd.default", (x(7, 8), [8, 16], 0.0), {}),
    ("aten.roll.default", (x(7, 8, 9), [2], [1]), {}),
    ("aten.roll.default", (x(7, 8), [2]), {}),
    ("aten.flip.default", (x(7, 8, 9), [1, -1]), {}),
    ("aten.tril.default", (x(7, 8, 9),), {}),
    ("aten.triu.default", (x(7, 8, 9), 1), {}),
    ("aten.diagonal.default", (x(7, 8, 9), 0, 0, 2), {}),
    ("aten.diag_embed.default", (x(7, 8),), {}),
    ("aten.unfold.default", (x(7, 8, 9), 1, 3, 2), {}),
]
