"""Attention of single query tokens over the paged pool: the decode half of `gapless.attention.reference`.

Runs on the compute stream's thread; keeps what the layers of a step share in ``context.scratch``, nothing
else.

A decode step is bound by memory: keys and values are read once and hardly computed with. To gather the paged
blocks first costs a write and a second read of everything, more than the attention itself. So a query token
reads the pool in place, with two kernels that torch has for sparse data: ``sampled_addmm`` takes the dot
products of chosen pairs of rows (queries x keys), ``embedding_bag`` the weighted sum of chosen rows (values).
On the shape of a small model (9 query heads, 3 KV heads of 64, contexts of 64 to 400) that takes between a
third and a half of the time of gathering and SDPA. Where torch lacks the kernels, `_gathered` does the same
with a copy.

Shape legend: see `gapless.attention.context`. A row is one query token; R rows make a group; L is what the
longest of them sees. A row sees the half-open range [position + 1 - seen, position + 1).
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from dataclasses import dataclass

import torch
from torch.nn import functional

from gapless.attention.context import AttentionContext, AttentionParams
from gapless.attention.kv_format import decode, scale_of

GROUP_COST = 40000
"""Padded score elements that cost as much as one more group. Padding is cheap: it rereads cached lines."""


@dataclass(slots=True)
class Rows:
    """The query tokens of a step that are handled here.

    Attributes:
        sequences, positions: of each row, the batch index and the position in the request.
        places: int64 ``[S, longest]``, flat pool place of position p of sequence s; stale, and never used,
            from the sequence's length on.
    """

    sequences: list[int]
    positions: list[int]
    places: torch.Tensor


@dataclass(slots=True)
class _Group:
    """Rows of nearly equal length, padded to L. Row r is the r-th query of the group, R in all.

    Attributes:
        places: ``[R, L]``, pool places. Padding repeats the row's last place: it reads what the row may.
        mask: ``[R, 1, L]``, -inf at padding; None if there is none.
        pairs: for the sparse kernels, a CSR matrix ``[R * HQ, N * B * HK]`` whose values are the scores,
            which each layer overwrites; None where the kernels do not work.
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


