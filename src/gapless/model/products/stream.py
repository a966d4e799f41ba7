"""The residual stream of a decoder between two products."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Stream:
    """M tokens of hidden size H.

    Attributes:
        residual: ``[M, H]``.
        x: ``[M, H]``, input of the product that follows: normed, or, if there are squares, the residual times the
            weight of the norm. The product that takes it divides by the root mean square, which commutes with it.
        squares: fp32 ``[M, tiles]``, sums of squares of the residual's tiles.
    """

    residual: torch.Tensor
    x: torch.Tensor
    squares: torch.Tensor | None = None

    def select(self, index: torch.Tensor) -> Stream:
        """Some of the tokens."""
        squares = None if self.squares is None else self.squares.index_select(0, index)
        return Stream(self.residual.index_select(0, index), self.x.index_select(0, index), squares)
