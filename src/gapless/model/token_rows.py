"""PackedStep: what the layers of a model are told about a step, and which row each packed token belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gapless.attention.context import AttentionContext, AttentionParams

AttentionBackend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, AttentionContext, AttentionParams, torch.Tensor | None],
    torch.Tensor,
]
"""``(q [T, HQ, D], k, v [T, HK, D], kv_cache [2, N, B, HK, D], context, params, kv_scales [2, HK]) -> [T, HQ, D]``."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The private keyword argument that reaches every layer.

    Attributes:
        context: the step.
        attend: runs one layer's attention.
        positions: int64 ``[T]``.
    """

    context: AttentionContext
    attend: AttentionBackend
    positions: torch.Tensor

    @property
    def token_rows(self) -> torch.Tensor:
        """int64 ``[T]``: each token's row. Made by the first layer that asks."""
        scratch, context = self.context.scratch, self.context
        made = scratch.get("packed/token_rows")
        if made is None:
            null_row = context.block_tables.shape[0] - 1
            made = token_rows(context.query_start_loc, context.rows, len(self.positions), null_row)
            scratch["packed/token_rows"] = made
        assert isinstance(made, torch.Tensor)
        return made


def token_rows(query_start_loc: torch.Tensor, rows: torch.Tensor, num_tokens: int, null_row: int) -> torch.Tensor:
    """int64 ``[T]``: each token's row, the null row for padding tokens. Capturable.

    Args:
        query_start_loc: int32 ``[S + 1]``.
        rows: int32 ``[S]``.
        num_tokens: T, padded.
        null_row: the row of padding.
    """
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=rows.device)
    sequence = torch.searchsorted(query_start_loc[1:], tokens, right=True)
    last = len(rows) - 1
    return torch.where(sequence <= last, rows[sequence.clamp_max(last)].long(), null_row)
