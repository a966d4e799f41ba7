"""Paged attention in plain torch: the definition of truth, and the form that the CPU runs.

`attend_brute` is slow and obvious; tests compare everything else with it. `attend` has the same result and is quick on
a CPU. Both run on the compute stream's thread and touch nothing but their arguments and ``context.scratch``.

Shape legend: see `gapless.attention.context`. Here also n, the new tokens of one sequence, and L, positions that a
query sees. A query at position p sees [0, p + 1), with a window w only [max(0, p + 1 - w), p + 1). Neither form reads
a place of the pool that is outside the range of a query of its own sequence, so stale contents cannot leak.

How `attend` is quick. A decode step is bound by memory: keys and values are read once and hardly computed with. To
gather the paged blocks first costs a write and a second read of everything, more than the attention itself. So a query
token reads the pool in place, with two kernels that torch has for sparse data: ``sampled_addmm`` takes the dot
products of chosen pairs of rows (queries x keys), ``embedding_bag`` the weighted sum of chosen rows (values). On a
SmolLM2-like shape that is 1.4 to 2 times as fast as gathering and SDPA. Sequences with many new tokens are bound by
arithmetic instead, and go through SDPA one by one.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass

import torch
from torch.nn import functional

from gapless.attention.context import AttentionContext, AttentionParams

SHORT_QUERY = 4
"""Sequences with at most this many new tokens are read in place, token by token; longer ones are gathered once."""

GROUP_COST = 40000
"""Padded score elements that cost as much as one more group of rows. Padding is cheap: it reads a cached line again."""

MAX_SCORES = 1 << 24
"""Score elements that the explicit softmax of a long sequence holds at a time (64 MiB in fp32)."""


def attend_brute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    context: AttentionContext,
    params: AttentionParams,
) -> torch.Tensor:
    """The definition: write the new keys and values, then attend sequence by sequence, head by head.

    Args:
        q: ``[T, HQ, D]``.
        k, v: ``[T, HK, D]``, the new tokens' keys and values.
        kv_cache: ``[2, N, B, HK, D]`` of this layer, written at ``context.slot_mapping``.
        context: the step.
        params: the layer's constants.

    Returns:
        ``[T, HQ, D]`` in q's dtype, zeros for padding tokens. Computed in fp32, or in fp64 if q is.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    starts = context.query_start_loc.tolist()  # sync-ok: cpu reference
    lengths = context.seq_lens.tolist()  # sync-ok: cpu reference
    keys, values = kv_cache[0].flatten(0, 1), kv_cache[1].flatten(0, 1)
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for token in range(starts[-1]):
        keys[context.slot_mapping[token]] = k[token].to(keys.dtype)
        values[context.slot_mapping[token]] = v[token].to(values.dtype)
    for s, length in enumerate(lengths):
        table = context.block_tables[context.rows[s].long()].long()
        for token in range(starts[s], starts[s + 1]):
            position = length - (starts[s + 1] - token)
            first = 0 if params.window is None else max(0, position + 1 - params.window)
            seen = torch.arange(first, position + 1, device=q.device)
            places = table[seen // context.block_size] * context.block_size + seen % context.block_size
            for head in range(q.shape[1]):
                scores = (keys[places, head // group].to(compute) @ q[token, head].to(compute)) * params.scale
                if params.softcap is not None:
                    scores = params.softcap * torch.tanh(scores / params.softcap)
                if params.sinks is not None:  # takes part in the sum, has no value
                    scores = torch.cat([scores, params.sinks[head].to(compute).view(1)])
                weights = torch.softmax(scores, dim=0)[: len(seen)]
                out[token, head] = (weights @ values[places, head // group].to(compute)).to(q.dtype)
    return out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    context: AttentionContext,
    params: AttentionParams,
) -> torch.Tensor:
    """The quick CPU form of `attend_brute`: same arguments, same result up to rounding."""
    step = _step_of(context)
    num_kv_heads, real = k.shape[1], step.num_tokens
    keys = kv_cache[0].view(-1, num_kv_heads, k.shape[2])  # [N * B, HK, D]
    values = kv_cache[1].view(-1, num_kv_heads, v.shape[2])
    keys.index_copy_(0, step.slots, k[:real].to(keys.dtype))  # padding tokens are not worth a write
    values.index_copy_(0, step.slots, v[:real].to(values.dtype))

    if len(step.short) == len(q):  # decode: every token is a row, nothing to place
        return _attend_rows(q, keys, values, context, step, params)
    out = torch.zeros_like(q)
    if step.short:
        rows = q.index_select(0, step.short_tokens)
        out.index_copy_(0, step.short_tokens, _attend_rows(rows, keys, values, context, step, params))
    for sequence in step.long:
        out[sequence.start : sequence.stop] = _attend_long(q, k, v, keys, values, context, sequence, params)
    return out


@dataclass(slots=True)
class _Long:
    """A sequence with many new tokens: the step's tokens [start, stop), ``length`` positions, batch index s."""

    s: int
    start: int
    stop: int
    length: int


@dataclass(slots=True)
class _Step:
    """Host view of a step, made by its first layer.

    ``short``: one (batch index, position) per query token of the short sequences; ``short_tokens`` int64, the step's
    tokens that they are. ``places`` int64 ``[S, longest]``: flat pool place of position p of sequence s; stale
    (and never used) from the sequence's length on.
    """

    num_tokens: int
    slots: torch.Tensor
    places: torch.Tensor
    short: list[tuple[int, int]]
    short_tokens: torch.Tensor
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
    short: list[tuple[int, int]] = []
    tokens: list[int] = []
    long: list[_Long] = []
    for s, length in enumerate(lengths):
        start, stop = starts[s], starts[s + 1]
        if stop - start > SHORT_QUERY:
            long.append(_Long(s, start, stop, length))
            continue
        for token in range(start, stop):
            short.append((s, length - (stop - token)))
            tokens.append(token)
    size, device = context.block_size, context.block_tables.device
    num_blocks = -(-max(lengths, default=0) // size)
    table = context.block_tables[:, :num_blocks].index_select(0, context.rows).long()
    places = (table[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
    return _Step(
        num_tokens=starts[-1],
        slots=context.slot_mapping[: starts[-1]],
        places=places,
        short=short,
        short_tokens=torch.tensor(tokens, dtype=torch.long, device=device),
        long=long,
    )


@dataclass(slots=True)
class _Group:
    """Rows of nearly equal length, padded to L. Row r is the r-th query of the group, R in all.

    ``places`` ``[R, L]``: pool places; padding repeats the row's last place, so that it reads what the row may see.
    ``mask`` ``[R, 1, L]``: -inf at padding, None if there is none. ``pairs``: for the sparse kernels, a CSR matrix
    ``[R * HQ, N * B * HK]`` whose values are the scores, overwritten by each layer; None where they do not work.
    """

    num_rows: int
    places: torch.Tensor
    mask: torch.Tensor | None
    pairs: torch.Tensor | None


@dataclass(slots=True)
class _Groups:
    """All groups of one window and head layout. ``order`` sorts the rows by length, ``inverse`` undoes it."""

    order: torch.Tensor | None
    inverse: torch.Tensor | None
    groups: list[_Group]


def _attend_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: AttentionContext,
    step: _Step,
    params: AttentionParams,
) -> torch.Tensor:
    """Query tokens of short sequences: q ``[rows, HQ, D]``, keys and values ``[N * B, HK, D]`` -> ``[rows, HQ, D]``."""
    name = f"reference/{params.window}/{q.shape[1]}/{keys.shape[0]}/{keys.shape[1]}"
    made = context.scratch.get(name)
    if made is None:
        made = context.scratch[name] = _make_groups(q, keys, step, params.window)
    assert isinstance(made, _Groups)
    if made.order is not None:
        q = q.index_select(0, made.order)
    outs, first = [], 0
    for group in made.groups:
        part = q[first : first + group.num_rows]
        outs.append((_rows_in_place if group.pairs is not None else _rows_gathered)(part, keys, values, group, params))
        first += group.num_rows
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if made.inverse is None else out.index_select(0, made.inverse)


def _make_groups(q: torch.Tensor, keys: torch.Tensor, step: _Step, window: int | None) -> _Groups:
    """Cut the rows into groups such that padding costs less than the launches that it saves."""
    seen = [min(position + 1, window) if window is not None else position + 1 for _, position in step.short]
    order = sorted(range(len(seen)), key=lambda row: -seen[row])
    allowed = max(1, GROUP_COST // q.shape[1])
    cuts, waste = [0], 0
    for i, row in enumerate(order):
        waste += seen[order[cuts[-1]]] - seen[row]
        if waste > allowed:
            cuts.append(i)
            waste = 0
    if len(cuts) == 1:  # one group needs no sorting
        rows = list(range(len(seen)))
        return _Groups(None, None, [_make_group(q, keys, step, rows, seen)])
    cuts.append(len(order))
    groups = [_make_group(q, keys, step, order[a:b], seen) for a, b in zip(cuts, cuts[1:], strict=False)]
    permutation = torch.tensor(order, device=q.device)
    return _Groups(permutation, torch.argsort(permutation), groups)


def _make_group(q: torch.Tensor, keys: torch.Tensor, step: _Step, rows: list[int], seen: list[int]) -> _Group:
    num_heads, num_kv_heads, device = q.shape[1], keys.shape[1], q.device
    length = max(seen[row] for row in rows)
    sequences, ends, counts = torch.tensor(
        [[step.short[row][0] for row in rows], [step.short[row][1] for row in rows], [seen[row] for row in rows]],
        device=device,
    )
    offset = torch.arange(length, device=device)
    positions = torch.minimum((ends + 1 - counts)[:, None] + offset, ends[:, None])  # [R, L]
    places = step.places[sequences[:, None], positions]
    mask = None
    if min(seen[row] for row in rows) < length:
        mask = torch.zeros(len(rows), 1, length, dtype=q.dtype, device=device)
        mask.masked_fill_(offset >= counts[:, None, None], -math.inf)
    pairs = None
    if keys.dtype == q.dtype and _sparse_kernels_work(q.device.type, q.dtype):
        heads = torch.arange(num_heads, device=device) // (num_heads // num_kv_heads)
        columns = (places[:, None, :] * num_kv_heads + heads[:, None]).flatten()
        bounds = torch.arange(0, len(columns) + 1, length, device=device)
        shape = (len(rows) * num_heads, keys.shape[0] * num_kv_heads)
        pairs = _csr(bounds, columns, torch.zeros(len(columns), dtype=q.dtype, device=device), shape)
    return _Group(len(rows), places, mask, pairs)


def _rows_in_place(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group, params: AttentionParams
) -> torch.Tensor:
    """Attention that reads the pool where it lies: two sparse kernels around a dense softmax."""
    assert group.pairs is not None
    rows, heads, size = q.shape
    scores = group.pairs.values().view(rows, heads, -1)  # a view of memory that all layers of the step use
    mask_first = group.mask is not None and params.softcap is None
    if mask_first:
        scores.copy_(group.mask)  # the products are added to it, so the mask costs nothing more
    else:
        scores.zero_()
    torch.sparse.sampled_addmm(
        group.pairs,
        q.reshape(rows * heads, size),
        keys.view(-1, size).t(),
        alpha=params.scale / (params.softcap or 1.0),
        out=group.pairs,
    )
    weights, share = _softmax_(scores, None if mask_first else group.mask, params)
    out = torch.embedding_bag(
        values.view(-1, values.shape[2]),
        group.pairs.col_indices(),
        group.pairs.crow_indices(),
        mode=0,  # sum
        per_sample_weights=weights.flatten(),
        include_last_offset=True,
    )[0].view(rows, heads, -1)
    return out if share is None else out.mul_(share)


def _rows_gathered(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group, params: AttentionParams
) -> torch.Tensor:
    """The same by gathering first, for dtypes and devices without the sparse kernels."""
    rows, heads, size = q.shape
    k, v = keys[group.places].transpose(1, 2), values[group.places].transpose(1, 2)  # [R, HK, L, D]
    folded = q.reshape(rows, k.shape[1], -1, size)  # the heads of a group share keys: make them the query length
    if params.softcap is None and params.sinks is None:
        mask = None if group.mask is None else group.mask[:, None].expand(-1, -1, folded.shape[2], -1)
        out = functional.scaled_dot_product_attention(
            folded, k.to(q.dtype), v.to(q.dtype), attn_mask=mask, scale=params.scale
        )
        return out.reshape(rows, heads, -1)
    compute = torch.promote_types(q.dtype, torch.float32)
    scores = (folded.to(compute) @ k.to(compute).mT).mul_(params.scale / (params.softcap or 1.0)).view(rows, heads, -1)
    weights, share = _softmax_(scores, group.mask, params)
    out = (weights.view(rows, k.shape[1], -1, weights.shape[-1]) @ v.to(compute)).view(rows, heads, -1)
    return (out if share is None else out.mul_(share)).to(q.dtype)


def _softmax_(
    scores: torch.Tensor, mask: torch.Tensor | None, params: AttentionParams
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Soft cap, mask and softmax of scores ``[rows, HQ, L]``, which are already divided by the cap; overwrites them.

    Returns the weights and, with sinks, ``[rows, HQ, 1]``: the share of the softmax that the sink leaves.
    """
    if params.softcap is not None:
        scores.tanh_().mul_(params.softcap)
    if mask is not None:
        scores.add_(mask)
    share = None
    if params.sinks is not None:
        sinks = params.sinks.to(scores.dtype)[:, None]
        share = torch.sigmoid(torch.logsumexp(scores, dim=-1, keepdim=True) - sinks)
    return torch.softmax(scores, dim=-1), share


def _attend_long(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: AttentionContext,
    sequence: _Long,
    params: AttentionParams,
) -> torch.Tensor:
    """One sequence with n new tokens, through SDPA or, with a soft cap or sinks, an explicit softmax -> ``[n, HQ, D]``."""
    start, stop, length = sequence.start, sequence.stop, sequence.length
    new = stop - start
    first = 0 if params.window is None else max(0, length - new + 1 - params.window)
    if first == 0 and new == length:  # nothing in the cache: the new keys are all there is
        past_k, past_v = k[start:stop], v[start:stop]
    else:
        places = _step_of(context).places[sequence.s, first:length]
        past_k, past_v = keys.index_select(0, places), values.index_select(0, places)
    query = q[start:stop].transpose(0, 1)[None]  # [1, HQ, n, D]
    past_k, past_v = past_k.to(q.dtype).transpose(0, 1)[None], past_v.to(q.dtype).transpose(0, 1)[None]
    grouped = q.shape[1] != keys.shape[1]
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
    """``[n, length - first]`` in q's dtype, 0 where a query sees a key and -inf elsewhere. Made once per step."""
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
    """q ``[HQ, n, D]``, k and v ``[HK, L, D]`` -> ``[n, HQ, D]``, some queries at a time to bound the scores' memory."""
    heads, new, size = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    k, v = k.to(compute), v.to(compute)
    out = torch.empty(new, heads, v.shape[2], dtype=q.dtype, device=q.device)
    step = max(1, MAX_SCORES // (heads * k.shape[1]))
    for a in range(0, new, step):
        part = q[:, a : a + step].to(compute)
        folded = part.reshape(k.shape[0], -1, size)  # [HK, G * n', D]
        scores = (folded @ k.mT).mul_(params.scale / (params.softcap or 1.0)).view(heads, part.shape[1], -1)
        weights, share = _softmax_(scores.transpose(0, 1), mask[a : a + step, None], params)  # [n', HQ, L]
        folded_weights = weights.transpose(0, 1).reshape(k.shape[0], -1, k.shape[1])
        result = (folded_weights @ v).view(heads, part.shape[1], -1).transpose(0, 1)
        out[a : a + step] = result if share is None else result * share
    return out


def _csr(bounds: torch.Tensor, columns: torch.Tensor, data: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return torch.sparse_csr_tensor(bounds, columns, data, size=shape, check_invariants=False)


@functools.cache
def _sparse_kernels_work(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch build has the two sparse kernels for the dtype, writes in place, and gets a small case right."""
    if device != "cpu":
        return False
    a, b = torch.arange(8.0).view(2, 4).to(dtype), torch.arange(12.0).view(3, 4).to(dtype)
    columns, bounds, data = torch.tensor([0, 2, 1, 1]), torch.tensor([0, 2, 4]), torch.ones(4, dtype=dtype)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once per process that CSR tensors are in beta
        try:
            pairs = _csr(bounds, columns, data, (2, 3))
            torch.sparse.sampled_addmm(pairs, a, b.t(), alpha=0.5, out=pairs)
            sums = torch.embedding_bag(b, columns, bounds, per_sample_weights=data, mode=0, include_last_offset=True)[0]
        except (RuntimeError, NotImplementedError):
            return False
    scores = 1 + 0.5 * (a @ b.t())
    expected = torch.stack([scores[0, 0] * b[0] + scores[0, 2] * b[2], 2 * scores[1, 1] * b[1]])
    return pairs.values().data_ptr() == data.data_ptr() and torch.equal(sums, expected)
