"""Examples of dropout."""

import torch

SEED = torch.tensor([3, 5])

EXAMPLES = [
    ("meshwright.dropout.default", (torch.randn(7, 8, 9, dtype=torch.float64), SEED, 0.4, 2, [], []), {}),
    ("meshwright.dropout.default", (torch.randn(7, 1, 9, dtype=torch.float64), SEED, 0.4, 2, [], []), {}),
]
