# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The kernel of products with one token, on plain arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.device.dependent_launch import _prefetch
from gapless.model.products.fusion import GLU, RESIDUAL, _gate


@triton.jit(do_not_specialize=["SQ"])
def _one_token_kernel(
    x_ptr, w_ptr, bias_ptr, sq_ptr, res_ptr, norm_ptr, out_ptr, next_ptr, sq_out_ptr, SQ, eps,
    N: tl.constexpr, K: tl.constexpr, SQP: tl.constexpr, OP: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRE: tl.constexpr, PF: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr, ACT: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """One token needs no tensor core: weights go from memory to registers, many loads of 16 bytes in flight."""
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    tile = tl.program_id(0)
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, BN)
    col = tl.arange(0, BK)
    n = tile * BN + row
    n_in = n < N
    w_base = w_ptr + tile.to(tl.int64) * (BN * K)
    w_off = row[:, None] * K + col[None, :]
    in_first = n_in[:, None] & (col < K)[None, :]
    if PRE:
        w_first = tl.load(w_base + w_off, mask=in_first, other=0.0, eviction_policy="evict_first")
        if OP == GLU:
            up_first = tl.load(w_base + N * K + w_off, mask=in_first, other=0.0, eviction_policy="evict_first")
    if PF > 0 and N % BN == 0:
        _prefetch(w_base, K, BN, PF, THREADS)
        if OP == GLU:
            _prefetch(w_base + N * K, K, BN, PF, THREADS)
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()

    if sq_ptr is not None:
        j = tl.arange(0, SQP)
        squares = tl.load(sq_ptr + j, mask=j < SQ, other=0.0)
    if OP == RESIDUAL:
        residual = tl.load(res_ptr + n, mask=n_in, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + n, mask=n_in, other=0.0).to(tl.float32)
    # Sums stay spread over the threads until the end.
    acc = tl.zeros((BN, BK), tl.float32)
    if OP == GLU:
        up = tl.zeros((BN, BK), tl.float32)
    for b in tl.static_range(BLOCKS):
        k = b * BK
        x = tl.load(x_ptr + k + col, mask=k + col < K, other=0.0).to(tl.float32)[None, :]
        mask = n_in[:, None] & (k + col < K)[None, :]
        if PRE and b == 0:
            acc += w_first.to(tl.float32) * x
            if OP == GLU:
                up += up_first.to(tl.float32) * x
        else:
            w = tl.load(w_base + k + w_off, mask=mask, other=0.0, eviction_policy="evict_first")
            if OP == GLU:
                v = tl.load(w_base + N * K + k + w_off, mask=mask, other=0.0, eviction_policy="evict_first")
                up += v.to(tl.float32) * x
            acc += w.to(tl.float32) * x

    y = tl.sum(acc, 1)
    if sq_ptr is not None:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= scale
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n_in, other=0.0).to(tl.float32)
    if OP == GLU:
        z = tl.sum(up, 1)
        if sq_ptr is not None:
            z *= scale
        tl.store(out_ptr + n, _gate(y, z, ACT, dtype), mask=n_in)
    elif OP == RESIDUAL:
        total = (residual + y.to(dtype).to(tl.float32)).to(dtype)
        tl.store(out_ptr + n, total, mask=n_in)
        wide = total.to(tl.float32)
        tl.store(next_ptr + n, (wide * (1.0 + weight if SHIFT else weight)).to(dtype), mask=n_in)
        tl.store(sq_out_ptr + tile, tl.sum(wide * wide, 0))
    else:
        tl.store(out_ptr + n, y.to(dtype), mask=n_in)
