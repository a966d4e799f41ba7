# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""`gapless.model.parts.short_conv` as two kernels: all inputs are written, then all taps are read.

One program handles a tile of channels of one token. Two launches and not one: a token may read what another row's
token writes in the same step, when both share a block of the prefix cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024


@triton.jit
def _write_kernel(x_ptr, cache_ptr, slots_ptr, x_stride, W: tl.constexpr, TILE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + t * x_stride + w, mask=w < W)
    tl.store(cache_ptr + tl.load(slots_ptr + t) * W + w, x.to(cache_ptr.dtype.element_ty), mask=w < W)


@triton.jit
def _conv_kernel(
    x_ptr, cache_ptr, tables_ptr, rows_ptr, positions_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, table_stride,
    W: tl.constexpr, TAPS: tl.constexpr, DILATION: tl.constexpr, B: tl.constexpr, SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = w < W
    row = tl.load(rows_ptr + t).to(tl.int64)
    position = tl.load(positions_ptr + t).to(tl.int64)
    own = tl.load(x_ptr + t * x_stride + w, mask=inside, other=0.0)
    own = own.to(cache_ptr.dtype.element_ty).to(tl.float32)
    total = own * tl.load(weight_ptr + w * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + w, mask=inside, other=0.0).to(tl.float32)
    for back in tl.static_range(1, TAPS):
        at = position - back * DILATION
        if at >= 0:
            block = tl.load(tables_ptr + row * table_stride + at // B).to(tl.int64)
            seen = tl.load(cache_ptr + (block * B + at % B) * W + w, mask=inside, other=0.0).to(tl.float32)
            total += seen * tl.load(weight_ptr + w * TAPS + TAPS - 1 - back, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + t * W + w, total.to(out_ptr.dtype.element_ty), mask=inside)


def write_vectors(x: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """See `gapless.model.parts.short_conv.write_vectors`; the last dimension of ``x`` is contiguous."""
    tokens, width = x.shape
    tile = min(TILE, triton.next_power_of_2(width))
    _write_kernel[(tokens, triton.cdiv(width, tile))](
        x, cache, slot_mapping, x.stride(0), W=width, TILE=tile, num_warps=4
    )


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
    """See `gapless.model.parts.short_conv.short_conv`; weights are contiguous, ``x`` is so in its last dimension."""
    if x.stride(-1) != 1 or not weight.is_contiguous() or not cache.is_contiguous():
        raise ValueError("channels, weight and cache of a short convolution must be contiguous")
    write_vectors(x, cache, slot_mapping)
    tokens, width = x.shape
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    tile = min(TILE, triton.next_power_of_2(width))
    _conv_kernel[(tokens, triton.cdiv(width, tile))](
        x, cache, block_tables, rows, positions, weight, weight if bias is None else bias, out, x.stride(0),
        block_tables.stride(0), W=width, TAPS=weight.shape[1], DILATION=dilation, B=cache.shape[1], SILU=silu,
        HAS_BIAS=bias is not None, TILE=tile, num_warps=4,
    )  # fmt: skip
    return out
