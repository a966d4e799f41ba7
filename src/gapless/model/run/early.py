# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Rotary embedding with cache write, and decode attention, as kernels that may start before their predecessor ends.

They are the kernels of other modules behind a wait; see `gapless.device.dependent_launch` for the rule.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.attention.context import AttentionContext, AttentionParams
from gapless.attention.triton_decode import LOG2E, _decode_kernel, _get_plan, decode_config
from gapless.device.dependent_launch import depend
from gapless.model.ops.triton import _HEADS, _rope_kernel


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_ptr"])
def _early_rope_kernel(
    qkv_ptr, positions_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, cache_ptr, scales_ptr, slot_ptr, out_ptr,
    qkv_stride, cos_stride, sin_stride, cache_stride_kv, cache_stride_block, cache_stride_token, cache_stride_head,
    eps, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
    SCALING: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    depend(PDL)
    _rope_kernel(
        qkv_ptr, positions_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, cache_ptr, scales_ptr, slot_ptr, out_ptr,
        qkv_stride, cos_stride, sin_stride, cache_stride_kv, cache_stride_block, cache_stride_token,
        cache_stride_head, eps, HQ, HK, D, HALF, BLOCK_SIZE, HALF_BLOCK, REST_BLOCK, HEADS, NORM, SCALING,
        PAIRS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_row"])
def _early_decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, items_ptr, first_ptr, counters_ptr, part_ptr, lse_ptr, out_ptr, sinks_ptr,
    scales_ptr, scale, softcap, q_token, q_head, kv_block, kv_token, kv_head, table_row, HK: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    B: tl.constexpr, QMAX: tl.constexpr, MP: tl.constexpr,
    RB: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, LAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    depend(PDL)  # before the programs without an item leave, see the rule
    _decode_kernel(
        q_ptr, k_ptr, v_ptr, table_ptr, items_ptr, first_ptr, counters_ptr, part_ptr, lse_ptr, out_ptr, sinks_ptr,
        scales_ptr, scale, softcap, q_token, q_head, kv_block, kv_token, kv_head, table_row, HK, G, D, DP, B, QMAX, MP,
        RB, CHUNK, BN, WINDOW, SOFTCAP, LAST,
    )  # fmt: skip


def early_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    pdl: int,
    kv_scales: torch.Tensor | None = None,
    scaling: int = 0,
    pairs: bool = False,
) -> torch.Tensor:
    """`gapless.model.ops.triton.rope_qk_norm_kv_write`, launched early."""
    tokens, kv_heads, size, half = qkv.shape[0], cache.shape[3], cache.shape[4], cos.shape[1] // 2
    out = torch.empty((tokens, heads, size), dtype=qkv.dtype, device=qkv.device)
    each = min(_HEADS, triton.next_power_of_2(max(heads, kv_heads)))
    parts = triton.cdiv(heads, each) + 2 * triton.cdiv(kv_heads, each)
    rest = size - 2 * half
    _early_rope_kernel[(tokens, parts)](
        qkv, positions, cos, sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, cache,
        kv_scales, slots, out, qkv.stride(0), cos.stride(0), sin.stride(0), cache.stride(0), cache.stride(1),
        cache.stride(2), cache.stride(3), eps, HQ=heads, HK=kv_heads, D=size, HALF=half, BLOCK_SIZE=cache.shape[2],
        HALF_BLOCK=triton.next_power_of_2(half), REST_BLOCK=triton.next_power_of_2(rest) if rest else 0, HEADS=each,
        NORM=q_norm is not None, SCALING=scaling, PAIRS=pairs, PDL=pdl, num_warps=2, launch_pdl=True,
    )  # fmt: skip
    return out


def early_attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    context: AttentionContext,
    params: AttentionParams,
    pdl: int,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gapless.attention.triton_decode.decode` of all sequences, launched early.

    The outputs of padding tokens are zero in a decode step and old memory where rows draft, since to clear them would
    cost a kernel in each layer. Whatever lies there stays there: all that follows works on each token alone, and the
    keys of padding tokens go to the null block.
    """
    _, hq, d = q.shape
    _, _, block, hk, _ = cache.shape
    g = hq // hk
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    config = decode_config(q.device, d, q.dtype)
    most = 1 if context.decode_only else context.max_query_len or 1
    plan = _get_plan(context, params, hk, most, config)
    w = plan.items.shape[0]
    padded, rows = max(16, triton.next_power_of_2(d)), triton.next_power_of_2(most * g)
    part = torch.empty((w, hk, most * g, d), dtype=torch.float32, device=q.device)
    lse = torch.empty((w, hk, most * g), dtype=torch.float32, device=q.device)
    keys = cache[0]
    softcap = params.softcap or 0.0
    scale = params.scale / softcap if softcap else params.scale * LOG2E.value
    _early_decode_kernel[(hk, w)](
        q, keys, cache[1], context.block_tables, plan.items, plan.first, plan.counters, part, lse, out,
        params.sinks, kv_scales, scale, softcap * LOG2E.value, q.stride(0), q.stride(1), keys.stride(0), keys.stride(1),
        keys.stride(2), context.block_tables.stride(0), HK=hk, G=g, D=d, DP=padded, B=block, QMAX=most,
        MP=max(16, rows), RB=rows, CHUNK=config.merged_at_once(rows, padded), BN=config.block_n,
        WINDOW=params.window or 0, SOFTCAP=bool(softcap), LAST=True, PDL=pdl, num_warps=config.warps,
        num_stages=config.stages, launch_pdl=True,
    )  # fmt: skip
    return out
