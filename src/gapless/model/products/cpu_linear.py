"""Linear layers for a CPU's decode steps: with a few tokens, the transposed product is the quicker one.

``x @ W.T`` with 8 to 32 rows leaves most of the library's tile empty; ``W @ x.T`` is the same sum with the many rows of
W in that place (2 threads, 16 tokens, 1536 inputs to 576 outputs: 215 us against 370). The result is a view with its
strides exchanged, which later layers take as it is. Only the private copy of a model is changed, and the parameters
stay where they are.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

FEW = range(8, 33)
"""Rows for which the transposed product wins; outside of it both were measured and the usual one is as quick."""
WIDE = 16384
"""Outputs from which on the weights' own traffic decides, as in a language model's head."""


class FewRowsLinear(nn.Linear):
    """``nn.Linear`` with the same parameters and another order of the product. Input ``[..., K]``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` -> ``[..., N]``; the last dimension may not be contiguous."""
        rows = input.numel() // self.in_features
        if rows not in FEW:
            return functional.linear(input, self.weight, self.bias)
        product = torch.mm(self.weight, input.reshape(rows, self.in_features).t()).t()
        if self.bias is not None:
            product = product + self.bias
        return product.view(*input.shape[:-1], self.out_features)


def quicken(module: nn.Module) -> int:
    """Let the plain fp32 linear layers of a private module tree run so; returns how many."""
    chosen = [
        m
        for m in module.modules()
        if type(m) is nn.Linear and m.weight.dtype == torch.float32 and m.out_features < WIDE
    ]
    for layer in chosen:
        layer.__class__ = FewRowsLinear
    return len(chosen)
