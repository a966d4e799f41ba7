# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Split-KV attention for sequences with few query tokens: the decode rows of a step, and drafts to verify.

Three kernels. The *plan* kernel runs once per step, not once per layer: from the lengths it deals the cached
tokens of all sequences out to about equal work items. The *decode* kernel gives one program to each (item, KV
head); all query heads of the group, and all query tokens, share one ``tl.dot``. A sequence that fits in one
item is finished there. The others are merged either by the program that arrives last, or by a *merge* kernel.

The plan is made on the device since a graph holds the launches: the grid is a bound that depends on shapes
only, programs without an item leave at once, and a short context gets few and wide splits whatever the bound
is.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from gapless.attention.context import AttentionContext, AttentionParams

# Fields of a work item, one 32-byte sector: row, lo, hi (cache positions, half-open), first query token,
# number of query tokens, sequence length, first item of the sequence, number of items of the sequence.
FIELDS = tl.constexpr(8)
LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """``programs`` per multiprocessor is what the plan aims at, ``min_split`` tokens its narrowest split.

    Where the sequences alone occupy most of the device, those of up to ``whole`` tokens are not split: the merge
    would cost more than the split gains (H200, batch 32, context 512: 24 us against 33). Nor is, for the same
    reason, a sequence of up to ``most`` tokens that is at most ``even`` times what a program has to do on average,
    at ``programs`` for each multiprocessor: it takes no longer than the others, which share the same bandwidth
    (batch 32, context 1,024: 40 us against 48; batch 256, context 640: 164 against 179). Longer ones hide the
    merge. And no sequence is split into more items than fill the device once, ``resident`` for each multiprocessor:
    they would only make its merge longer, which one program does, ``merged`` numbers at a time.
    """

    block_n: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 8
    min_split: int = 256
    whole: int = 640
    even: int = 6
    most: int = 2048
    resident: int = 2
    merged: int = 8192
    last_arriver_merges: bool = True

    def merged_at_once(self, rows: int, padded: int) -> int:
        """Partial results of ``rows`` rows and ``padded`` numbers each that a merging program loads together."""
        return max(1, min(16, self.merged // (rows * padded)))


# (compute capability major, padded head size, bytes per element); 0 stands for every other device.
CONFIGS: dict[tuple[int, int, int], DecodeConfig] = {
    (9, 64, 2): DecodeConfig(block_n=128),
    (9, 128, 2): DecodeConfig(),
    (9, 256, 2): DecodeConfig(block_n=32),
    (0, 64, 2): DecodeConfig(),
    (0, 128, 2): DecodeConfig(stages=2),
    (0, 256, 2): DecodeConfig(block_n=32, stages=2),
    (0, 64, 4): DecodeConfig(block_n=32, stages=2),
    (0, 128, 4): DecodeConfig(block_n=32, stages=2),
    (0, 256, 4): DecodeConfig(block_n=16, stages=2),
}


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What one step's layers share.

    Attributes:
        items: ``[W, 8]``, see ``FIELDS``.
        first: ``[1 + S]``, the number of items; then the first item of a sequence with several, else -1.
        counters: ``[W * HK]``, arrivals at a sequence's first item; zero between layers.
    """

    items: torch.Tensor
    first: torch.Tensor
    counters: torch.Tensor


@triton.jit(do_not_specialize=["S", "X", "NC", "MIN_SPLIT", "WHOLE", "EVEN", "MOST", "ONCE"])
def _plan_kernel(
    qsl_ptr, lens_ptr, rows_ptr, items_ptr, first_ptr, counters_ptr, S, X, NC, MIN_SPLIT, WHOLE, EVEN, MOST, ONCE,
    SP: tl.constexpr, WINDOW: tl.constexpr, QMAX: tl.constexpr, BN: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    s = tl.arange(0, SP)
    real = s < S
    start = tl.load(qsl_ptr + s, mask=real, other=0)
    q_len = tl.load(qsl_ptr + s + 1, mask=real, other=0) - start
    seq_len = tl.load(lens_ptr + s, mask=real, other=0)
    row = tl.load(rows_ptr + s, mask=real, other=0)

    lo = tl.zeros((SP,), tl.int32)
    if WINDOW > 0:
        lo = tl.maximum(seq_len - q_len + 1 - WINDOW, 0)
    work = tl.where(real & (q_len > 0) & (q_len <= QMAX), seq_len - lo, 0)
    # sum(cdiv(work, per)) <= total / per + S <= X + S, the number of items there is room for.
    share = tl.cdiv(tl.sum(work, 0), X)
    per = tl.maximum(share, MIN_SPLIT)
    per = tl.cdiv(per, BN) * BN
    n = tl.minimum(tl.cdiv(work, per), ONCE)
    many = tl.sum((work > 0).to(tl.int32), 0) * 5 >= X
    n = tl.where((work > 0) & ((many & (work <= WHOLE)) | ((work <= EVEN * share) & (work <= MOST))), 1, n)
    # Equally wide, and none of them empty: whole tiles may make fewer of them.
    width = tl.cdiv(tl.cdiv(work, tl.maximum(n, 1)), BN) * BN
    n = tl.cdiv(work, tl.maximum(width, 1))
    if FILL:  # decode only: an empty item for each padding token makes its output zero instead of old memory
        pad = real & (q_len <= 0)
        start = tl.where(pad, tl.load(qsl_ptr + S) + tl.cumsum(pad.to(tl.int32), 0) - 1, start)
        q_len = tl.where(pad, 1, q_len)
        seq_len = tl.where(pad, 0, seq_len)
        lo = tl.where(pad, 0, lo)
        n = tl.where(pad, 1, n)

    first = tl.cumsum(n, 0) - n
    tl.store(first_ptr, tl.sum(n, 0))
    tl.store(first_ptr + 1 + s, tl.where(n > 1, first, -1), mask=real)
    for j in range(tl.max(n, 0)):
        item = items_ptr + (first + j) * FIELDS
        mask = j < n
        item_lo = lo + j * width
        tl.store(item + 0, row, mask=mask)
        tl.store(item + 1, item_lo, mask=mask)
        tl.store(item + 2, tl.minimum(item_lo + width, seq_len), mask=mask)
        tl.store(item + 3, start, mask=mask)
        tl.store(item + 4, q_len, mask=mask)
        tl.store(item + 5, seq_len, mask=mask)
        tl.store(item + 6, first, mask=mask)
        tl.store(item + 7, n, mask=mask)
    for c in range(0, NC, SP):
        tl.store(counters_ptr + c + s, tl.zeros((SP,), tl.int32), mask=c + s < NC)


@triton.jit
def _finish(acc, m, lsum, r, head, tok, q_len, out_ptr, sinks_ptr, HQ: tl.constexpr, G: tl.constexpr,
            D: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    """Normalise the rows ``r`` (query token * G + head of the group) and store those that exist."""
    d = tl.arange(0, DP)
    valid = r < q_len * G
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head * G + r % G, mask=valid, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)
        lsum = lsum * shrink + tl.exp2(sink - top)
        acc = acc * shrink[:, None]
    out = acc / tl.where(lsum > 0.0, lsum, 1.0)[:, None]
    place = (tok.to(tl.int64) + r // G) * HQ + head * G + r % G
    mask = valid[:, None] & (d < D)[None, :]
    tl.store(out_ptr + place[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _merge(part_ptr, lse_ptr, out_ptr, sinks_ptr, head, first, n, tok, q_len, r, ROWS: tl.constexpr,
           HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, RB: tl.constexpr,
           CHUNK: tl.constexpr):  # fmt: skip
    """Add up the ``n`` partial results of the rows ``r``, ``CHUNK`` at a time.

    The loads bypass the first-level cache, which is not coherent: other programs may just have written the
    data.
    """
    d = tl.arange(0, DP)
    c = tl.arange(0, CHUNK)
    m = tl.full((RB,), float("-inf"), tl.float32)
    lsum = tl.zeros((RB,), tl.float32)
    acc = tl.zeros((RB, DP), tl.float32)
    for c0 in range(0, n, CHUNK):
        split = c0 + c
        place = ((first.to(tl.int64) + split)[:, None] * HK + head) * ROWS + r[None, :]
        valid = (split < n)[:, None] & (r < q_len * G)[None, :]
        lse = tl.load(lse_ptr + place, mask=valid, other=float("-inf"), cache_modifier=".cg")
        mask = valid[:, :, None] & (d < D)[None, None, :]
        part = part_ptr + place[:, :, None] * D + d[None, None, :]
        x = tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
        top = tl.maximum(m, tl.max(lse, 0))
        safe = tl.where(top == float("-inf"), 0.0, top)
        w = tl.exp2(lse - safe[None, :])
        shrink = tl.exp2(m - safe)
        acc = acc * shrink[:, None] + tl.sum(x * w[:, :, None], 0)
        lsum = lsum * shrink + tl.sum(w, 0)
        m = top
    _finish(acc, m, lsum, r, head, tok, q_len, out_ptr, sinks_ptr, HK * G, G, D, DP)


@triton.jit(do_not_specialize=["table_row"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, items_ptr, first_ptr, counters_ptr, part_ptr, lse_ptr, out_ptr, sinks_ptr,
    scales_ptr, scale, softcap, q_token, q_head, kv_block, kv_token, kv_head, table_row,
    HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, QMAX: tl.constexpr,
    MP: tl.constexpr, RB: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    # Heads run fastest: programs that run together read one stretch of memory.
    head = tl.program_id(0)
    i = tl.program_id(1)
    item = items_ptr + i * FIELDS
    row = tl.load(item)
    lo = tl.load(item + 1)
    hi = tl.load(item + 2)
    tok = tl.load(item + 3)
    q_len = tl.load(item + 4)
    seq_len = tl.load(item + 5)
    first = tl.load(item + 6)
    n = tl.load(item + 7)
    if i >= tl.load(first_ptr):
        return

    r = tl.arange(0, MP)
    d = tl.arange(0, DP)
    j = tl.arange(0, BN)
    q_off = (tok.to(tl.int64) + r // G) * q_token + (head * G + r % G) * q_head
    q_mask = (r < q_len * G)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_off[:, None] + d[None, :], mask=q_mask, other=0.0)
    if scales_ptr is not None:
        scale *= tl.load(scales_ptr + head)
    # A query token sees the positions below `limit`, which for the last one is the whole sequence.
    limit = seq_len - q_len + r // G + 1

    m = tl.full((MP,), float("-inf"), tl.float32)
    lsum = tl.zeros((MP,), tl.float32)
    acc = tl.zeros((MP, DP), tl.float32)
    # The block numbers are fetched one iteration ahead: else every K and V load would wait for a load, and
    # the software pipeline would spend its stages on that.
    table_ptr += row.to(tl.int64) * table_row
    block = tl.load(table_ptr + (lo + j) // B, mask=lo + j < hi, other=0)
    for begin in range(lo, hi, BN):
        pos = begin + j
        inside = pos < hi
        off = block.to(tl.int64) * kv_block + (pos % B) * kv_token + head * kv_head
        # Values beyond the end are masked in the load, not only in the scores: 0 * NaN is NaN.
        mask = inside[:, None]
        if D < DP:
            mask = mask & (d < D)[None, :]
        k = tl.load(k_ptr + off[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + off[:, None] + d[None, :], mask=mask, other=0.0)
        block = tl.load(table_ptr + (pos + BN) // B, mask=pos + BN < hi, other=0)
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if SOFTCAP:
            score = softcap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2E)) + 1.0))
        seen = inside[None, :]
        if QMAX > 1:
            seen = seen & (pos[None, :] < limit[:, None])
            if WINDOW > 0:
                seen = seen & (pos[None, :] >= limit[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        top = tl.maximum(m, tl.max(score, 1))
        safe = top
        if QMAX > 1:  # an item may hold nothing that the earlier query tokens see
            safe = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(m - safe)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        lsum = lsum * shrink + tl.sum(p, 1)
        m = top

    if scales_ptr is not None:
        acc *= tl.load(scales_ptr + HK + head)
    if n == 1:
        _finish(acc, m, lsum, r, head, tok, q_len, out_ptr, sinks_ptr, HK * G, G, D, DP)
    else:
        place = (i.to(tl.int64) * HK + head) * (QMAX * G) + r
        mask = r < q_len * G
        some = lsum > 0.0
        lsum = tl.where(some, lsum, 1.0)
        part = part_ptr + place[:, None] * D + d[None, :]
        tl.store(part, acc / lsum[:, None], mask=mask[:, None] & (d < D)[None, :])
        tl.store(lse_ptr + place, tl.where(some, m + tl.log2(lsum), float("-inf")), mask=mask)
        if LAST:
            # All threads' stores, then one thread's release; its acquire, then all threads' loads (the
            # broadcast of its result has a barrier). The counter goes back to zero for the next layer.
            tl.debug_barrier()
            counter = counters_ptr + first * HK + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == n - 1:
                tl.store(counter, 0)
                rows = tl.arange(0, RB)
                _merge(part_ptr, lse_ptr, out_ptr, sinks_ptr, head, first, n, tok, q_len, rows, QMAX * G,
                       HK, G, D, DP, RB, CHUNK)  # fmt: skip


@triton.jit
def _merge_kernel(
    items_ptr, first_ptr, part_ptr, lse_ptr, out_ptr, sinks_ptr, ROWS: tl.constexpr,
    HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) // ROWS
    r = tl.program_id(0) % ROWS + tl.arange(0, 1)
    first = tl.load(first_ptr + 1 + tl.program_id(1))
    if first < 0:
        return
    item = items_ptr + first * FIELDS
    tok = tl.load(item + 3)
    q_len = tl.load(item + 4)
    n = tl.load(item + 7)
    _merge(part_ptr, lse_ptr, out_ptr, sinks_ptr, head, first, n, tok, q_len, r, ROWS, HK, G, D, DP, 1, CHUNK)


@functools.cache
def device_facts(device: torch.device) -> tuple[int, int]:
    """Compute capability (major) and number of multiprocessors; for the interpreter on a CPU, the least."""
    if device.type != "cuda":
        return 0, 1
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count


def decode_config(device: torch.device, head_size: int, dtype: torch.dtype) -> DecodeConfig:
    major, _ = device_facts(device)
    padded = max(64, triton.next_power_of_2(head_size))
    exact = CONFIGS.get((major, padded, dtype.itemsize))
    return exact or CONFIGS.get((0, padded, dtype.itemsize)) or replace(CONFIGS[(0, 256, 4)], stages=1)


def _get_plan(
    context: AttentionContext, params: AttentionParams, hk: int, qmax: int, cfg: DecodeConfig
) -> DecodePlan:
    """The step's plan: computed by the first layer that needs one of its kind, then reused through the
    scratch."""
    window = params.window or 0
    device = context.seq_lens.device
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    key = f"triton_decode/{window}/{hk}/{qmax}/{cfg}/{capturing}"
    plan = context.scratch.get(key)
    if isinstance(plan, DecodePlan):
        return plan
    s = context.seq_lens.shape[0]
    multiprocessors = device_facts(device)[1]
    extra = max(1, -(-cfg.programs * multiprocessors // hk))
    w = s + extra
    items = torch.empty((w, FIELDS.value), dtype=torch.int32, device=device)
    first = torch.empty(1 + s, dtype=torch.int32, device=device)
    counters = torch.empty(w * hk, dtype=torch.int32, device=device)
    sp = max(64, triton.next_power_of_2(s))
    _plan_kernel[(1,)](
        context.query_start_loc, context.seq_lens, context.rows, items, first, counters,
        s, extra, counters.numel(), cfg.min_split, cfg.whole, cfg.even, cfg.most,
        max(1, cfg.resident * multiprocessors // hk),
        SP=sp, WINDOW=window, QMAX=qmax, BN=cfg.block_n, FILL=context.decode_only, num_warps=4,
    )  # fmt: skip
    plan = DecodePlan(items, first, counters)
    context.scratch[key] = plan
    return plan


def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    context: AttentionContext,
    params: AttentionParams,
    out: torch.Tensor,
    max_query_len: int = 1,
    config: DecodeConfig | None = None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Fill the rows of ``out`` whose sequences have 1 to ``max_query_len`` query tokens; leave the others
    alone.

    If ``context.decode_only``, the outputs of padding tokens become zero.
    """
    _, hq, d = q.shape
    _, _, b, hk, _ = kv_cache.shape
    g = hq // hk
    cfg = config or decode_config(q.device, d, q.dtype)
    plan = _get_plan(context, params, hk, max_query_len, cfg)
    w = plan.items.shape[0]
    rows = max_query_len * g
    dp = max(16, triton.next_power_of_2(d))
    rb = triton.next_power_of_2(rows)
    part = torch.empty((w, hk, rows, d), dtype=torch.float32, device=q.device)
    lse = torch.empty((w, hk, rows), dtype=torch.float32, device=q.device)
    keys = kv_cache[0]
    softcap = params.softcap or 0.0
    scale = params.scale / softcap if softcap else params.scale * LOG2E.value
    _decode_kernel[(hk, w)](
        q, keys, kv_cache[1], context.block_tables, plan.items, plan.first, plan.counters, part, lse,
        out, params.sinks, kv_scales, scale, softcap * LOG2E.value, q.stride(0), q.stride(1), keys.stride(0),
        keys.stride(1), keys.stride(2), context.block_tables.stride(0), HK=hk, G=g, D=d, DP=dp, B=b,
        QMAX=max_query_len, MP=max(16, rb), RB=rb, CHUNK=cfg.merged_at_once(rb, dp), BN=cfg.block_n,
        WINDOW=params.window or 0, SOFTCAP=bool(softcap), LAST=cfg.last_arriver_merges, num_warps=cfg.warps,
        num_stages=cfg.stages,
    )  # fmt: skip
    if not cfg.last_arriver_merges:
        _merge_kernel[(hk * rows, plan.first.shape[0] - 1)](
            plan.items, plan.first, part, lse, out, params.sinks,
            ROWS=rows, HK=hk, G=g, D=d, DP=dp, CHUNK=max(1, 4096 // dp), num_warps=4,
        )  # fmt: skip
