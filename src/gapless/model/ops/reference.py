"""The fused operations of a decoder layer in plain torch: what each of them means, rounding included.

Results are rounded to the input's dtype wherever the modules of ``transformers`` round, so that replacing
them changes nothing but the order of sums.

Shape legend: T tokens, H hidden size, F width of the MLP, HQ and HK query and KV heads, D head size, R rotary
dimensions (R <= D), N blocks of B tokens.
"""

from __future__ import annotations

import torch

from gapless.attention.kv_format import put, scale_of


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, scaling: int = 0) -> torch.Tensor:
    """Root-mean-square norm over the last dimension.

    Args:
        x: ``[..., H]``.
        weight: ``[H]``.
        eps: added to the mean square.
        scaling: 0, the norm is rounded before the weight (Llama); 1, the weight is stored minus one and multiplied in
            fp32 (Gemma); 2, the weight is multiplied in fp32 (OLMo 2). See `gapless.model.parts.norm.Scaling`.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if scaling:
        return (normed * (weight.float() + (scaling == 1))).to(x.dtype)
    return weight * normed.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scaling: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + x``, and its norm. Returns (normed, new residual); the inputs stay as they are."""
    residual = residual + x
    return rms_norm(residual, weight, eps, scaling), residual


def norm_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, inner: torch.Tensor, weight: torch.Tensor, eps: float, scaling: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + norm(x)`` with the weight ``inner``, and the norm of that: `add_rms_norm` behind a norm."""
    return add_rms_norm(rms_norm(x, inner, eps, scaling), residual, weight, eps, scaling)


def act_mul(gate_up: torch.Tensor, activation: int = 0) -> torch.Tensor:
    """``f(gate) * up`` of ``[..., 2F]``, gate first, as ``[..., F]``; f is silu (0), gelu (1) or gelu_tanh (2)."""
    gate, up = gate_up.chunk(2, -1)
    functional = torch.nn.functional
    if activation == 0:
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation == 2 else "none") * up


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
    """From the merged projection to the query: split, norm q and k, rotate, store k and v in the cache.

    Args:
        qkv: ``[T, (HQ + 2 HK) D]``, queries, then keys, then values.
        positions: int64 ``[T]``.
        cos: ``[max_position, R]`` from the model's own rotary module, both halves equal; the first R of the D
            dimensions rotate. The products are rounded to the common dtype of qkv and the table.
        sin: likewise.
        kv_cache: ``[2, N, B, HK, D]``, written.
        slot_mapping: int64 ``[T]``, ``block * B + offset`` per token.
        num_heads: HQ.
        num_kv_heads: HK.
        q_norm_weight: ``[D]``, or None for no norm.
        k_norm_weight: ``[D]``, or None.
        eps: of the norms.
        scaling: of the norms.
        kv_scales: fp32 ``[2, HK]``, of the cache's keys and values; None: they are kept as they are.
        pairs: neighbours turn together, dimension 2 j with 2 j + 1, and not j with j + R / 2.

    Returns:
        The queries ``[T, HQ, D]``, contiguous.
    """
    tokens, size = qkv.shape[0], kv_cache.shape[4]
    heads = qkv.view(tokens, -1, size)
    q, k, v = torch.tensor_split(heads, (num_heads, num_heads + num_kv_heads), dim=1)
    if q_norm_weight is not None:
        q = rms_norm(q, q_norm_weight, eps, scaling)
    if k_norm_weight is not None:
        k = rms_norm(k, k_norm_weight, eps, scaling)
    c, s = cos.index_select(0, positions)[:, None], sin.index_select(0, positions)[:, None]
    for i, x in enumerate((_rotate(k, c, s, pairs), v)):
        half = kv_cache[i].view(-1, num_kv_heads, size)
        put(half, slot_mapping, x, scale_of(kv_scales, i))
    return _rotate(q, c, s, pairs).contiguous()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: bool) -> torch.Tensor:
    rotary = cos.shape[-1]
    turning, rest = x[..., :rotary], x[..., rotary:]
    if pairs:
        cos, sin = (t[..., : rotary // 2].repeat_interleave(2, -1) for t in (cos, sin))
        across = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    else:
        first, second = turning.chunk(2, -1)
        across = torch.cat((-second, first), -1)
    turned = (turning * cos + across * sin).to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
