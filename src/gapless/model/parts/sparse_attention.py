"""Attention to chosen blocks of tokens (Qwen sparse attention, QSA), over paged caches.

An indexer with one key head gives each token a short key. C tokens in a row, counted from the start of the request,
make a block once all of them are there; its key is the mean of theirs, normalised and rotated to the place of the
block's first token. A query scores the complete blocks before it,

    score(b) = sum over heads of relu(q_h . k_b) / sqrt(DI),

and attends to the tokens of the K best blocks and to the tail of less than one block, itself included. While there are
no more than K complete blocks, that is all tokens, and plain causal attention.

Index keys are paged as values are: an entry of the cache holds the token's own key, and beside it the key of the block
that ends at this token, made when this token is written. Blocks are therefore pooled once, shared with a prefix that
is found again, and overwritten with the tokens that replace a rejected draft.

`sparse_attend` reads lengths on the host and is for the CPU; `gapless.model.parts.sparse_attention_triton` is the
GPU's. Of blocks with equal scores either may be chosen, as in the model itself.

Shape legend: see `gapless.attention.context`; and C tokens of a block, HI index heads, DI their size, M blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from gapless.attention.kv_format import decode, scale_of
from gapless.model.parts.short_conv import places_of, write_vectors


@dataclass(frozen=True, slots=True)
class SparseParams:
    """Constants of one layer: ``ratio`` is C, ``blocks`` is K, ``scale`` that of the attention itself."""

    ratio: int
    blocks: int
    scale: float

    def covers(self, max_model_len: int) -> bool:
        """No context of this length leaves a block out, so that plain attention is the same."""
        return max_model_len // self.ratio <= self.blocks


def write_index_keys(
    keys: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    slot_mapping: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    ratio: int,
    finish: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Store the tokens' index keys and the keys of the blocks that end with them. Capturable.

    Args:
        keys: ``[T, DI]``, as the indexer projects them.
        cache: ``[N, B, 2 * DI]``.
        block_tables, slot_mapping, rows, positions: as in `gapless.model.parts.short_conv.short_conv`.
        ratio: C.
        finish: from means ``[T, DI]`` to keys of blocks: norm, and rotation to position ``p - C + 1`` for a block
            that ends at position p. What it makes of a token that ends no block is never read.
    """
    size = keys.shape[1]
    write_vectors(keys, cache[..., :size], slot_mapping)
    flat = cache.view(-1, cache.shape[-1])
    back = torch.arange(ratio - 1, -1, -1, device=positions.device)
    at = positions[:, None] - back  # [T, C], the oldest first
    places = places_of(block_tables, rows, at, cache.shape[1])
    members = flat[:, :size].index_select(0, places.flatten()).view(len(keys), ratio, size)
    members = torch.where((at >= 0)[:, :, None], members, 0)
    means = members.to(torch.promote_types(keys.dtype, torch.float32)).mean(1).to(keys.dtype)
    flat[:, size:].index_copy_(0, slot_mapping, finish(means).to(cache.dtype))


def sparse_attend(
    q: torch.Tensor,
    index_q: torch.Tensor,
    kv_cache: torch.Tensor,
    index_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    params: SparseParams,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from tokens whose keys, values and index keys are in the caches.

    Args:
        q: ``[T, HQ, D]``.
        index_q: ``[T, HI, DI]``.
        kv_cache: ``[2, N, B, HK, D]``.
        index_cache: ``[N, B, 2 * DI]``, of the same blocks.
        block_tables: ``[R, P]``.
        query_start_loc, seq_lens, rows: of the step.
        params: the layer's constants.
        kv_scales: fp32 ``[2, HK]``, of the cache's keys and values, or None.

    Returns:
        ``[T, HQ, D]``, zeros for padding.
    """
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()  # sync-ok: cpu reference
    out = torch.zeros_like(q)
    compute = torch.promote_types(q.dtype, torch.float32)
    flat = index_cache.view(-1, index_cache.shape[-1])
    ratio, size = params.ratio, index_q.shape[2]
    for s, length in enumerate(lens):
        new = slice(starts[s], starts[s + 1])
        count = new.stop - new.start
        if not count:
            continue
        at = torch.arange(length, device=q.device)
        row = rows[s].long().expand(length)
        places = places_of(block_tables, row, at, kv_cache.shape[2])
        own = at[length - count :, None]
        seen = at <= own  # [n, L]
        num_blocks = length // ratio
        if num_blocks > params.blocks:
            ends = places[ratio - 1 :: ratio][:num_blocks]
            block_keys = flat[:, size:].index_select(0, ends).to(compute)
            scores = torch.einsum("nhd,bd->nbh", index_q[new].to(compute), block_keys)
            scores = scores.relu().sum(-1) / math.sqrt(size)
            complete = torch.div(own + 1, ratio, rounding_mode="floor")  # [n, 1]
            scores = scores.masked_fill(at[:num_blocks] >= complete, -math.inf)
            best = scores.topk(params.blocks, dim=1).indices
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
            chosen = functional.pad(chosen.repeat_interleave(ratio, 1), (0, length - num_blocks * ratio))
            seen = seen & (chosen | (at >= complete * ratio))
        keys, values = (
            decode(half.flatten(0, 1).index_select(0, places), q.dtype, scale_of(kv_scales, i))
            for i, half in enumerate(kv_cache)
        )
        part = functional.scaled_dot_product_attention(
            q[new].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=seen,
            scale=params.scale,
            enable_gqa=q.shape[1] != keys.shape[1],
        )
        out[new] = part[0].transpose(0, 1)
    return out
