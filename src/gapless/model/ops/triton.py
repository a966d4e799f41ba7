"""The operations of ``ops_reference`` as Triton kernels, one launch each: the same signatures and rounding.

A decode step has a few hundred of them, each bound by latency, so every kernel loads all that it needs
before the first use. All of them can be captured in a graph.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.attention.kv_format_triton import encode

_HEADS = 8


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    eps,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    SCALING: tl.constexpr,
    inner_ptr=None,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if inner_ptr is not None:
        first = x.to(tl.float32)
        own = tl.rsqrt(tl.sum(first * first, 0) / size + eps)
        inner = tl.load(inner_ptr + column, mask=inside, other=0.0)
        x = _scaled(first * own, inner, SCALING, out_ptr.dtype.element_ty)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * size + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = _scaled(wide * scale, weight, SCALING, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + column, normed, mask=inside)


@triton.jit
def _act_mul_kernel(x_ptr, out_ptr, stride, size: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + size + column, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    acted = _act(gate, ACT).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, (acted * up).to(dtype), mask=inside)


@triton.jit
def _act(x, ACT: tl.constexpr):
    """silu, gelu, gelu by tanh."""
    if ACT == 0:
        y = x / (1.0 + tl.exp(-x))
    elif ACT == 1:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return y


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_ptr"])
def _rope_kernel(
    qkv_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cache_ptr,
    scales_ptr,
    slot_ptr,
    out_ptr,
    qkv_stride,
    cos_stride,
    sin_stride,
    cache_stride_kv,
    cache_stride_block,
    cache_stride_token,
    cache_stride_head,
    eps,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # half of the rotary dimensions
    BLOCK_SIZE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,  # 0 if every dimension rotates
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    SCALING: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One token and up to HEADS heads that are all queries, all keys or all values."""
    Q_PARTS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    K_PARTS: tl.constexpr = (HK + HEADS - 1) // HEADS
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    is_q = part < Q_PARTS
    is_v = part >= Q_PARTS + K_PARTS
    first = tl.where(is_q, part, tl.where(is_v, part - Q_PARTS - K_PARTS, part - Q_PARTS)) * HEADS
    heads = tl.where(is_q, HQ, HK)
    base = tl.where(is_q, 0, tl.where(is_v, HQ + HK, HQ))

    head = first + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < heads) & (column < HALF)
    at_a = 2 * column if PAIRS else column
    at_b = at_a + 1 if PAIRS else column + HALF
    source = qkv_ptr + token * qkv_stride + (base + head) * D
    a = tl.load(source + at_a, mask=inside, other=0.0)
    b = tl.load(source + at_b, mask=inside, other=0.0)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * cos_stride + column, mask=column < HALF, other=0.0)
    sin = tl.load(sin_ptr + position * sin_stride + column, mask=column < HALF, other=0.0)
    if NORM:
        weight_a = _either(is_q, q_weight_ptr, k_weight_ptr, at_a, 2 * HALF)
        weight_b = _either(is_q, q_weight_ptr, k_weight_ptr, at_b, 2 * HALF)
    if REST_BLOCK > 0:
        rest_column = tl.arange(0, REST_BLOCK)[None, :] + 2 * HALF
        rest_inside = (head < heads) & (rest_column < D)
        rest = tl.load(
            qkv_ptr + token * qkv_stride + (base + head) * D + rest_column, mask=rest_inside, other=0.0
        )
        if NORM:
            weight_rest = _either(is_q, q_weight_ptr, k_weight_ptr, rest_column, D)

    if not is_v:
        if NORM:
            wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
            square = tl.sum(wide_a * wide_a + wide_b * wide_b, 1)
            if REST_BLOCK > 0:
                wide_rest = rest.to(tl.float32)
                square += tl.sum(wide_rest * wide_rest, 1)
            scale = tl.rsqrt(square / D + eps)[:, None]
            a = _scaled(wide_a * scale, weight_a, SCALING, dtype)
            b = _scaled(wide_b * scale, weight_b, SCALING, dtype)
            if REST_BLOCK > 0:
                rest = _scaled(wide_rest * scale, weight_rest, SCALING, dtype)
        # One product at a time, each rounded to the common dtype of the table and qkv.
        product: tl.constexpr = dtype if cos_ptr.dtype.element_ty == dtype else tl.float32
        wide_cos, wide_sin = cos.to(tl.float32), sin.to(tl.float32)
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        a_cos = (wide_a * wide_cos).to(product).to(tl.float32)
        b_sin = (wide_b * wide_sin).to(product).to(tl.float32)
        b_cos = (wide_b * wide_cos).to(product).to(tl.float32)
        a_sin = (wide_a * wide_sin).to(product).to(tl.float32)
        a = (a_cos - b_sin).to(dtype)
        b = (b_cos + a_sin).to(dtype)

    if is_q:
        target = out_ptr + (token * HQ + head) * D
        tl.store(target + at_a, a, mask=inside)
        tl.store(target + at_b, b, mask=inside)
        if REST_BLOCK > 0:
            tl.store(out_ptr + (token * HQ + head) * D + rest_column, rest, mask=rest_inside)
    else:
        place = (slot // BLOCK_SIZE) * cache_stride_block + (slot % BLOCK_SIZE) * cache_stride_token
        place += is_v.to(tl.int64) * cache_stride_kv
        kept: tl.constexpr = cache_ptr.dtype.element_ty
        cached = cache_ptr + place + head * cache_stride_head
        of_scale = head + is_v.to(tl.int32) * HK
        tl.store(cached + at_a, encode(a, kept, scales_ptr, of_scale, head < heads), mask=inside)
        tl.store(cached + at_b, encode(b, kept, scales_ptr, of_scale, head < heads), mask=inside)
        if REST_BLOCK > 0:
            coded = encode(rest, kept, scales_ptr, of_scale, head < heads)
            tl.store(cache_ptr + place + head * cache_stride_head + rest_column, coded, mask=rest_inside)


@triton.jit
def _either(is_q, q_ptr, k_ptr, column, size):
    q = tl.load(q_ptr + column, mask=column < tl.where(is_q, size, 0), other=0.0)
    k = tl.load(k_ptr + column, mask=column < tl.where(is_q, 0, size), other=0.0)
    return tl.where(is_q, q, k)


@triton.jit
def _scaled(x, weight, SCALING: tl.constexpr, dtype: tl.constexpr):
    if SCALING == 1:
        return (x * (1.0 + weight.to(tl.float32))).to(dtype)
    if SCALING == 2:
        return (x * weight.to(tl.float32)).to(dtype)
    return (x.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, scaling: int = 0) -> torch.Tensor:
    """See ``ops_reference.rms_norm``. x must be contiguous but for the stride of its rows."""
    return _rms_norm(x, None, weight, eps, scaling)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scaling: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``ops_reference.add_rms_norm``."""
    return _rms_norm(x, residual, weight, eps, scaling)


def norm_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, inner: torch.Tensor, weight: torch.Tensor, eps: float, scaling: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``ops_reference.norm_add_rms_norm``."""
    return _rms_norm(x, residual, weight, eps, scaling, inner)


def _rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scaling: int,
    inner: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[-1]
    rows = _rows(x)
    other = rows if residual is None else _rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(size)
    if rows.shape[0]:
        _rms_norm_kernel[(rows.shape[0],)](
            rows,
            other,
            weight,
            out,
            total,
            rows.stride(0),
            other.stride(0),
            eps,
            size=size,
            BLOCK=block,
            ADD=residual is not None,
            SCALING=int(scaling),
            inner_ptr=inner,
            num_warps=min(16, max(1, block // 512)),
        )
    return out, total


def act_mul(gate_up: torch.Tensor, activation: int = 0) -> torch.Tensor:
    """See ``ops_reference.act_mul``."""
    size = gate_up.shape[-1] // 2
    rows = _rows(gate_up)
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    if rows.shape[0]:
        _act_mul_kernel[(rows.shape[0], triton.cdiv(size, block))](
            rows, out, rows.stride(0), size=size, BLOCK=block, ACT=activation, num_warps=4
        )
    return out


def rope_qk_norm_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    scaling: int = 0,
    kv_scales: torch.Tensor | None = None,
    pairs: bool = False,
) -> torch.Tensor:
    """See ``ops_reference.rope_qk_norm_kv_write``.

    Only the first half of a table's columns is read. Either both q and k are normed, or neither is.
    """
    tokens, size, half = qkv.shape[0], kv_cache.shape[4], cos.shape[1] // 2
    assert all(tensor.stride(-1) == 1 for tensor in (qkv, kv_cache, cos, sin))
    assert (q_norm_weight is None) == (k_norm_weight is None)
    assert cos.dtype == sin.dtype
    assert cos.dtype in (qkv.dtype, torch.float32)
    out = torch.empty((tokens, num_heads, size), dtype=qkv.dtype, device=qkv.device)
    heads = min(_HEADS, triton.next_power_of_2(max(num_heads, num_kv_heads)))
    parts = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    rest = size - 2 * half
    if tokens:
        _rope_kernel[(tokens, parts)](
            qkv,
            positions,
            cos,
            sin,
            qkv if q_norm_weight is None else q_norm_weight,
            qkv if k_norm_weight is None else k_norm_weight,
            kv_cache,
            kv_scales,
            slot_mapping,
            out,
            qkv.stride(0),
            cos.stride(0),
            sin.stride(0),
            kv_cache.stride(0),
            kv_cache.stride(1),
            kv_cache.stride(2),
            kv_cache.stride(3),
            eps,
            HQ=num_heads,
            HK=num_kv_heads,
            D=size,
            HALF=half,
            BLOCK_SIZE=kv_cache.shape[2],
            HALF_BLOCK=triton.next_power_of_2(half),
            REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
            HEADS=heads,
            NORM=q_norm_weight is not None,
            SCALING=int(scaling),
            PAIRS=pairs,
            num_warps=2,
        )
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as ``[rows, size]`` with any row stride; copied only if that cannot be a view."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
