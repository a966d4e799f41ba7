"""Sampling as two Triton kernels, between those that change logits (`triton_process`) and those that report
log-probabilities (`triton_logprobs`), which steps have in which some row asks for it. Equal to
`gapless.sampling.reference` but for rounding between two tokens.

The first kernel takes a chunk of a row's vocabulary: its maximum, the id of that, the sum of its weights,
and, where rows may have filters, the maximum of each group of 64 logits. The second takes a row: it reduces
the chunks and draws (`triton_filter` does where there is a filter). What a row gets depends on that row
alone.

Shape legend: S rows, V vocabulary, NC chunks, NG groups.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.batch.arena import arena_views
from gapless.batch.plan import SeqFlag
from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import Feature, Word
from gapless.sampling.philox import Purpose
from gapless.sampling.reference import MIN_TEMPERATURE
from gapless.sampling.triton_filter import (
    GROUP,
    LOWEST,
    count_masked,
    draw_filtered,
    invert,
    mask_stop_tokens,
    weigh,
)
from gapless.sampling.triton_logprobs import write_records
from gapless.sampling.triton_process import process

CHUNK = 4096

_GROUPS = CHUNK // GROUP.value
_DRAWS = tl.constexpr(int(SeqFlag.DRAWS))
_TEMPERATURE, _TOP_K = tl.constexpr(int(Word.TEMPERATURE)), tl.constexpr(int(Word.TOP_K))
_TOP_P, _MIN_P = tl.constexpr(int(Word.TOP_P)), tl.constexpr(int(Word.MIN_P))
_SEED_LOW, _SEED_HIGH = tl.constexpr(int(Word.SEED_LOW)), tl.constexpr(int(Word.SEED_HIGH))
_COUNT = tl.constexpr(int(Word.COUNT))
_SAMPLE = tl.constexpr(int(Purpose.SAMPLE))
_MIN_T = tl.constexpr(MIN_TEMPERATURE)
# Arguments whose alignment must not matter, or sizes of a batch would compile kernels of their own.
_SMALL = [
    "params_ptr",
    "rows_ptr",
    "positions_ptr",
    "flags_ptr",
    "chunk_max_ptr",
    "chunk_id_ptr",
    "chunk_sum_ptr",
    "group_max_ptr",
    "list_ptr",
    "out_ptr",
    "token_table_ptr",
    "kept_ptr",
]
_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def _float(pointer):
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _chunk_kernel(
    logits_ptr,
    logits_stride,
    params_ptr,
    rows_ptr,
    positions_ptr,
    flags_ptr,
    chunk_max_ptr,
    chunk_id_ptr,
    chunk_sum_ptr,
    group_max_ptr,
    vocab,
    NC: tl.constexpr,
    GROUPS: tl.constexpr,  # in a chunk
    SAMPLE: tl.constexpr,
    FILTER: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    STORE: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    row, flag = s, s == s
    if STORE:
        row = tl.load(rows_ptr + s).to(tl.int64)
        flag = (tl.load(flags_ptr + s) & _DRAWS) != 0
    row_ptr = params_ptr + row * _COUNT
    if flag:
        num_masked = count_masked(row_ptr, tl.load(positions_ptr + s), MIN_TOKENS)
        group = c * GROUPS + tl.arange(0, GROUPS)
        ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(logits_ptr + s * logits_stride + ids, mask=ids < vocab, other=-float("inf")).to(
            tl.float32
        )
        nans = tl.max(tl.max((x != x).to(tl.int32), 1), 0)
        x = mask_stop_tokens(x, ids, row_ptr, num_masked, MIN_TOKENS)
        group_max = tl.max(x, 1)
        top = tl.max(group_max, 0)
        first = tl.min(tl.min(tl.where(x == top, ids, vocab), 1), 0)
        tl.store(chunk_max_ptr + s * NC + c, tl.where(nans > 0, float("nan"), top))
        tl.store(chunk_id_ptr + s * NC + c, first)
        if FILTER:
            tl.store(group_max_ptr + s * NC * GROUPS + group, group_max)
        if SAMPLE:
            temperature = _float(row_ptr + _TEMPERATURE)
            if temperature > 0:
                weight = weigh(x, tl.where(top > -float("inf"), top, 0.0), tl.maximum(temperature, _MIN_T))
                tl.store(chunk_sum_ptr + s * NC + c, tl.sum(tl.sum(weight, 1), 0))


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _choose_kernel(
    logits_ptr,
    logits_stride,
    params_ptr,
    rows_ptr,
    positions_ptr,
    flags_ptr,
    chunk_max_ptr,
    chunk_id_ptr,
    chunk_sum_ptr,
    group_max_ptr,
    list_ptr,
    out_ptr,
    token_table_ptr,
    kept_ptr,
    max_model_len,
    vocab,
    NC: tl.constexpr,
    NC_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    NG_BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,  # low bits of a logit's key that carry nothing
    SAMPLE: tl.constexpr,
    FILTER: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    STORE: tl.constexpr,
    KEPT: tl.constexpr,  # write down what the filters kept
):
    s = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + s).to(tl.int64)
    row, flag = s, s == s
    if STORE:
        row = tl.load(rows_ptr + s).to(tl.int64)
        flag = (tl.load(flags_ptr + s) & _DRAWS) != 0
    row_ptr = params_ptr + row * _COUNT
    logits_ptr += s * logits_stride
    token = 0
    least_key = position.to(tl.int32) * 0 + (LOWEST >> SHIFT)
    least_weight = position.to(tl.float32) * 0.0 - 1.0
    if flag:
        chunk = tl.arange(0, NC_BLOCK)
        chunk_max = tl.load(chunk_max_ptr + s * NC + chunk, mask=chunk < NC, other=-float("inf"))
        chunk_id = tl.load(chunk_id_ptr + s * NC + chunk, mask=chunk < NC, other=vocab)
        nans = tl.max((chunk_max != chunk_max).to(tl.int32), 0)
        top = tl.max(chunk_max, 0)
        token = -1
        if (nans == 0) & (top > -float("inf")) & (top < float("inf")):
            token = tl.min(tl.where(chunk_max == top, chunk_id, vocab), 0)
            if SAMPLE:
                temperature = _float(row_ptr + _TEMPERATURE)
                if temperature > 0:
                    temperature = tl.maximum(temperature, _MIN_T)
                    num_masked = count_masked(row_ptr, position, MIN_TOKENS)
                    low_word = tl.load(row_ptr + _SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
                    high_word = tl.load(row_ptr + _SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
                    counter = position.to(tl.int32)
                    zero = counter * 0
                    word, _1, _2, _3 = tl.philox(
                        (high_word << 32) | low_word, counter, zero + _SAMPLE, zero, zero
                    )
                    u = word.to(tl.float64) * 2.3283064365386963e-10  # 2**-32
                    sums = tl.load(chunk_sum_ptr + s * NC + chunk, mask=chunk < NC, other=0.0)
                    sums = (sums * weigh(chunk_max, top, temperature)).to(tl.float64)
                    filtered = False
                    if FILTER:
                        top_k = tl.load(row_ptr + _TOP_K)
                        top_p = _float(row_ptr + _TOP_P)
                        min_p = _float(row_ptr + _MIN_P)
                        filtered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0)
                        if filtered:
                            least_weight = min_p
                            token, least_key = draw_filtered(
                                logits_ptr,
                                group_max_ptr + s * NC * GROUPS,
                                list_ptr + s * NC * GROUPS,
                                vocab,
                                row_ptr,
                                num_masked,
                                top,
                                temperature,
                                tl.sum(sums, 0),
                                u,
                                top_k,
                                top_p,
                                min_p,
                                NC * GROUPS,
                                NG_BLOCK,
                                SHIFT,
                                MIN_TOKENS,
                            )
                    if not filtered:
                        target = u * tl.sum(sums, 0)
                        positive = sums > 0
                        hit = positive & (tl.cumsum(sums, 0) > target)
                        chosen = tl.min(tl.where(hit, chunk, NC), 0)
                        chosen = tl.minimum(chosen, tl.max(tl.where(positive, chunk, 0), 0))
                        before = tl.sum(tl.where(chunk < chosen, sums, 0.0), 0)
                        group = chosen * GROUPS + tl.arange(0, GROUPS)
                        ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                        x = tl.load(logits_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
                        x = mask_stop_tokens(x, ids, row_ptr, num_masked, MIN_TOKENS)
                        found, last = invert(weigh(x, top, temperature), ids, before, target, vocab)
                        token = tl.where(found < vocab, found, last)
        if KEPT:
            tl.store(kept_ptr + 3 * s, least_key)
            tl.store(kept_ptr + 3 * s + 1, least_weight.to(tl.int32, bitcast=True))
            tl.store(kept_ptr + 3 * s + 2, top.to(tl.int32, bitcast=True))
    tl.store(out_ptr + s, token)
    if STORE:
        stored = flag & (token >= 0) & (position >= 0) & (position < max_model_len)
        tl.store(token_table_ptr + row * max_model_len + position, token, mask=stored)


def sample(
    logits: torch.Tensor, params_words: torch.Tensor, positions: torch.Tensor, features: Feature
) -> torch.Tensor:
    """See `gapless.sampling.reference.sample`. The logits may have any row stride."""
    assert params_words.is_contiguous()
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    _launch(logits, params_words, positions, features, out)
    return out


def sample_and_store(
    logits: torch.Tensor,
    arena: torch.Tensor,
    layout: RowLayout,
    rows: torch.Tensor,
    positions: torch.Tensor,
    sample_flags: torch.Tensor,
    features: Feature,
    out_tokens: torch.Tensor,
    out_records: torch.Tensor | None = None,
    *,
    processed_logprobs: bool = False,
) -> None:
    """See `gapless.sampling.reference.sample_and_store`. Sequences that get no token cost nothing."""
    flags = sample_flags.view(torch.uint8) if sample_flags.dtype == torch.bool else sample_flags
    params = arena_views(arena, layout).params
    x = process(logits, arena, layout, rows, positions, flags) if features & Feature.PROCESS else logits
    records = out_records if features & Feature.LOGPROBS else None
    kept = None
    if records is not None and processed_logprobs:
        kept = torch.empty((len(rows), 3), dtype=torch.int32, device=logits.device)
    _launch(x, params, positions, features, out_tokens, rows, flags, arena, layout.max_model_len, kept)
    if records is not None:
        # A draw's record may be of what it was drawn from; that of a prompt's token is always of the raw logits.
        draws, scores = int(SeqFlag.DRAWS), int(SeqFlag.SCORES)
        for mask, processed in ((draws, True), (scores, False)) if processed_logprobs else ((draws | scores, False),):
            of = x if processed else logits
            write_records(
                of,
                arena,
                layout,
                rows,
                positions,
                flags,
                out_tokens,
                out_tokens if kept is None else kept,
                records,
                features,
                shift=_SHIFT[of.dtype],
                processed=processed,
                mask=mask,
            )


def _launch(
    logits: torch.Tensor,
    params: torch.Tensor,
    positions: torch.Tensor,
    features: Feature,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
    flags: torch.Tensor | None = None,
    token_table: torch.Tensor | None = None,
    max_model_len: int = 0,
    kept: torch.Tensor | None = None,
) -> None:
    seqs, vocab = logits.shape
    assert logits.stride(1) == 1
    if not seqs:
        return
    chunks = triton.cdiv(vocab, CHUNK)
    groups = chunks * _GROUPS
    samples = bool(features & Feature.SAMPLE)
    filters = samples and bool(features & Feature.FILTER)
    floats = torch.empty(seqs * (2 * chunks + groups * filters), dtype=torch.float32, device=logits.device)
    ints = torch.empty(seqs * (chunks + groups * filters), dtype=torch.int32, device=logits.device)
    chunk_max, chunk_sum, group_max = floats, floats[seqs * chunks :], floats[2 * seqs * chunks :]
    chunk_id, listed = ints, ints[seqs * chunks :]
    flag_of = {
        "SAMPLE": samples,
        "FILTER": filters,
        "MIN_TOKENS": bool(features & Feature.MIN_TOKENS),
        "STORE": rows is not None,
    }
    shared = (
        logits,
        logits.stride(0),
        params,
        out if rows is None else rows,
        positions,
        out if flags is None else flags,
        chunk_max,
        chunk_id,
        chunk_sum,
        group_max if filters else floats,
    )
    _chunk_kernel[(seqs, chunks)](*shared, vocab, NC=chunks, GROUPS=_GROUPS, **flag_of, num_warps=4)
    _choose_kernel[(seqs,)](
        *shared,
        listed if filters else ints,
        out,
        out if token_table is None else token_table,
        out if kept is None else kept,
        max_model_len,
        vocab,
        NC=chunks,
        NC_BLOCK=triton.next_power_of_2(chunks),
        GROUPS=_GROUPS,
        NG_BLOCK=triton.next_power_of_2(groups),
        SHIFT=_SHIFT[logits.dtype],
        **flag_of,
        KEPT=kept is not None,
        num_warps=8 if samples else 1,
    )
