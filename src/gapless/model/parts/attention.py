"""Attention of a layer, from its input to its output: projections, norms of q and k, rotary embedding, the product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gapless.attention.context import AttentionParams
from gapless.model.ops import reference
from gapless.model.parts import norm, rotary
from gapless.model.parts.feed_forward import gap, plain_linear, tolerance
from gapless.model.parts.norm import Norm
from gapless.model.parts.rotary import Rotary
from gapless.model.products.weight import Weight, merge

SEPARATE = ("q_proj", "k_proj", "v_proj")
MERGED = ("qkv_proj", "Wqkv")
OUT = ("o_proj", "dense", "out_proj", "wo", "c_proj")
Q_NORMS, K_NORMS = ("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """See the module.

    Attributes:
        qkv, out: q, k and v one after the other; back to the hidden size.
        heads, kv_heads, head_dim: of the queries; of keys and values; of both.
        params: scale, window, soft cap and sinks.
        q_norm, k_norm: both or neither. Of each head, or, where ``across_heads``, of all heads together.
        place: index of what it keeps among the model's `kv_specs`.
    """

    qkv: Weight
    out: Weight
    heads: int
    kv_heads: int
    head_dim: int
    params: AttentionParams
    rotary: Rotary
    q_norm: Norm | None
    k_norm: Norm | None
    across_heads: bool
    place: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What a layer's attention was seen to do with T tokens: its input, the queries, keys and values that it attended
    with, what came of that, and its output.

    ``x [T, H]``, ``q [T, HQ, D]``, ``k, v [T, HK, D]``, ``heads [T, HQ * D]``, ``y [T, H]``.
    """

    x: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    heads: torch.Tensor
    y: torch.Tensor


class Unknown(Exception):
    """No kind of part fits; the message names what differs."""


def recognise(
    module: nn.Module, at: str, seen: Seen, params: AttentionParams, table: Rotary | None, place: int, positions: int
) -> Attention:
    """The part that does what was seen.

    Args:
        table: the rotary tables that the layer was given.
        positions: rows of a table, should it need one of its own.

    Raises:
        Unknown: naming what does not fit.
    """
    heads, size = seen.q.shape[1:]
    kv_heads = seen.k.shape[1]
    qkv, names = _projections(module, at, (heads + 2 * kv_heads) * size)
    out_name = next((name for name in OUT if plain_linear(module, name) is not None), None)
    out = None if out_name is None else plain_linear(module, out_name)
    if out is None:
        raise Unknown(f"{at} has no plain output projection")
    q_norm, k_norm, across = _norms(module, at, heads, kv_heads, size)
    used = {*names, out_name, *Q_NORMS, *K_NORMS}
    for name, child in module.named_children():
        if name not in used and next(child.parameters(), None) is not None:
            raise Unknown(f"{at} has the further part {name}")
    with torch.no_grad():
        wide = torch.cat([functional.linear(seen.x, m.weight, m.bias) for m in qkv], -1)
        mine = [
            Attention(Weight(wide), Weight(wide), heads, kv_heads, size, params, form, q_norm, k_norm, across, place)
            for form in rotary.forms(table, positions, size, seen.x)
        ]
        gaps = [_gap(part, wide, seen) for part in mine]
        best = min(range(len(mine)), key=gaps.__getitem__)
        if not gaps[best] < tolerance(seen.x.dtype):
            raise Unknown(f"{at}: queries, keys or values differ from the module's by {min(gaps):.1e}")
        out_gap = gap(functional.linear(seen.heads, out.weight, out.bias), seen.y)
        if not out_gap < tolerance(seen.x.dtype):
            raise Unknown(f"{at}: the output projection differs from the module's by {out_gap:.1e}")
    merged = merge(qkv, [f"{at}.{name}" for name in names])
    weights = merged, merge([out], [f"{at}.{out_name}"])
    return Attention(*weights, heads, kv_heads, size, params, mine[best].rotary, q_norm, k_norm, across, place)


def _projections(module: nn.Module, at: str, outputs: int) -> tuple[list[nn.Linear], list[str]]:
    separate = [plain_linear(module, name) for name in SEPARATE]
    if all(linear is not None for linear in separate):
        linears = [linear for linear in separate if linear is not None]
        if len({linear.bias is None for linear in linears}) > 1:
            raise Unknown(f"{at}: q, k and v do not all have a bias")
        names = list(SEPARATE)
    else:
        names = [name for name in MERGED if plain_linear(module, name) is not None][:1]
        linears = [linear for name in names if (linear := plain_linear(module, name)) is not None]
    if not linears or sum(linear.out_features for linear in linears) != outputs:
        raise Unknown(f"{at} has no plain projections to q, k and v")
    return linears, names


def _norms(module: nn.Module, at: str, heads: int, kv_heads: int, size: int) -> tuple[Norm | None, Norm | None, bool]:
    q, k = (next((m for n in names if isinstance(m := getattr(module, n, None), nn.Module)), None)
            for names in (Q_NORMS, K_NORMS))  # fmt: skip
    if q is None and k is None:
        return None, None, False
    if q is None or k is None:
        raise Unknown(f"{at}: only one of q and k is normed")
    for across, sizes in ((False, (size, size)), (True, (heads * size, kv_heads * size))):
        found = norm.recognise(q, sizes[0]), norm.recognise(k, sizes[1])
        if found[0] is not None and found[1] is not None:
            return *found, across
    raise Unknown(f"{at}: the norms of q and k are of no known kind")


def _gap(part: Attention, wide: torch.Tensor, seen: Seen) -> float:
    """Of q, k and v as they are kept, from those that were seen."""
    tokens, block = len(wide), 16
    blocks = -(-tokens // block)
    cache = torch.zeros(2, blocks, block, part.kv_heads, part.head_dim, dtype=wide.dtype, device=wide.device)
    places = torch.arange(tokens, device=wide.device)
    q = heads_of(part, wide.clone(), places, cache, places, reference)
    k, v = cache.flatten(1, 2)[:, :tokens]
    return max(gap(ours, theirs) for ours, theirs in ((q, seen.q), (k, seen.k), (v, seen.v)))


def heads_of(
    part: Attention,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    ops: Any,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """From the merged projection ``qkv [T, (HQ + 2 HK) D]``, which may be written to, to the queries ``[T, HQ, D]``;
    keys and values go to their places in the cache."""
    q_norm, k_norm, size = part.q_norm, part.k_norm, part.head_dim
    in_kernel = q_norm is not None and k_norm is not None and not part.across_heads and q_norm.kind == "rms"
    if q_norm is not None and k_norm is not None and not in_kernel:
        q, k, _ = torch.tensor_split(qkv, (part.heads * size, (part.heads + part.kv_heads) * size), -1)
        for x, norm_of, count in ((q, q_norm, part.heads), (k, k_norm, part.kv_heads)):
            each = x if part.across_heads else x.reshape(len(x), count, size)
            x.copy_(norm_of(each, ops).reshape(x.shape))
        q_norm = k_norm = None
    made: torch.Tensor = ops.rope_qk_norm_kv_write(
        qkv, positions, part.rotary.cos, part.rotary.sin, cache, slots, part.heads, part.kv_heads,
        None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight,
        1e-6 if q_norm is None else q_norm.eps, 0 if q_norm is None else q_norm.scaling, kv_scales=scales,
        pairs=part.rotary.pairs,
    )  # fmt: skip
    return made
