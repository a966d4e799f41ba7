"""Masks into rows as a Triton kernel; see `gapless.runner.masks`, whose result this equals.

How many there are is read on the device, so that one graph serves all steps.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.batch.row_layout import RowLayout
from gapless.runner.masks import MaskInputs

BLOCK = 1024


@triton.jit(do_not_specialize=["allowed_at", "mask_words"])
def _apply_masks_kernel(count_ptr, rows_ptr, masks_ptr, arena_ptr, allowed_at, mask_words, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    if i < tl.load(count_ptr):
        row = tl.load(rows_ptr + i).to(tl.int64)
        word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = word < mask_words
        mask = tl.load(masks_ptr + i.to(tl.int64) * mask_words + word, mask=inside, other=0)
        tl.store(arena_ptr + allowed_at + row * mask_words + word, mask, mask=inside)


def apply_masks(inputs: MaskInputs, arena: torch.Tensor, layout: RowLayout) -> None:
    """See `gapless.runner.masks.apply_masks`."""
    grid = (layout.max_num_seqs, triton.cdiv(layout.mask_words, BLOCK))
    _apply_masks_kernel[grid](
        inputs.count, inputs.rows, inputs.masks, arena, layout.allowed_at, layout.mask_words, BLOCK=BLOCK, num_warps=4
    )
