"""Log-probabilities as two Triton kernels. Equal to `gapless.sampling.logprobs` but for rounding.

The first takes a chunk of a row's vocabulary: its maximum, the sum of its weights, how many of its tokens are at least
as likely as the chosen one, and its k most likely tokens, one after the other. The second takes a row and merges its
chunks. Rows that do not ask end at once.

Shape legend: S rows, V vocabulary, NC chunks, K most likely tokens at most.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.batch.arena import arena_views
from gapless.batch.plan import SeqFlag
from gapless.batch.row_layout import Record, RowLayout
from gapless.batch.row_params import Feature, Word
from gapless.request.sampling_params import MAX_LOGPROBS
from gapless.sampling.reference import MIN_TEMPERATURE
from gapless.sampling.triton_filter import count_masked, float_key, mask_stop_tokens, weigh

CHUNK = 4096
_DRAWS, _SCORES = tl.constexpr(int(SeqFlag.DRAWS)), tl.constexpr(int(SeqFlag.SCORES))
_COUNT, _WIDTH = tl.constexpr(int(Word.COUNT)), tl.constexpr(int(Record.COUNT))
_NUM_PROMPT = tl.constexpr(int(Word.NUM_PROMPT_LOGPROBS))
_NUM_LOGPROBS, _TEMPERATURE = tl.constexpr(int(Word.NUM_LOGPROBS)), tl.constexpr(int(Word.TEMPERATURE))
_RANK, _IDS = tl.constexpr(int(Record.RANK)), tl.constexpr(int(Record.IDS))
_LOGPROBS = tl.constexpr(int(Record.LOGPROBS))
_MIN_T = tl.constexpr(MIN_TEMPERATURE)
_LOWEST = tl.constexpr(-(1 << 31))  # below the key of every float: nothing, or taken already
_SMALL = ["logits_ptr", "params_ptr", "rows_ptr", "positions_ptr", "flags_ptr", "tokens_ptr", "table_ptr"]
_SMALL += ["kept_ptr", "floats_ptr", "ints_ptr", "records_ptr"]


@triton.jit
def _float(pointer):
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def _asked(flag, token_ptr, given_ptr, row_ptr):
    """The token whose record is asked for, and 1 + how many others: a drawn one, or one that the prompt gives."""
    token, wanted = -1, 0
    if (flag & _DRAWS) != 0:
        token, wanted = tl.load(token_ptr), tl.load(row_ptr + _NUM_LOGPROBS)
    elif (flag & _SCORES) != 0:
        token, wanted = tl.load(given_ptr), tl.load(row_ptr + _NUM_PROMPT)
    return token, wanted


@triton.jit
def _scale(
    x,
    s,
    ids,
    row_ptr,
    kept_ptr,
    position,
    SHIFT: tl.constexpr,
    PROCESSED: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
):
    """The logarithm of what the row's token was drawn from, up to a constant; raw: the logits as they are."""
    if PROCESSED:
        x = mask_stop_tokens(x, ids, row_ptr, count_masked(row_ptr, position, MIN_TOKENS), MIN_TOKENS)
        temperature = _float(row_ptr + _TEMPERATURE)
        if temperature > 0:
            temperature = tl.maximum(temperature, _MIN_T)
            low = tl.load(kept_ptr + 3 * s)
            min_p = _float(kept_ptr + 3 * s + 1)
            top = _float(kept_ptr + 3 * s + 2)
            weight = weigh(x, top, temperature)
            dropped = ((float_key(x) >> SHIFT) < low) | (weight < min_p) | (weight <= tl.minimum(min_p, 0.0))
            x = tl.where(dropped, -float("inf"), (x - top) / temperature)
    return x


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _chunk_kernel(
    logits_ptr,
    logits_stride,
    params_ptr,
    rows_ptr,
    positions_ptr,
    flags_ptr,
    tokens_ptr,
    table_ptr,
    kept_ptr,
    floats_ptr,
    ints_ptr,
    max_model_len,
    vocab,
    NC: tl.constexpr,
    CHUNK: tl.constexpr,
    K: tl.constexpr,
    SHIFT: tl.constexpr,
    PROCESSED: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    MASK: tl.constexpr,
):
    """``floats [S, NC, 2 + K]``: maximum, sum, values; ``ints [S, NC, 1 + K]``: count, ids."""
    s, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, position = tl.load(rows_ptr + s).to(tl.int64), tl.load(positions_ptr + s)
    row_ptr = params_ptr + row * _COUNT
    flag = tl.load(flags_ptr + s) & MASK
    given_ptr = table_ptr + row * max_model_len + tl.minimum(position, max_model_len - 1)
    token, wanted = _asked(flag, tokens_ptr + s, given_ptr, row_ptr)
    if (wanted > 0) & (token >= 0) & (token < vocab):
        logits_ptr += s * logits_stride
        ids = c * CHUNK + tl.arange(0, CHUNK)
        inside = ids < vocab
        x = tl.load(logits_ptr + ids, mask=inside, other=-float("inf")).to(tl.float32)
        x = _scale(x, s, ids, row_ptr, kept_ptr, position, SHIFT, PROCESSED, MIN_TOKENS)
        one = token + tl.arange(0, 1)
        chosen = tl.load(logits_ptr + one).to(tl.float32)
        chosen = _scale(chosen, s, one, row_ptr, kept_ptr, position, SHIFT, PROCESSED, MIN_TOKENS)
        top = tl.max(x, 0)
        floats_ptr += (s * NC + c) * (2 + K)
        ints_ptr += (s * NC + c) * (1 + K)
        tl.store(floats_ptr, top)
        tl.store(floats_ptr + 1, tl.sum(tl.exp(x - tl.where(top > -float("inf"), top, 0.0)), 0))
        tl.store(ints_ptr, tl.sum((inside & (x >= tl.max(chosen, 0))).to(tl.int32), 0))
        key = tl.where(inside, float_key(x), _LOWEST)
        for i in range(wanted - 1):
            best = tl.max(key, 0)
            id = tl.min(tl.where(key == best, ids, vocab), 0)
            tl.store(ints_ptr + 1 + i, tl.where(best > _LOWEST, id, vocab))
            tl.store(floats_ptr + 2 + i, tl.max(tl.where(ids == id, x, -float("inf")), 0))
            key = tl.where(ids == id, _LOWEST, key)


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _row_kernel(
    logits_ptr,
    logits_stride,
    params_ptr,
    rows_ptr,
    positions_ptr,
    flags_ptr,
    tokens_ptr,
    table_ptr,
    kept_ptr,
    floats_ptr,
    ints_ptr,
    records_ptr,
    max_model_len,
    vocab,
    NC: tl.constexpr,
    NC_BLOCK: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    PROCESSED: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    MASK: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    row, position = tl.load(rows_ptr + s).to(tl.int64), tl.load(positions_ptr + s)
    row_ptr = params_ptr + row * _COUNT
    flag = tl.load(flags_ptr + s) & MASK
    given_ptr = table_ptr + row * max_model_len + tl.minimum(position, max_model_len - 1)
    token, wanted = _asked(flag, tokens_ptr + s, given_ptr, row_ptr)
    if (wanted > 0) & (token >= 0) & (token < vocab):
        floats_ptr += s * NC * (2 + K)
        ints_ptr += s * NC * (1 + K)
        records_ptr += s * _WIDTH
        chunk = tl.arange(0, NC_BLOCK)
        tops = tl.load(floats_ptr + chunk * (2 + K), mask=chunk < NC, other=-float("inf"))
        sums = tl.load(floats_ptr + chunk * (2 + K) + 1, mask=chunk < NC, other=0.0)
        top = tl.max(tops, 0)
        norm = top + tl.log(tl.sum(sums * tl.exp(tops - top), 0))
        one = token + tl.arange(0, 1)
        x = tl.load(logits_ptr + s * logits_stride + one).to(tl.float32)
        x = _scale(x, s, one, row_ptr, kept_ptr, position, SHIFT, PROCESSED, MIN_TOKENS)
        tl.store(records_ptr, (tl.max(x, 0) - norm).to(tl.int32, bitcast=True))
        counts = tl.load(ints_ptr + chunk * (1 + K), mask=chunk < NC, other=0)
        tl.store(records_ptr + _RANK, tl.sum(counts, 0))
        place = tl.arange(0, K_BLOCK)
        there = (chunk < NC)[:, None] & (place < wanted - 1)[None, :]
        values = tl.load(floats_ptr + chunk[:, None] * (2 + K) + 2 + place[None, :], mask=there, other=-float("inf"))
        ids = tl.load(ints_ptr + chunk[:, None] * (1 + K) + 1 + place[None, :], mask=there, other=vocab)
        key = tl.where(there & (ids < vocab), float_key(values), _LOWEST)
        for i in range(wanted - 1):
            best = tl.max(tl.max(key, 1), 0)
            id = tl.min(tl.min(tl.where((key == best) & (ids < vocab), ids, vocab), 1), 0)
            value = tl.max(tl.max(tl.where(ids == id, values, -float("inf")), 1), 0)
            tl.store(records_ptr + _IDS + i, id)
            tl.store(records_ptr + _LOGPROBS + i, (value - norm).to(tl.int32, bitcast=True))
            key = tl.where(ids == id, _LOWEST, key)


def write_records(
    logits: torch.Tensor,
    arena: torch.Tensor,
    layout: RowLayout,
    rows: torch.Tensor,
    positions: torch.Tensor,
    flags: torch.Tensor,
    tokens: torch.Tensor,
    kept: torch.Tensor,
    records: torch.Tensor,
    features: Feature,
    *,
    shift: int,
    processed: bool,
    mask: int,
) -> None:
    """Fill the records of rows that ask; others keep theirs.

    Args:
        logits: ``[S, V]``, raw, or what the token was drawn from.
        flags: see `SeqFlag`: of the token that the sequence drew, or of the one that the table holds.
        tokens: int32 ``[S]``, drawn.
        kept: int32 ``[S, 3]``, what the draw kept: the least key, the bits of the least weight (negative: no filter)
            and of the largest logit. Read for processed log-probabilities only.
        records: int32 ``[S, Record.COUNT]``.
        mask: which flags count here.
        shift: low bits of a logit's key that carry nothing.
    """
    seqs, vocab = logits.shape
    if not seqs:
        return
    chunks = triton.cdiv(vocab, CHUNK)
    floats = torch.empty((seqs, chunks, 2 + MAX_LOGPROBS), dtype=torch.float32, device=logits.device)
    ints = torch.empty((seqs, chunks, 1 + MAX_LOGPROBS), dtype=torch.int32, device=logits.device)
    shared = (
        logits,
        logits.stride(0),
        arena_views(arena, layout).params,
        rows,
        positions,
        flags,
        tokens,
        arena,
        kept,
        floats,
        ints,
    )
    flag_of = {
        "K": MAX_LOGPROBS,
        "SHIFT": shift,
        "PROCESSED": processed,
        "MIN_TOKENS": bool(features & Feature.MIN_TOKENS),
        "MASK": mask,
    }
    _chunk_kernel[(seqs, chunks)](*shared, layout.max_model_len, vocab, NC=chunks, CHUNK=CHUNK, **flag_of, num_warps=8)
    _row_kernel[(seqs,)](
        *shared,
        records,
        layout.max_model_len,
        vocab,
        NC=chunks,
        NC_BLOCK=triton.next_power_of_2(chunks),
        K_BLOCK=triton.next_power_of_2(MAX_LOGPROBS),
        **flag_of,
        num_warps=4,
    )
