"""Paged attention in plain torch: the definition of truth, and the form that the CPU runs.

`attend_brute` is slow and obvious; tests compare everything else with it. `attend` has the same result and is
quick on a CPU: sequences with few new tokens go through `gapless.attention.rows`, which reads the pool in
place; those with many are bound by arithmetic, and go through SDPA one by one. Both run on the compute
stream's thread and touch nothing but their arguments and ``context.scratch``.

Shape legend: see `gapless.attention.context`. Here also n, the new tokens of one sequence, and L, positions
that its queries see. A query at position p sees [0, p + 1), with a window w only [max(0, p + 1 - w), p + 1).
Neither form reads a place of the pool outside of these ranges, so stale contents cannot leak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from gapless.attention.context import AttentionContext, AttentionParams
from gapless.attention.kv_format import decode, exact, put, scale_of
from gapless.attention.rows import Rows, attend_rows, softmax_

SHORT_QUERY = 4
"""Sequences with at most this many new tokens are read in place, token by token; others are gathered once."""

MAX_SCORES = 1 << 24
"""Score elements that the explicit softmax of a long sequence holds at a time (64 MiB in fp32)."""


def attend_brute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    context: AttentionContext,
    params: AttentionParams,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition: write the new keys and values, then attend sequence by sequence, head by head.

    Args:
        q: ``[T, HQ, D]``.
        k, v: ``[T, HK, D]``, the new tokens' keys and values.
        kv_cache: ``[2, N, B, HK, D]`` of this layer, written at ``context.slot_mapping``.
        context: the step.
        params: the layer's constants.
        kv_scales: fp32 ``[2, HK]``, of the cache's keys and values (see `gapless.attention.kv_format`); None: they are
            kept as they are.

    Returns:
        ``[T, HQ, D]`` in q's dtype, zeros for padding tokens. Computed in fp32, or in fp64 if q is.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    starts = context.query_start_loc.tolist()  # sync-ok: cpu reference
    lengths = context.seq_lens.tolist()  # sync-ok: cpu reference
    for flat, new, half in zip((c.flatten(0, 1) for c in kv_cache), (k, v), (0, 1), strict=True):
        for token in range(starts[-1]):
            one = slice(token, token + 1)
            put(flat, context.slot_mapping[one], new[one], scale_of(kv_scales, half))
    keys, values = (decode(kv_cache[i].flatten(0, 1), compute, scale_of(kv_scales, i)) for i in (0, 1))
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for s, length in enumerate(lengths):
        table = context.block_tables[context.rows[s].long()].long()
        for token in range(starts[s], starts[s + 1]):
            position = length - (starts[s + 1] - token)
            first = 0 if params.window is None else max(0, position + 1 - params.window)
            seen = torch.arange(first, position + 1, device=q.device)
            places = table[seen // context.block_size] * context.block_size + seen % context.block_size
            for head in range(q.shape[1]):
                scores = (keys[places, head // group] @ q[token, head].to(compute)) * params.scale
                if params.softcap is not None:
                    scores = params.softcap * torch.tanh(scores / params.softcap)
                if params.sinks is not None:  # takes part in the sum, has no value
                    scores = torch.cat([scores, params.sinks[head].to(compute).view(1)])
                weights = torch.softmax(scores, dim=0)[: len(seen)]
                out[token, head] = (weights @ values[places, head // group]).to(q.dtype)
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
    """The quick CPU form of `attend_brute`: same arguments, same result up to rounding."""
    step = _step_of(context)
    num_kv_heads, real = k.shape[1], step.num_tokens
    keys = kv_cache[0].view(-1, num_kv_heads, k.shape[2])  # [N * B, HK, D]
    values = kv_cache[1].view(-1, num_kv_heads, v.shape[2])
    put(keys, step.slots, k[:real], scale_of(kv_scales, 0))  # padding tokens are not worth a write
    put(values, step.slots, v[:real], scale_of(kv_scales, 1))

    if len(step.row_tokens) == len(q):  # decode: every token is a row, nothing to place
        return attend_rows(q, keys, values, context, step.rows, params, kv_scales)
    out = torch.zeros_like(q)
    if len(step.row_tokens):
        part = attend_rows(q.index_select(0, step.row_tokens), keys, values, context, step.rows, params, kv_scales)
        out.index_copy_(0, step.row_tokens, part)
    for sequence in step.long:
        past_k, past_v = _past(k, v, keys, values, context, sequence, params.window, kv_scales, q.dtype)
        out[sequence.start : sequence.stop] = _attend_long(q, past_k, past_v, context, sequence, params)
    return out


@dataclass(slots=True)
class _Long:
    """Sequence s, with many new tokens: the step's tokens [start, stop); ``length`` positions in all."""

    s: int
    start: int
    stop: int
    length: int


@dataclass(slots=True)
class _Step:
    """Host view of a step, made by its first layer.

    Attributes:
        num_tokens: without padding.
        slots: the slot mapping, without padding.
        rows: the query tokens of sequences with few of them, and the places of all sequences.
        row_tokens: int64, which of the step's tokens they are.
        long: the other sequences.
    """

    num_tokens: int
    slots: torch.Tensor
    rows: Rows
    row_tokens: torch.Tensor
    long: list[_Long]


def _step_of(context: AttentionContext) -> _Step:
    step = context.scratch.get("reference")
    if step is None:
        step = context.scratch["reference"] = _read_step(context)
    assert isinstance(step, _Step)
    return step


