# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Ragged attention for sequences with many query tokens: prompts, or chunks of prompts.

A program's tile holds the query tokens x query heads of one KV head, ``BM`` rows in all, so that each key and
value is fetched once for the whole group, and the triangle that causality cuts out of a tile stays narrow.
The grid is a bound that depends on shapes only; a program finds its sequence on the device, and leaves at
once if it has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gapless.attention.context import AttentionContext, AttentionParams
from gapless.attention.triton_decode import LOG2E, device_facts


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    block_m: int = 64
    block_n: int = 32
    warps: int = 4
    stages: int = 2


# (compute capability major, padded head size, bytes per element); 0 stands for every other device.
CONFIGS: dict[tuple[int, int, int], PrefillConfig] = {
    (9, 64, 2): PrefillConfig(128, 128, 8, 3),
    (9, 128, 2): PrefillConfig(128, 64, 8, 3),
    (9, 256, 2): PrefillConfig(128, 32, 8, 2),
    (0, 64, 2): PrefillConfig(128, 64, 4, 2),
    (0, 128, 2): PrefillConfig(128, 32, 4, 2),
    (0, 256, 2): PrefillConfig(64, 32, 4, 2),
    (0, 64, 4): PrefillConfig(64, 32, 4, 2),
    (0, 128, 4): PrefillConfig(32, 16, 4, 2),
    (0, 256, 4): PrefillConfig(16, 16, 4, 1),
}


