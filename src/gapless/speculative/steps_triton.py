"""What runs around the model in a step with drafts, as three Triton kernels; equal to `gapless.speculative.steps`.

Sizes are read on the device, or follow from padded shapes, so that a graph may hold the launches.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.batch.plan import SeqFlag
from gapless.batch.row_params import Word
from gapless.speculative.base import DraftIndices, Sequences

_COUNT, _LIMIT = tl.constexpr(int(Word.COUNT)), tl.constexpr(int(Word.LIMIT))
_LENGTH, _NUM_DRAFTS = tl.constexpr(int(Word.LENGTH)), tl.constexpr(int(Word.NUM_DRAFTS))
_DRAWS, _SCORES = tl.constexpr(int(SeqFlag.DRAWS)), tl.constexpr(int(SeqFlag.SCORES))
_DEVICE_START, _DRAFTS = tl.constexpr(int(SeqFlag.DEVICE_START)), tl.constexpr(int(SeqFlag.DRAFTS))
_BLOCK = 32


@triton.jit(do_not_specialize=["S"])
def _place_kernel(params_ptr, rows_ptr, starts_ptr, flags_ptr, out_ptr, S, BLOCK: tl.constexpr):
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = s < S
    device_start = (tl.load(flags_ptr + s, mask=inside, other=0) & _DEVICE_START) != 0
    row = tl.load(rows_ptr + s, mask=inside, other=0).to(tl.int64)
    length = tl.load(params_ptr + row * _COUNT + _LENGTH, mask=inside & device_start, other=0)
    start = tl.load(starts_ptr + s, mask=inside, other=0)
    tl.store(out_ptr + s, tl.where(device_start, length - 1, start), mask=inside)


@triton.jit(do_not_specialize=["S", "L", "null_row"])
def _expand_kernel(
    params_ptr, rows_ptr, flags_ptr, query_start_loc_ptr, starts_ptr, positions_ptr, out_rows_ptr, out_flags_ptr,
    out_index_ptr, out_positions_ptr, S, L, null_row, W: tl.constexpr, WP: tl.constexpr, BY_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    s = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    j = tl.arange(0, WP)[None, :]
    real = s < S
    row = tl.load(rows_ptr + s, mask=real, other=0)
    flags = tl.load(flags_ptr + s, mask=real, other=0)
    first = tl.load(query_start_loc_ptr + s, mask=real, other=0)
    end = tl.load(query_start_loc_ptr + s + 1, mask=real, other=0)
    start = tl.load(starts_ptr + s, mask=real, other=0)
    limit = tl.load(params_ptr + row.to(tl.int64) * _COUNT + _LIMIT, mask=real, other=0)
    lens = end - first
    drafts = (flags & _DRAFTS) != 0
    exists = real & ((drafts & (j < lens)) | ((j == 0) & (lens > 0)))
    at = tl.where(drafts, start, start + lens - 1) + j
    token = tl.where(drafts, first, end - 1) + j
    kept = tl.where(at + 1 < limit, flags & _DRAWS, 0) | tl.where(j == 0, flags & _SCORES, 0)
    out = token if BY_TOKEN else s * W + j
    inside = (exists if BY_TOKEN else real) & (j < W)
    tl.store(out_rows_ptr + out, tl.where(exists, row, null_row), mask=inside)
    tl.store(out_flags_ptr + out, tl.where(exists, kept, 0), mask=inside)
    tl.store(out_index_ptr + out, tl.where(exists, token, 0).to(tl.int64), mask=inside)
    tl.store(out_positions_ptr + out, tl.where(exists, at + 1, 0).to(tl.int64), mask=inside)
    if BY_TOKEN:  # and the tokens that no sequence has
        all_tokens = tl.load(query_start_loc_ptr + S)
        for begin in range(all_tokens + tl.program_id(0) * BLOCK, L, tl.num_programs(0) * BLOCK):
            t = begin + tl.arange(0, BLOCK)
            tl.store(out_rows_ptr + t, tl.zeros([BLOCK], tl.int32) + null_row, mask=t < L)
            tl.store(out_flags_ptr + t, tl.zeros([BLOCK], tl.int32), mask=t < L)
            tl.store(out_index_ptr + t, tl.zeros([BLOCK], tl.int64), mask=t < L)
            tl.store(out_positions_ptr + t, tl.zeros([BLOCK], tl.int64), mask=t < L)
    beyond = exists & (j < W) & (at >= limit)
    tl.store(positions_ptr + token, (token * 0).to(tl.int64), mask=beyond)


@triton.jit(do_not_specialize=["S"])
def _accept_kernel(
    params_ptr, rows_ptr, flags_ptr, query_start_loc_ptr, starts_ptr, ids_ptr, tokens_ptr, counts_ptr, proposed_ptr, S,
    W: tl.constexpr, BY_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = s < S
    flags = tl.load(flags_ptr + s, mask=real, other=0)
    row_ptr = params_ptr + tl.load(rows_ptr + s, mask=real, other=0).to(tl.int64) * _COUNT
    first = tl.load(query_start_loc_ptr + s, mask=real, other=0)
    lens = tl.load(query_start_loc_ptr + s + 1, mask=real, other=0) - first
    drafts = (flags & _DRAFTS) != 0
    drew = real & ((flags & _DRAWS) != 0)
    base = tl.load(starts_ptr + s, mask=real, other=0) + tl.where(drafts, 1, lens)
    room = tl.load(row_ptr + _LIMIT, mask=real, other=0) - base
    count = tl.load(row_ptr + _NUM_DRAFTS, mask=real & drafts, other=0)
    count = tl.maximum(tl.minimum(tl.minimum(count, lens - 1), room - 1), 0)
    count = tl.where(drafts & drew, count, 0)
    accepted = tl.zeros([BLOCK], tl.int32)
    for j in tl.static_range(W - 1):
        there = j < count
        drafted = tl.load(ids_ptr + first + 1 + j, mask=there, other=-1)
        token = tl.load(tokens_ptr + (first if BY_TOKEN else s * W) + j, mask=there, other=-2)
        accepted += (there & (accepted == j) & (token.to(tl.int64) == drafted)).to(tl.int32)
    emitted = tl.where(drew, tl.maximum(tl.minimum(accepted + 1, room), 0), 0)
    tl.store(counts_ptr + s, emitted, mask=real)
    tl.store(proposed_ptr + s, count, mask=real)
    tl.store(row_ptr + _LENGTH, base + emitted, mask=drew)


def place(sequences: Sequences, starts: torch.Tensor) -> None:
    """See `gapless.speculative.steps.place`."""
    seqs = sequences.rows.shape[0]
    _place_kernel[(triton.cdiv(seqs, 128),)](
        sequences.arena.params, sequences.rows, sequences.starts, sequences.flags, starts, seqs,
        BLOCK=128, num_warps=4,
    )  # fmt: skip


def expand(sequences: Sequences, positions: torch.Tensor, out: DraftIndices) -> None:
    """See `gapless.speculative.steps.expand`."""
    seqs = sequences.rows.shape[0]
    width = out.width
    _expand_kernel[(triton.cdiv(seqs, _BLOCK),)](
        sequences.arena.params, sequences.rows, sequences.flags, sequences.query_start_loc,
        out.starts, positions, out.rows, out.flags, out.logits_index, out.positions, seqs,
        out.rows.shape[0], sequences.layout.null_row, W=width, WP=triton.next_power_of_2(width),
        BY_TOKEN=out.by_token, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def accept(
    sequences: Sequences,
    indices: DraftIndices,
    input_ids: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    proposed: torch.Tensor,
) -> None:
    """See `gapless.speculative.steps.accept`."""
    seqs = sequences.rows.shape[0]
    _accept_kernel[(triton.cdiv(seqs, _BLOCK),)](
        sequences.arena.params, sequences.rows, sequences.flags, sequences.query_start_loc,
        indices.starts, input_ids, tokens, counts, proposed, seqs, W=indices.width,
        BY_TOKEN=indices.by_token, BLOCK=_BLOCK, num_warps=1,
    )  # fmt: skip
