# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""`gapless.model.parts.sparse_attention` on the GPU: a kernel for the scores, torch's top-k, and a kernel that attends.

Grids depend on shapes only: the scores have a column for each block that a context of the longest kind could have.
Programs for columns that a token does not reach write -inf and read nothing. The second kernel gathers the chosen
tokens, and so reads a bounded number of keys however long the context is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.model.parts.sparse_attention import SparseParams

TILE = 64
"""Blocks that a program scores, and keys that it attends to, at a time."""


@triton.jit
def _score_kernel(
    q_ptr, cache_ptr, tables_ptr, rows_ptr, positions_ptr, out_ptr, scale, table_stride, columns,
    HI: tl.constexpr, DI: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * TILE + tl.arange(0, TILE)
    complete = ((tl.load(positions_ptr + t) + 1) // C).to(tl.int32)
    scores = tl.full((TILE,), float("-inf"), tl.float32)
    if tl.program_id(1) * TILE < complete:
        row = tl.load(rows_ptr + t).to(tl.int64)
        there = blocks < complete
        h = tl.arange(0, BH)
        d = tl.arange(0, BD)
        q = tl.load(
            q_ptr + (t * HI + h[:, None]) * DI + d[None, :], mask=(h[:, None] < HI) & (d[None, :] < DI), other=0.0
        )
        ends = blocks * C + C - 1
        block = tl.load(tables_ptr + row * table_stride + ends // B, mask=there, other=0).to(tl.int64)
        place = (block * B + ends % B) * (2 * DI) + DI
        keys = tl.load(cache_ptr + place[None, :] + d[:, None], mask=there[None, :] & (d[:, None] < DI), other=0.0)
        product = tl.dot(q, keys.to(q.dtype), input_precision="ieee")
        total = tl.sum(tl.maximum(product, 0.0), 0) * scale
        scores = tl.where(there, total, float("-inf"))
    tl.store(out_ptr + t * columns + blocks, scores, mask=blocks < columns)


@triton.jit
def _attend_kernel(
    q_ptr, kv_ptr, tables_ptr, rows_ptr, positions_ptr, best_ptr, out_ptr, scales_ptr, scale, q_token, table_stride,
    values_at, best_stride, K: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group: tl.constexpr = HQ // HK
    position = tl.load(positions_ptr + t).to(tl.int32)
    row = tl.load(rows_ptr + t).to(tl.int64)
    complete = (position + 1) // C
    chosen = tl.minimum(complete, K) * C  # tokens of chosen blocks; the tail follows
    count = chosen + position + 1 - complete * C
    h = tl.arange(0, BH)
    d = tl.arange(0, BD)
    in_h = (h[:, None] < group) & (d[None, :] < D)
    q = tl.load(q_ptr + t * q_token + (head * group + h[:, None]) * D + d[None, :], mask=in_h, other=0.0)
    if scales_ptr is not None:
        scale *= tl.load(scales_ptr + head)
    best = tl.full((BH,), float("-inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, BD), tl.float32)
    for first in range(0, count, TILE):
        i = first + tl.arange(0, TILE)
        there = i < count
        which = tl.load(best_ptr + t * best_stride + i // C, mask=i < chosen, other=0).to(tl.int32)
        at = tl.where(i < chosen, which * C + i % C, complete * C + i - chosen)
        block = tl.load(tables_ptr + row * table_stride + at // B, mask=there, other=0).to(tl.int64)
        place = ((block * B + at % B) * HK + head) * D
        keys = tl.load(kv_ptr + place[None, :] + d[:, None], mask=there[None, :] & (d[:, None] < D), other=0.0)
        scores = tl.dot(q, keys.to(q.dtype), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        fade = tl.exp(best - new)
        weights = tl.exp(scores - new[:, None])
        values = tl.load(
            kv_ptr + values_at + place[:, None] + d[None, :], mask=there[:, None] & (d[None, :] < D), other=0.0
        )
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(q.dtype), values.to(q.dtype), input_precision="ieee")
        best = new
    if scales_ptr is not None:
        acc *= tl.load(scales_ptr + HK + head)
    out = acc / total[:, None]
    to = out_ptr + (t * HQ + head * group + h[:, None]) * D + d[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=in_h)


def best_blocks(
    index_q: torch.Tensor,
    index_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: SparseParams,
) -> torch.Tensor:
    """int64 ``[T, K']``: the chosen blocks of each token, the best first; beyond the complete ones anything.

    K' is K, or as many blocks as a row of the table can hold.
    """
    tokens, heads, size = index_q.shape
    columns = block_tables.shape[1] * index_cache.shape[1] // params.ratio
    scores = torch.empty(tokens, columns, dtype=torch.float32, device=index_q.device)
    _score_kernel[(tokens, triton.cdiv(columns, TILE))](
        index_q, index_cache, block_tables, rows, positions, scores, size**-0.5, block_tables.stride(0), columns,
        HI=heads, DI=size, B=index_cache.shape[1], C=params.ratio, BH=max(16, triton.next_power_of_2(heads)),
        BD=max(16, triton.next_power_of_2(size)), TILE=TILE, num_warps=4,
    )  # fmt: skip
    return scores.topk(min(params.blocks, columns), dim=1).indices


def sparse_attend(
    q: torch.Tensor,
    index_q: torch.Tensor,
    kv_cache: torch.Tensor,
    index_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: SparseParams,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `gapless.model.parts.sparse_attention.sparse_attend`, by each token's row and position. ``[T, HQ, D]``.

    Args:
        rows, positions: int64 ``[T]``. A padding token has the null row and position 0; its output is never used.
    """
    if not (index_q.is_contiguous() and kv_cache.is_contiguous() and index_cache.is_contiguous()):
        raise ValueError("index queries and caches must be contiguous")
    if q.stride(-1) != 1 or q.stride(1) != q.shape[2]:
        raise ValueError("the heads of one query token must be contiguous")
    best = best_blocks(index_q, index_cache, block_tables, rows, positions, params)
    tokens, heads, size = q.shape
    kv_heads = kv_cache.shape[3]
    out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
    _attend_kernel[(tokens, kv_heads)](
        q, kv_cache, block_tables, rows, positions, best, out, kv_scales, params.scale, q.stride(0),
        block_tables.stride(0), kv_cache.stride(0), best.stride(0), K=best.shape[1],
        HQ=heads, HK=kv_heads, D=size, B=kv_cache.shape[2],
        C=params.ratio, BH=max(16, triton.next_power_of_2(heads // kv_heads)),
        BD=max(16, triton.next_power_of_2(size)), TILE=TILE, num_warps=4,
    )  # fmt: skip
    return out
