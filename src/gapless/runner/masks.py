"""Masks over the vocabulary that come after the forward: of rows whose tokens a grammar restricts.

They have a region of their own in each slot, and a copy of their own, because the host computes them while the
forward runs. The compute stream then writes them into the rows, where ``allowed_token_ids`` has its place too; the
sampler knows one kind of mask.

    count, 3 unused words, rows[R], masks[R, W]

for R = ``max_num_seqs`` and W = ``RowLayout.mask_words``. Only the used masks are copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gapless.batch.row_layout import I32, RowLayout
from gapless.device.base import Access, Device

ROWS_AT = 4  # words; every part starts on 16 bytes


@dataclass(frozen=True, slots=True)
class MaskInputs:
    """Views of a region's device twin."""

    count: torch.Tensor  # int32 [1]
    rows: torch.Tensor  # int32 [R]
    masks: torch.Tensor  # int32 [R, W]


def mask_inputs(words: torch.Tensor, layout: RowLayout) -> MaskInputs:
    """Cut a region into its parts."""
    at, rows = _masks_at(layout), layout.max_num_seqs
    return MaskInputs(words[:1], words[ROWS_AT : ROWS_AT + rows], words[at:].view(rows, layout.mask_words))


def _masks_at(layout: RowLayout) -> int:
    return ROWS_AT + -(-layout.max_num_seqs // 4) * 4


class MaskRegion:
    """Of one slot: pinned memory, its device twin, and the event of the copy. See `gapless.runner.slot`."""

    def __init__(self, device: Device, index: int, layout: RowLayout) -> None:
        self._layout = layout
        self._at = _masks_at(layout)
        words = self._at + layout.max_num_seqs * layout.mask_words
        self.host = device.host_buffer(4 * words, f"slot{index}.masks_host").view(torch.int32)
        self.device = device.device_buffer((words,), torch.int32, f"slot{index}.masks")
        self.done = device.event()
        self.filling = Access(writes=(self.host,))
        self._words: I32 = self.host.numpy()
        self.masks: I32 = self._words[self._at :].reshape(layout.max_num_seqs, layout.mask_words)
        self.used = 0  # words that are to be copied

    def name_rows(self, rows: I32) -> None:
        """The first of the masks are of ``rows [n]``."""
        self._words[0] = len(rows)
        self._words[ROWS_AT : ROWS_AT + len(rows)] = rows
        self.used = self._at + len(rows) * self._layout.mask_words


def apply_masks(inputs: MaskInputs, arena: torch.Tensor, layout: RowLayout) -> None:
    """Write each mask over the words of its row in ``arena``. The reference; on a CPU only."""
    count = int(inputs.count)  # sync-ok: the reference runs on a CPU only
    allowed = arena[layout.allowed_at : layout.num_words].view(layout.num_rows, layout.mask_words)
    allowed[inputs.rows[:count].long()] = inputs.masks[:count]
