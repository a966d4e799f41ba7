"""The products of adapters as two kernels a site: shrink, x @ A.T, and expand, which adds low @ B.T to y.

Both take tiles of tokens of any adapters. A tile goes through the slots and multiplies with those that some token of
it has; a prompt's tile has one, a tile of decodes a few, and a tile without any leaves at once. Which slot a token has
is read on the device, so that a graph serves every mix. This is the grouping of "Punica" (Chen et al., MLSys 2024) and
"S-LoRA" (Sheng et al., MLSys 2024) without sorting the tokens.

Shrink has few outputs and a long sum, so the sum is cut into pieces for several programs, by K alone; expand adds the
pieces in a fixed order. There are no atomics: equal input gives equal bits, whatever the neighbours are.

Shape legend: T tokens, K inputs, N outputs, P parts, R rank, C pieces of the sum.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gapless.attention.context import AttentionContext
from gapless.lora.bank import SiteWeights

_SHORT, _LONG = 16, 64
"""Tokens of a tile: of steps with few tokens, and of others."""
_FEW = 128
"""Tokens up to which the short tile is used."""
_BLOCK_K = 64
_PIECE = 512
"""Inputs of a piece of the sum, at least."""
_MAX_PIECES = 16
_BLOCK_N = 128
_BLOCK_R = 64
"""Rows of A, and columns of B, that a program takes at once, at most: ranks may be large, its memory is not."""
MAX_PARTS = 3


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """``slots`` int32 ``[T]``, on the device."""

    slots: torch.Tensor


@triton.jit(do_not_specialize=["T", "S"])
def _token_slots_kernel(
    query_start_loc_ptr,
    rows_ptr,
    row_loras_ptr,
    out_ptr,
    row_stride,
    T,
    S,
    SEARCH_STEPS: tl.constexpr,  # enough to halve [0, S) down to one
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = t < tl.load(query_start_loc_ptr + S)
    low = tl.zeros([BLOCK], dtype=tl.int32)
    high = tl.zeros([BLOCK], dtype=tl.int32) + S
    for _ in range(SEARCH_STEPS):  # the last sequence that starts at or before t
        middle = (low + high) // 2
        begins = tl.load(query_start_loc_ptr + middle, mask=real, other=0)
        narrow = high - low > 1
        low = tl.where(narrow & (begins <= t), middle, low)
        high = tl.where(narrow & (begins > t), middle, high)
    row = tl.load(rows_ptr + low, mask=real, other=0).to(tl.int64)
    slot = tl.load(row_loras_ptr + row * row_stride, mask=real, other=0)
    tl.store(out_ptr + t, slot, mask=t < T)


@triton.jit(do_not_specialize=["T", "L"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    slots_ptr,
    low_ptr,
    x_stride,
    slot_stride,
    T,
    L,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # P * R
    PIECE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """low[piece, t, :] of a tile of tokens; tiles without an adapter write nothing."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    piece = tl.program_id(1)
    wide = slot_stride.to(tl.int64)
    slot = tl.load(slots_ptr + t, mask=t < T, other=0)
    if tl.max(slot, 0) > 0:
        w = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
        result = tl.zeros([BLOCK_T, BLOCK_W], dtype=tl.float32)
        for s in range(1, L):
            has = slot == s
            if tl.max(has.to(tl.int32), 0) > 0:
                sums = tl.zeros([BLOCK_T, BLOCK_W], dtype=tl.float32)
                base = a_ptr + s * wide
                for begin in range(0, PIECE, BLOCK_K):
                    k = piece * PIECE + begin + tl.arange(0, BLOCK_K)
                    x = tl.load(
                        x_ptr + t[:, None].to(tl.int64) * x_stride + k[None, :],
                        mask=has[:, None] & (k < K)[None, :],
                        other=0.0,
                    )
                    a = tl.load(
                        base + w[None, :] * K + k[:, None], mask=(w < WIDTH)[None, :] & (k < K)[:, None], other=0.0
                    )
                    sums += tl.dot(x, a, input_precision="ieee")
                result = tl.where(has[:, None], sums, result)
        place = low_ptr + (piece * T + t[:, None]).to(tl.int64) * WIDTH + w[None, :]
        tl.store(place, result, mask=(t < T)[:, None] & (w < WIDTH)[None, :])


