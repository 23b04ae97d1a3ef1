"""Examples of contractions."""

import torch


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


EXAMPLES = [
    ("meshwright.einsum.default", ("bti,oi->bto", x(7, 8, 9), x(11, 9)), {}),
    ("meshwright.einsum.default", ("bto,bti->oi", x(7, 8, 9), x(7, 8, 11)), {}),
    ("meshwright.einsum.default", ("bhts,bhsc->bhtc", x(5, 7, 8, 9), x(5, 7, 9, 11)), {}),
    ("meshwright.einsum.default", ("ij,j->j", x(7, 8), x(8)), {}),
    ("meshwright.einsum.default", ("i,i->", x(7), x(7)), {}),
    ("aten.mm.default", (x(7, 8), x(8, 9)), {}),
    ("aten.bmm.default", (x(7, 8, 9), x(7, 9, 11)), {}),
    ("aten.mv.default", (x(7, 8), x(8)), {}),
    ("aten.dot.default", (x(7), x(7)), {}),
    ("aten.vdot.default", (x(7), x(7)), {}),
    ("aten.addmm.default", (x(9), x(7, 8), x(8, 9)), {"alpha": 0.5}),
    ("aten.addmm.default", (x(7, 1), x(7, 8), x(8, 9)), {}),
    ("aten.baddbmm.default", (x(7, 8, 11), x(7, 8, 9), x(7, 9, 11)), {"beta": 2}),
    ("aten.addmv.default", (x(7), x(7, 8), x(8)), {}),
]
