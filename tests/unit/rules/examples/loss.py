"""Examples of cross entropy and its pieces."""

import torch


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


TARGET = torch.randint(0, 11, (7, 8))
FLAT = TARGET.flatten()
LOGITS = x(7, 8, 11)

EXAMPLES = [
    ("meshwright.logsumexp.default", (LOGITS,), {}),
    ("meshwright.pick.default", (LOGITS, TARGET, 0), {}),
    ("meshwright.cross_entropy.default", (LOGITS, TARGET), {}),
    ("meshwright.cross_entropy_backward.default", (x(7, 8), LOGITS, TARGET, LOGITS.logsumexp(-1), 0), {}),
    ("aten.nll_loss_forward.default", (x(56, 11), FLAT, None, 0, -100), {}),
    ("aten.nll_loss_forward.default", (x(56, 11), FLAT, x(11), 1, -100), {}),
    ("aten.nll_loss_backward.default", (x(56), x(56, 11), FLAT, x(11), 0, -100, x()), {}),
]