@triton.jit
def _attend_range(
    acc, m, lsum, q, k_ptr, v_ptr, table_ptr, begin, end, hi, limit, head_off, scale, softcap, kv_block,
    kv_token, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the positions [begin, end). Unless MASKED, every row sees them all."""
    d = tl.arange(0, DP)
    j = tl.arange(0, BN)
    # Block numbers one iteration ahead, as in the decode kernel.
    block = tl.load(table_ptr + (begin + j) // B, mask=begin + j < hi, other=0)
    for at in range(begin, end, BN):
        pos = at + j
        off = block.to(tl.int64) * kv_block + (pos % B) * kv_token + head_off
        k_at = k_ptr + off[:, None] + d[None, :]
        v_at = v_ptr + off[:, None] + d[None, :]
        if MASKED:
            mask = (pos < hi)[:, None]
            if D < DP:
                mask = mask & (d < D)[None, :]
            k = tl.load(k_at, mask=mask, other=0.0)
            v = tl.load(v_at, mask=mask, other=0.0)
        elif D < DP:
            k = tl.load(k_at, mask=(d < D)[None, :], other=0.0)
            v = tl.load(v_at, mask=(d < D)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        block = tl.load(table_ptr + (pos + BN) // B, mask=pos + BN < hi, other=0)
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        factor = scale
        if SOFTCAP:
            score = softcap * (1.0 - 2.0 / (tl.exp2(score * scale * (2.0 * LOG2E)) + 1.0))
            factor = 1.0
        if MASKED:
            seen = pos[None, :] < limit[:, None]
            if WINDOW > 0:
                seen = seen & (pos[None, :] >= limit[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        top = tl.maximum(m, tl.max(score, 1) * factor)
        safe = top
        if MASKED:  # a window may hide a whole block from the later rows
            safe = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(score * factor - safe[:, None])
        shrink = tl.exp2(m - safe)
        lsum = lsum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        m = top
    return acc, m, lsum


@triton.jit(do_not_specialize=["S", "T", "table_row"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, qsl_ptr, lens_ptr, rows_ptr, out_ptr, sinks_ptr, scales_ptr,
    S, T, scale, softcap, q_token, q_head, kv_block, kv_token, kv_head, table_row,
    SP: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    TOK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MIN_QUERY: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    # The tiles at a sequence's end have the longest context: they start first, so that no long one starts
    # last.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)

    # Sequence s owns the tiles from query_start_loc[s] // TOK + s on: never too few, at most one too many.
    # One load and a count find it, which is quicker than the dependent loads of a binary search. Number S,
    # past the last sequence, owns the padding tokens.
    s = tl.arange(0, SP)
    starts = tl.load(qsl_ptr + s, mask=s <= S, other=0)
    seq = tl.sum(((s <= S) & (starts // TOK + s <= tile)).to(tl.int32), 0) - 1
    begin = tl.load(qsl_ptr + seq)
    end = tl.load(qsl_ptr + seq + 1, mask=seq < S, other=T)
    q_len = end - begin
    t0 = (tile - begin // TOK - seq) * TOK
    if t0 >= q_len:
        return

    r = tl.arange(0, BM)
    d = tl.arange(0, DP)
    t = t0 + r // G
    valid = (t < q_len) & (r < TOK * G)
    mask = valid[:, None] & (d < D)[None, :]
    place = (begin.to(tl.int64) + t) * (HK * G) + head * G + r % G
    out_at = out_ptr + place[:, None] * D + d[None, :]
    if seq >= S:
        tl.store(out_at, tl.zeros((BM, DP), out_ptr.dtype.element_ty), mask=mask)
        return
    if q_len < MIN_QUERY:  # the decode kernel does these
        return

    seq_len = tl.load(lens_ptr + seq)
    table_ptr += tl.load(rows_ptr + seq).to(tl.int64) * table_row
    q_off = (begin.to(tl.int64) + t) * q_token + (head * G + r % G) * q_head
    q = tl.load(q_ptr + q_off[:, None] + d[None, :], mask=mask, other=0.0)

    lowest = seq_len - q_len + t0  # position of the tile's first query token
    hi = tl.minimum(lowest + TOK, seq_len)
    limit = lowest + r // G + 1
    m = tl.full((BM,), float("-inf"), tl.float32)
    lsum = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DP), tl.float32)
    head_off = head * kv_head
    if scales_ptr is not None:
        scale *= tl.load(scales_ptr + head)
    lo = 0
    if WINDOW > 0:
        lo = tl.maximum(lowest + 1 - WINDOW, 0)
    else:
        middle = (lowest + 1) // BN * BN
        acc, m, lsum = _attend_range(
            acc, m, lsum, q, k_ptr, v_ptr, table_ptr, 0, middle, hi, limit, head_off, scale, softcap,
            kv_block, kv_token, D, DP, B, BN, WINDOW, SOFTCAP, False,
        )  # fmt: skip
        lo = middle
    acc, m, lsum = _attend_range(
        acc, m, lsum, q, k_ptr, v_ptr, table_ptr, lo, hi, hi, limit, head_off, scale, softcap, kv_block,
        kv_token, D, DP, B, BN, WINDOW, SOFTCAP, True,
    )  # fmt: skip

    if scales_ptr is not None:
        acc *= tl.load(scales_ptr + HK + head)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head * G + r % G).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)
        lsum = lsum * shrink + tl.exp2(sink - top)
        acc = acc * shrink[:, None]
    acc = acc / tl.where(lsum > 0.0, lsum, 1.0)[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)


def prefill_config(device: torch.device, head_size: int, dtype: torch.dtype) -> PrefillConfig:
    major, _ = device_facts(device)
    padded = max(64, triton.next_power_of_2(head_size))
    exact = CONFIGS.get((major, padded, dtype.itemsize))
    return exact or CONFIGS.get((0, padded, dtype.itemsize)) or PrefillConfig(16, 16, 4, 1)


def prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    context: AttentionContext,
    params: AttentionParams,
    out: torch.Tensor,
    min_query_len: int = 1,
    config: PrefillConfig | None = None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Fill the rows of sequences with ``min_query_len`` query tokens or more; zero those of padding."""
    total, hq, d = q.shape
    _, _, b, hk, _ = kv_cache.shape
    g = hq // hk
    cfg = config or prefill_config(q.device, d, q.dtype)
    bm = max(cfg.block_m, triton.next_power_of_2(g))
    tok = bm // g
    s = context.seq_lens.shape[0]
    keys = kv_cache[0]
    softcap = params.softcap or 0.0
    scale = params.scale / softcap if softcap else params.scale * LOG2E.value
    _prefill_kernel[(hk, total // tok + s + 1)](
        q, keys, kv_cache[1], context.block_tables, context.query_start_loc, context.seq_lens, context.rows,
        out, params.sinks, kv_scales, s, total, scale, softcap * LOG2E.value, q.stride(0), q.stride(1), keys.stride(0),
        keys.stride(1), keys.stride(2), context.block_tables.stride(0),
        SP=max(64, triton.next_power_of_2(s + 1)), HK=hk, G=g, D=d, DP=max(16, triton.next_power_of_2(d)),
        B=b, TOK=tok, BM=bm, BN=cfg.block_n, MIN_QUERY=min_query_len, WINDOW=params.window or 0,
        SOFTCAP=bool(softcap), num_warps=cfg.warps, num_stages=cfg.stages,
    )  # fmt: skip
