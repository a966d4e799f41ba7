# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Paged attention on the GPU: write the step's keys and values to the cache, then attend.

Everything may be captured in a CUDA graph: sizes are read on the device, grids depend on shapes only, and
nothing waits for the device. ``context.scratch`` must be empty at the start of each forward, or the kernels
would follow the plan of an older step.

A step with ``decode_only`` runs the decode kernel alone. Every other step runs both: decode rows would each
occupy one prefill program for their whole context, so the decode kernel splits them, and the prefill kernel
takes the rest.

Outputs of padding tokens are zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.attention.context import AttentionContext, AttentionParams
from gapless.attention.kv_format_triton import encode
from gapless.attention.triton_decode import DecodeConfig, decode
from gapless.attention.triton_prefill import PrefillConfig, prefill

# Query tokens x heads of a group that the decode kernel still does well: 9 tokens with a group of 4, say.
MAX_DECODE_ROWS = 64


@triton.jit
def _write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_token, k_head, v_token, v_head, kv_block, kv_token,
    kv_head, scales_ptr, HK: tl.constexpr, D: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    i = tl.arange(0, W)
    mask = i < HK * D
    h = i // D
    d = i % D
    k = tl.load(k_ptr + t * k_token + h * k_head + d, mask=mask)
    v = tl.load(v_ptr + t * v_token + h * v_head + d, mask=mask)
    to = slot // B * kv_block + slot % B * kv_token + h * kv_head + d
    tl.store(k_cache_ptr + to, encode(k, k_cache_ptr.dtype.element_ty, scales_ptr, h, mask), mask=mask)
    tl.store(v_cache_ptr + to, encode(v, v_cache_ptr.dtype.element_ty, scales_ptr, HK + h, mask), mask=mask)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Store ``k`` and ``v`` ``[T, HK, D]`` (any token and head strides) at the places in ``slot_mapping``, in the
    cache's format (see `gapless.attention.kv_format`)."""
    tokens, hk, d = k.shape
    keys = kv_cache[0]
    width = triton.next_power_of_2(hk * d)
    _write_kernel[(tokens,)](
        k, v, keys, kv_cache[1], slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), kv_scales, HK=hk, D=d, B=keys.shape[1], W=width,
        num_warps=min(8, max(1, width * k.element_size() // 512)),
    )  # fmt: skip


def attend_cached(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    context: AttentionContext,
    params: AttentionParams,
    kv_scales: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    max_query_len: int | None = None,
    split_query_len: int | None = None,
    decode_config: DecodeConfig | None = None,
    prefill_config: PrefillConfig | None = None,
) -> torch.Tensor:
    """Attend from ``q`` ``[T, HQ, D]`` to the cache, which holds this step's keys and values already.

    Args:
        kv_scales: fp32 ``[2, HK]``, of the cache's keys and values; None: they are kept as they are.
        out: contiguous ``[T, HQ, D]``; made here if missing.
        max_query_len: a bound on the q_len of this step and of every replay, by default the context's: where it is
            small, as for drafts to verify, the prefill kernel is not launched.
        split_query_len: in a mixed step, sequences of up to so many tokens go to the decode kernel.
    """
    if q.stride(-1) != 1 or kv_cache.stride(-1) != 1:
        raise ValueError("the head dimension of q and of the cache must be contiguous")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // kv_cache.shape[3]
    max_query_len = max_query_len or context.max_query_len
    if context.decode_only:
        decode(q, kv_cache, context, params, out, 1, decode_config, kv_scales)
    elif max_query_len is not None and max_query_len * group <= MAX_DECODE_ROWS:
        out.zero_()
        decode(q, kv_cache, context, params, out, max_query_len, decode_config, kv_scales)
    else:
        # The tile of the decode kernel has 16 rows anyway, so a few tokens a sequence cost nothing more.
        few = split_query_len or max(1, 16 // group)
        decode(q, kv_cache, context, params, out, few, decode_config, kv_scales)
        prefill(q, kv_cache, context, params, out, few + 1, prefill_config, kv_scales)
    return out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    context: AttentionContext,
    params: AttentionParams,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write ``k`` and ``v`` ``[T, HK, D]`` to the cache, then attend from ``q``; returns ``[T, HQ, D]``."""
    write_kv(k, v, kv_cache, context.slot_mapping, kv_scales)
    return attend_cached(q, kv_cache, context, params, kv_scales)
