"""A short causal depthwise convolution over packed tokens, with its past in a paged cache.

A convolution with kernel K and dilation d reads, for the token at position p, the inputs at p, p - d, ...,
p - (K - 1) d. That is what attention with a window of (K - 1) d + 1 positions reads. So its inputs are kept as keys
are: one vector for each token, in blocks, at the place that the step's slot mapping names, and are read back through
the block table. A chunk of a prompt, a block found in the prefix cache, a preempted row and a rejected draft then
need no code here: whatever lies at a position was written by the last token that stood there.

The input of a token is written before any token of the step is read, because two requests of one step may share a
block that the first of them fills. Positions before the start of a request count as zeros.

All of it may be captured in a CUDA graph: shapes follow from the padded sizes, and nothing waits for the device.

Shape legend: T tokens of the step, W channels, K taps, N blocks of B tokens, R rows, P blocks in a row of the table.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def write_vectors(x: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store ``x [T, W]`` at the flat places ``slot_mapping [T]`` of ``cache [N, B, W]``."""
    cache.view(-1, cache.shape[-1]).index_copy_(0, slot_mapping, x.to(cache.dtype))


def places_of(block_tables: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Flat places of ``positions [T, ...]`` of the rows ``rows [T]``; a negative position gives that of 0.

    Args:
        block_tables: ``[R, P]``.
        rows: int64 ``[T]``.
        positions: int64, the first dimension is T.
        size: tokens of a block.
    """
    at = positions.clamp_min(0)
    row = rows.view(-1, *([1] * (positions.dim() - 1)))
    blocks = block_tables[row, torch.div(at, size, rounding_mode="floor")].long()
    return blocks * size + at % size


def short_conv(
    x: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    slot_mapping: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dilation: int = 1,
    silu: bool = False,
) -> torch.Tensor:
    """Write the inputs to the cache and convolve.

    Args:
        x: ``[T, W]``.
        cache: ``[N, B, W]`` of this layer.
        block_tables: int32 ``[R, P]`` of the layer's group.
        slot_mapping: int64 ``[T]``; padding tokens name a place in the null block.
        rows: int64 ``[T]``, each token's row; the null row for padding.
        positions: int64 ``[T]``.
        weight: ``[W, K]``; the last tap is the token itself.
        bias: ``[W]``.
        dilation: distance of two taps.
        silu: apply SiLU to the result.

    Returns:
        ``[T, W]`` in the dtype of ``x``; summed in fp32, or in fp64 if ``x`` is.
    """
    write_vectors(x, cache, slot_mapping)
    compute = torch.promote_types(x.dtype, torch.float32)
    flat, taps = cache.view(-1, cache.shape[-1]), weight.shape[1]
    total = x.to(cache.dtype).to(compute) * weight[:, taps - 1].to(compute)
    if bias is not None:
        total = total + bias.to(compute)
    for back in range(1, taps):
        at = positions - back * dilation
        seen = flat.index_select(0, places_of(block_tables, rows, at, cache.shape[1])).to(compute)
        seen = torch.where((at >= 0)[:, None], seen, 0)  # stale places may hold NaN: chosen, not multiplied
        total = total + seen * weight[:, taps - 1 - back].to(compute)
    return (functional.silu(total) if silu else total).to(x.dtype)