def _read_step(context: AttentionContext) -> _Step:
    starts = context.query_start_loc.tolist()  # sync-ok: cpu reference
    lengths = context.seq_lens.tolist()  # sync-ok: cpu reference
    sequences: list[int] = []
    positions: list[int] = []
    tokens: list[int] = []
    long: list[_Long] = []
    for s, length in enumerate(lengths):
        start, stop = starts[s], starts[s + 1]
        if stop - start > SHORT_QUERY:
            long.append(_Long(s, start, stop, length))
            continue
        for token in range(start, stop):
            sequences.append(s)
            positions.append(length - (stop - token))
            tokens.append(token)
    size, device = context.block_size, context.block_tables.device
    num_blocks = -(-max(lengths, default=0) // size)
    table = context.block_tables[:, :num_blocks].index_select(0, context.rows).long()
    places = (table[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
    return _Step(
        num_tokens=starts[-1],
        slots=context.slot_mapping[: starts[-1]],
        rows=Rows(sequences, positions, places),
        row_tokens=torch.tensor(tokens, dtype=torch.long, device=device),
        long=long,
    )


def _first_seen(sequence: _Long, window: int | None) -> int:
    """The first position that one of its new tokens sees."""
    new = sequence.stop - sequence.start
    return 0 if window is None else max(0, sequence.length - new + 1 - window)


def _past(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: AttentionContext,
    sequence: _Long,
    window: int | None,
    kv_scales: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that a sequence with many new tokens sees, each ``[L, HK, D]`` in ``dtype``."""
    start, stop, length = sequence.start, sequence.stop, sequence.length
    first = _first_seen(sequence, window)
    if first == 0 and stop - start == length and exact(k.dtype, keys, kv_scales):
        return k[start:stop].to(dtype), v[start:stop].to(dtype)  # nothing in the cache: the new keys are all there is
    places = _step_of(context).rows.places[sequence.s, first:length]
    past_k, past_v = keys.index_select(0, places), values.index_select(0, places)
    return decode(past_k, dtype, scale_of(kv_scales, 0)), decode(past_v, dtype, scale_of(kv_scales, 1))


def _attend_long(
    q: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    context: AttentionContext,
    sequence: _Long,
    params: AttentionParams,
) -> torch.Tensor:
    """One sequence -> ``[n, HQ, D]``: through SDPA or, with a soft cap or sinks, an explicit softmax."""
    start, stop, length = sequence.start, sequence.stop, sequence.length
    new, first = stop - start, _first_seen(sequence, params.window)
    grouped = q.shape[1] != past_k.shape[1]
    query = q[start:stop].transpose(0, 1)[None]  # [1, HQ, n, D]
    past_k, past_v = past_k.transpose(0, 1)[None], past_v.transpose(0, 1)[None]
    plain = params.softcap is None and params.sinks is None
    if plain and new == length and (params.window is None or params.window >= length):
        out = functional.scaled_dot_product_attention(
            query, past_k, past_v, is_causal=True, scale=params.scale, enable_gqa=grouped
        )
        return out[0].transpose(0, 1)
    mask = _long_mask(q, context, sequence, first, params.window)
    if plain:
        out = functional.scaled_dot_product_attention(
            query, past_k, past_v, attn_mask=mask, scale=params.scale, enable_gqa=grouped
        )
        return out[0].transpose(0, 1)
    return _explicit(query[0], past_k[0], past_v[0], mask, params)


def _long_mask(
    q: torch.Tensor, context: AttentionContext, sequence: _Long, first: int, window: int | None
) -> torch.Tensor:
    """``[n, length - first]``: 0 where a query sees a key, -inf elsewhere. Made once per step."""
    name = f"reference/mask/{sequence.s}/{window}"
    mask = context.scratch.get(name)
    if mask is None:
        new = sequence.stop - sequence.start
        positions = torch.arange(sequence.length - new, sequence.length, device=q.device)[:, None]
        past = torch.arange(first, sequence.length, device=q.device)
        hidden = past > positions
        if window is not None:
            hidden |= past <= positions - window
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -math.inf)
        context.scratch[name] = mask
    assert isinstance(mask, torch.Tensor)
    return mask


def _explicit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """q ``[HQ, n, D]``, k, v ``[HK, L, D]`` -> ``[n, HQ, D]``; some queries at a time, to bound memory."""
    heads, new, size = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    k, v = k.to(compute), v.to(compute)
    out = torch.empty(new, heads, v.shape[2], dtype=q.dtype, device=q.device)
    step = max(1, MAX_SCORES // (heads * k.shape[1]))
    for a in range(0, new, step):
        part = q[:, a : a + step].to(compute)
        folded = part.reshape(k.shape[0], -1, size)  # [HK, G * n', D]
        scores = (folded @ k.mT).mul_(params.scale / (params.softcap or 1.0)).view(heads, part.shape[1], -1)
        weights, share = softmax_(scores.transpose(0, 1), mask[a : a + step, None], params)  # [n', HQ, L]
        folded_weights = weights.transpose(0, 1).reshape(k.shape[0], -1, k.shape[1])
        result = (folded_weights @ v).view(heads, part.shape[1], -1).transpose(0, 1)
        out[a : a + step] = result if share is None else result * share
    return out