def attend_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: AttentionContext,
    rows: Rows,
    params: AttentionParams,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of single query tokens: q ``[rows, HQ, D]``, keys, values ``[N * B, HK, D]`` -> as q."""
    name = f"reference/{params.window}/{q.shape[1]}/{keys.shape[0]}/{keys.shape[1]}/{keys.dtype}"
    made = context.scratch.get(name)
    if made is None:
        made = context.scratch[name] = _make_groups(q, keys, rows, params.window)
    assert isinstance(made, _Groups)
    if made.order is not None:
        q = q.index_select(0, made.order)
    outs, first = [], 0
    for group in made.groups:
        part = q[first : first + group.num_rows]
        if group.pairs is not None and kv_scales is None:
            outs.append(_in_place(part, keys, values, group, params))
        else:
            outs.append(_gathered(part, keys, values, group, params, kv_scales))
        first += group.num_rows
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if made.inverse is None else out.index_select(0, made.inverse)


def _make_groups(q: torch.Tensor, keys: torch.Tensor, rows: Rows, window: int | None) -> _Groups:
    """Cut the rows into groups such that padding costs less than the launches that it saves."""
    seen = [position + 1 if window is None else min(position + 1, window) for position in rows.positions]
    order = sorted(range(len(seen)), key=lambda row: -seen[row])
    allowed = max(1, GROUP_COST // q.shape[1])
    cuts, waste = [0], 0
    for i, row in enumerate(order):
        waste += seen[order[cuts[-1]]] - seen[row]
        if waste > allowed:
            cuts.append(i)
            waste = 0
    if len(cuts) == 1:  # one group needs no sorting
        return _Groups(None, None, [_make_group(q, keys, rows, list(range(len(seen))), seen)])
    cuts.append(len(order))
    groups = [_make_group(q, keys, rows, order[a:b], seen) for a, b in itertools.pairwise(cuts)]
    permutation = torch.tensor(order, device=q.device)
    return _Groups(permutation, torch.argsort(permutation), groups)


def _make_group(
    q: torch.Tensor, keys: torch.Tensor, rows: Rows, members: list[int], seen: list[int]
) -> _Group:
    """The group of the rows with the indices ``members``; ``seen`` of all rows."""
    num_heads, num_kv_heads, device = q.shape[1], keys.shape[1], q.device
    length = max(seen[row] for row in members)
    sequences, ends, counts = torch.tensor(
        [
            [rows.sequences[row] for row in members],
            [rows.positions[row] for row in members],
            [seen[row] for row in members],
        ],
        device=device,
    )
    offset = torch.arange(length, device=device)
    positions = torch.minimum((ends + 1 - counts)[:, None] + offset, ends[:, None])  # [R, L]
    places = rows.places[sequences[:, None], positions]
    mask = None
    if min(seen[row] for row in members) < length:
        mask = torch.zeros(len(members), 1, length, dtype=q.dtype, device=device)
        mask.masked_fill_(offset >= counts[:, None, None], -math.inf)
    pairs = None
    if keys.dtype == q.dtype and _sparse_kernels_work(q.device.type, q.dtype):
        heads = torch.arange(num_heads, device=device) // (num_heads // num_kv_heads)
        columns = (places[:, None, :] * num_kv_heads + heads[:, None]).flatten()
        bounds = torch.arange(0, len(columns) + 1, length, device=device)
        shape = (len(members) * num_heads, keys.shape[0] * num_kv_heads)
        pairs = _csr(bounds, columns, torch.zeros(len(columns), dtype=q.dtype, device=device), shape)
    return _Group(len(members), places, mask, pairs)


def _in_place(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group, params: AttentionParams
) -> torch.Tensor:
    """Attention that reads the pool where it lies: two sparse kernels around a dense softmax."""
    assert group.pairs is not None  # chosen by the caller
    rows, heads, size = q.shape
    scores = group.pairs.values().view(rows, heads, -1)  # a view of memory that all layers of the step use
    mask_later = group.mask
    if group.mask is not None and params.softcap is None:
        scores.copy_(group.mask)  # the products are added to it, so the mask costs nothing more
        mask_later = None
    else:
        scores.zero_()
    torch.sparse.sampled_addmm(
        group.pairs,
        q.reshape(rows * heads, size),
        keys.view(-1, size).t(),
        alpha=params.scale / (params.softcap or 1.0),
        out=group.pairs,
    )
    weights, share = softmax_(scores, mask_later, params)
    out = torch.embedding_bag(
        values.view(-1, values.shape[2]),
        group.pairs.col_indices(),
        group.pairs.crow_indices(),
        mode=0,  # sum
        per_sample_weights=weights.flatten(),
        include_last_offset=True,
    )[0].view(rows, heads, -1)
    return out if share is None else out.mul_(share)


def _gathered(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: _Group,
    params: AttentionParams,
    kv_scales: torch.Tensor | None,
) -> torch.Tensor:
    """The same by gathering first, for dtypes, formats of the cache and devices without the sparse kernels."""
    rows, heads, size = q.shape
    k = decode(keys[group.places], q.dtype, scale_of(kv_scales, 0)).transpose(1, 2)  # [R, HK, L, D]
    v = decode(values[group.places], q.dtype, scale_of(kv_scales, 1)).transpose(1, 2)
    folded = q.reshape(rows, k.shape[1], -1, size)  # heads that share keys become the query length
    if params.softcap is None and params.sinks is None:
        mask = None if group.mask is None else group.mask[:, None].expand(-1, -1, folded.shape[2], -1)
        out = functional.scaled_dot_product_attention(
            folded, k, v, attn_mask=mask, scale=params.scale
        )
        return out.reshape(rows, heads, -1)
    compute = torch.promote_types(q.dtype, torch.float32)
    scores = (folded.to(compute) @ k.to(compute).mT).mul_(params.scale / (params.softcap or 1.0))
    scores = scores.view(rows, heads, -1)
    weights, share = softmax_(scores, group.mask, params)
    out = (weights.view(rows, k.shape[1], -1, weights.shape[-1]) @ v.to(compute)).view(rows, heads, -1)
    return (out if share is None else out.mul_(share)).to(q.dtype)


def softmax_(
    scores: torch.Tensor, mask: torch.Tensor | None, params: AttentionParams
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Soft cap, mask and softmax of scores ``[rows, HQ, L]``, already divided by the cap; overwrites them.

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


def _csr(
    bounds: torch.Tensor, columns: torch.Tensor, data: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    return torch.sparse_csr_tensor(bounds, columns, data, size=shape, check_invariants=False)


@functools.cache
def _sparse_kernels_work(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch has the two kernels for the dtype, lets them write in place, and gets them right."""
    if device != "cpu":
        return False
    a, b = torch.arange(8.0).view(2, 4).to(dtype), torch.arange(12.0).view(3, 4).to(dtype)
    columns, bounds, data = torch.tensor([0, 2, 1, 1]), torch.tensor([0, 2, 4]), torch.ones(4, dtype=dtype)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once per process that CSR tensors are in beta
        try:
            pairs = _csr(bounds, columns, data, (2, 3))
            torch.sparse.sampled_addmm(pairs, a, b.t(), alpha=0.5, out=pairs)
            bags = torch.embedding_bag(
                b, columns, bounds, per_sample_weights=data, mode=0, include_last_offset=True
            )
        except (RuntimeError, NotImplementedError):
            return False
    scores = 1 + 0.5 * (a @ b.t())
    expected = torch.stack([scores[0, 0] * b[0] + scores[0, 2] * b[2], 2 * scores[1, 1] * b[1]])
    return pairs.values().data_ptr() == data.data_ptr() and torch.equal(bags[0], expected)
