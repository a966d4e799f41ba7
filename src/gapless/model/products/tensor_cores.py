# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The kernel of products on tensor cores, with few tokens or some hundred.

**Split K.** Programs of one tile leave fp32 partials; the last to arrive adds them in the order of their parts, so
that the result does not depend on who was last. It sets the counter back to zero, for the next launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.device.dependent_launch import _prefetch
from gapless.model.products.fusion import GLU, RESIDUAL, _gate


@triton.jit
def _scales(sq_ptr, m, inside, eps, SQ, K: tl.constexpr, SQP: tl.constexpr):
    """1 / root mean square of the tokens ``m``, from the sums of squares of the tiles of the residual."""
    j = tl.arange(0, SQP)
    mask = inside[:, None] & (j < SQ)[None, :]
    squares = tl.load(sq_ptr + m[:, None] * SQ + j[None, :], mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit(do_not_specialize=["M", "SQ"])
def _dot_kernel(
    x_ptr, w_ptr, bias_ptr, sq_ptr, res_ptr, norm_ptr, out_ptr, next_ptr, sq_out_ptr, part_ptr, count_ptr, M, SQ,
    eps, N: tl.constexpr, K: tl.constexpr, SQP: tl.constexpr, OP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, S: tl.constexpr, PRE: tl.constexpr, PF: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr, ACT: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """The weights are the left operand: their tile has the 64 rows that wgmma asks for, the tokens may be few."""
    TILES: tl.constexpr = (N + BN - 1) // BN
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    EVEN_N: tl.constexpr = N % BN == 0
    EVEN_K: tl.constexpr = K % BK == 0
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    # Programs that share weights run side by side.
    m_tile = tl.program_id(0)
    tile = tl.program_id(1) // S
    part = tl.program_id(1) % S
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()

    row = tl.arange(0, BN)
    col = tl.arange(0, BK)
    n = tile * BN + row
    begin = part * BLOCKS // S
    end = (part + 1) * BLOCKS // S
    w_off = row[:, None] * K + col[None, :]
    w_base = w_ptr + tile.to(tl.int64) * (BN * K) + begin * BK
    if OP == GLU:
        up_base = w_base + N * K
    w_mask = (n < N)[:, None] & (col < K)[None, :]
    if PRE:
        in_first = (n < N)[:, None] & (begin * BK + col < K)[None, :]
        w_first = tl.load(w_base + w_off, mask=in_first, other=0.0, eviction_policy="evict_first")
        if OP == GLU:
            up_first = tl.load(up_base + w_off, mask=in_first, other=0.0, eviction_policy="evict_first")
    if PF > 0 and EVEN_N:
        _prefetch(w_base, K, BN, PF, THREADS)
        if OP == GLU:
            _prefetch(up_base, K, BN, PF, THREADS)
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()

    m = m_tile * BM + tl.arange(0, BM)
    m_in = m < M
    x_off = m[:, None] * K + col[None, :]
    x_base = x_ptr + begin * BK
    if PRE:
        x_first = tl.load(x_base + x_off, mask=m_in[:, None] & (begin * BK + col < K)[None, :], other=0.0)
    if sq_ptr is not None:
        scale = _scales(sq_ptr, m, m_in, eps, SQ, K, SQP)

    acc = tl.zeros((BN, BM), tl.float32)
    if OP == GLU:
        up = tl.zeros((BN, BM), tl.float32)
    for b in range(PRE, end - begin):
        k = b * BK
        x_mask = m_in[:, None]
        if not EVEN_K:
            inside = ((begin + b) * BK + col < K)[None, :]
            x_mask = x_mask & inside
            w_mask = (n < N)[:, None] & inside
        if EVEN_K and EVEN_N:
            w = tl.load(w_base + k + w_off, eviction_policy="evict_first")
        elif EVEN_K:
            w = tl.load(w_base + k + w_off, mask=(n < N)[:, None], other=0.0, eviction_policy="evict_first")
        else:
            w = tl.load(w_base + k + w_off, mask=w_mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_base + k + x_off, mask=x_mask, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if OP == GLU:
            if EVEN_K and EVEN_N:
                v = tl.load(up_base + k + w_off, eviction_policy="evict_first")
            elif EVEN_K:
                v = tl.load(up_base + k + w_off, mask=(n < N)[:, None], other=0.0, eviction_policy="evict_first")
            else:
                v = tl.load(up_base + k + w_off, mask=w_mask, other=0.0, eviction_policy="evict_first")
            up = tl.dot(v, tl.trans(x), up, input_precision="ieee")
    if PRE:  # last, so that the loop's loads are on their way meanwhile
        acc = tl.dot(w_first, tl.trans(x_first), acc, input_precision="ieee")
        if OP == GLU:
            up = tl.dot(up_first, tl.trans(x_first), up, input_precision="ieee")

    if S > 1:
        SIZE: tl.constexpr = BN * BM
        place = row[:, None] * BM + tl.arange(0, BM)[None, :]
        HALVES: tl.constexpr = 2 if OP == GLU else 1
        which = m_tile * TILES + tile
        base = part_ptr + which.to(tl.int64) * (S * HALVES * SIZE)
        mine = base + part * (HALVES * SIZE) + place
        # Tokens beyond M are stored too: a mask along the contiguous dimension would halve the width of an access.
        tl.store(mine, acc)
        if OP == GLU:
            tl.store(mine + SIZE, up)
        # All threads' stores, then one thread's release; its acquire, then all threads' loads (the broadcast of
        # its result has a barrier). The loads bypass the first-level cache, which is not coherent.
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + which, 1, sem="acq_rel") != S - 1:
            return
        tl.store(count_ptr + which, 0)
        acc = tl.zeros((BN, BM), tl.float32)
        for s in tl.static_range(S):
            acc += tl.load(base + s * (HALVES * SIZE) + place, cache_modifier=".cg")
        if OP == GLU:
            up = tl.zeros((BN, BM), tl.float32)
            for s in tl.static_range(S):
                up += tl.load(base + (s * HALVES + 1) * SIZE + place, cache_modifier=".cg")

    if OP == RESIDUAL:
        sq_out_ptr += tile
    _finish_tile(
        acc, up if OP == GLU else acc, scale if sq_ptr is not None else acc, n, m, M, bias_ptr, sq_ptr, res_ptr,
        norm_ptr, out_ptr, next_ptr, sq_out_ptr, N, TILES, OP, ACT, SHIFT, dtype,
    )  # fmt: skip


@triton.jit
def _finish_tile(
    acc, up, scale, n, m, M, bias_ptr, sq_ptr, res_ptr, norm_ptr, out_ptr, next_ptr, sq_out_ptr,
    N: tl.constexpr, TILES: tl.constexpr, OP: tl.constexpr, ACT: tl.constexpr, SHIFT: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Epilogue of a tile ``[BN, BM]``."""
    n_in = n < N
    mask = n_in[:, None] & (m < M)[None, :]
    place = m[None, :].to(tl.int64) * N + n[:, None]
    if sq_ptr is not None:
        acc *= scale[None, :]
        if OP == GLU:
            up *= scale[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n_in, other=0.0).to(tl.float32)[:, None]
    if OP == GLU:
        tl.store(out_ptr + place, _gate(acc, up, ACT, dtype), mask=mask)
    elif OP == RESIDUAL:
        residual = tl.load(res_ptr + place, mask=mask, other=0.0).to(tl.float32)
        total = (residual + acc.to(dtype).to(tl.float32)).to(dtype)
        tl.store(out_ptr + place, total, mask=mask)
        wide = total.to(tl.float32)
        weight = tl.load(norm_ptr + n, mask=n_in, other=0.0).to(tl.float32)
        tl.store(next_ptr + place, (wide * (1.0 + weight if SHIFT else weight)[:, None]).to(dtype), mask=mask)
        tl.store(sq_out_ptr + m * TILES, tl.sum(wide * wide, 0), mask=m < M)
    else:
        tl.store(out_ptr + place, acc.to(dtype), mask=mask)