@triton.jit(do_not_specialize=["T", "L"])
def _expand_kernel(
    low_ptr,
    b_ptr,
    slots_ptr,
    y_ptr,
    y_stride,
    slot_stride,
    T,
    L,
    END0: tl.constexpr,  # where the parts end among the outputs; a missing part ends where the one before does
    END1: tl.constexpr,
    END2: tl.constexpr,
    R: tl.constexpr,
    WIDTH: tl.constexpr,  # P * R
    PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """y[t, n] += sum of low[:, t, part of n] @ B for a tile of tokens and one of a part's outputs."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    tile = tl.program_id(1)
    wide, behind = slot_stride.to(tl.int64), T.to(tl.int64) * WIDTH
    tiles0: tl.constexpr = (END0 + BLOCK_N - 1) // BLOCK_N
    tiles1: tl.constexpr = tiles0 + (END1 - END0 + BLOCK_N - 1) // BLOCK_N
    part = (tile >= tiles0).to(tl.int32) + (tile >= tiles1).to(tl.int32)
    first = tl.where(part == 0, 0, tl.where(part == 1, END0, END1))
    end = tl.where(part == 0, END0, tl.where(part == 1, END1, END2))
    tile -= tl.where(part == 0, 0, tl.where(part == 1, tiles0, tiles1))
    slot = tl.load(slots_ptr + t, mask=t < T, other=0)
    if tl.max(slot, 0) > 0:
        n = first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        added = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
        for begin in range(0, R, BLOCK_R):
            r = begin + tl.arange(0, BLOCK_R)
            inside = (slot > 0)[:, None] & (r < R)[None, :]
            source = low_ptr + t[:, None].to(tl.int64) * WIDTH + (part * R + r)[None, :]
            low = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
            for piece in range(PIECES):
                low += tl.load(source + piece * behind, mask=inside, other=0.0)
            small = low.to(b_ptr.dtype.element_ty)
            for s in range(1, L):
                has = slot == s
                if tl.max(has.to(tl.int32), 0) > 0:
                    b = tl.load(
                        b_ptr + s * wide + n[None, :] * R + r[:, None],
                        mask=(n < end)[None, :] & (r < R)[:, None],
                        other=0.0,
                    )
                    added += tl.where(has[:, None], tl.dot(small, b, input_precision="ieee"), 0.0)
        place = y_ptr + t[:, None].to(tl.int64) * y_stride + n[None, :]
        mask = (slot > 0)[:, None] & (n < end)[None, :]
        before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, (before + added).to(y_ptr.dtype.element_ty), mask=mask)


def token_slots(context: AttentionContext, count: int) -> TokenSlots:
    """See `gapless.lora.bank.AdapterBank.tokens`."""
    assert context.row_loras is not None
    sequences, block = len(context.rows), 128
    slots = torch.empty(count, dtype=torch.int32, device=context.rows.device)
    _token_slots_kernel[(triton.cdiv(count, block),)](
        context.query_start_loc,
        context.rows,
        context.row_loras,
        slots,
        context.row_loras.stride(0),
        count,
        sequences,
        SEARCH_STEPS=max(1, sequences.bit_length()),
        BLOCK=block,
        num_warps=4,
    )
    return TokenSlots(slots)


def add(x: torch.Tensor, y: torch.Tensor, weights: SiteWeights, tokens: TokenSlots) -> None:
    """See `gapless.lora.bank.AdapterBank.add`. x and y are contiguous but for the stride of their rows."""
    assert x.stride(1) == y.stride(1) == 1
    slots, a, b = tokens.slots, weights.a, weights.b
    count, size = x.shape
    width, rank, total = a.shape[1], b.shape[2], a.shape[0]
    pieces = min(_MAX_PIECES, triton.cdiv(size, _PIECE))
    piece = triton.cdiv(triton.cdiv(size, pieces), _BLOCK_K) * _BLOCK_K
    block_t = _SHORT if count <= _FEW else _LONG
    tiles = triton.cdiv(count, block_t)
    ends = (*weights.ends, *[weights.ends[-1]] * MAX_PARTS)[:MAX_PARTS]
    lengths = (ends[0], ends[1] - ends[0], ends[2] - ends[1])
    low = torch.empty((pieces, count, width), dtype=torch.float32, device=x.device)
    block_w, block_r = (min(_BLOCK_R, max(16, triton.next_power_of_2(n))) for n in (width, rank))
    _shrink_kernel[(tiles, pieces, triton.cdiv(width, block_w))](
        x,
        a,
        slots,
        low,
        x.stride(0),
        a.stride(0),
        count,
        total,
        K=size,
        WIDTH=width,
        PIECE=piece,
        BLOCK_T=block_t,
        BLOCK_W=block_w,
        BLOCK_K=_BLOCK_K,
        num_warps=4,
    )
    _expand_kernel[(tiles, sum(triton.cdiv(n, _BLOCK_N) for n in lengths))](
        low,
        b,
        slots,
        y,
        y.stride(0),
        b.stride(0),
        count,
        total,
        END0=ends[0],
        END1=ends[1],
        END2=ends[2],
        R=rank,
        WIDTH=width,
        PIECES=pieces,
        BLOCK_T=block_t,
        BLOCK_N=_BLOCK_N,
        BLOCK_R=block_r,
        num_warps=4,
    )
