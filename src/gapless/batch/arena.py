"""The arena on the device: the words of all rows as one tensor, and its sections as views. See `RowLayout`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import Word


@dataclass(frozen=True, slots=True)
class Arena:
    """All words, int32 ``[layout.num_words]``, and views of the first three sections.

    Written on the compute stream only.
    """

    words: torch.Tensor
    token_table: torch.Tensor  # [R + 1, max_model_len]
    block_tables: torch.Tensor  # [G, R + 1, max_blocks]
    params: torch.Tensor  # [R + 1, Word.COUNT]


def arena_views(words: torch.Tensor, layout: RowLayout) -> Arena:
    """Cut the arena into its sections."""
    r = layout.num_rows
    return Arena(
        words,
        words[: layout.block_tables_at].view(r, layout.max_model_len),
        words[layout.block_tables_at : layout.params_at].view(layout.num_groups, r, layout.max_blocks),
        words[layout.params_at : layout.bias_at].view(r, int(Word.COUNT)),
    )
