"""Logits as requests want them changed, as three Triton kernels. Equal to `gapless.sampling.process`.

    clear    zeroes the row's counts
    count    atomics over chunks of the row's positions: how often each id was generated (low bits), whether the prompt
             has it (bit 30), and whether a bad word ends with it here (bit 31)
    process  reads counts and logits, and writes what it makes of them, float32, over the counts

Rows that ask for nothing only have their logits widened. The token table is read on the compute stream, so that the
counts include the token that the step before has just drawn, whatever the host knows of it.

Shape legend: S rows, V vocabulary.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.batch.plan import SeqFlag
from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import BAD_WORDS_WIDTH, Word
from gapless.request.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS

CHUNK = 4096
_MAX_PROGRAMS = 32  # that count one row's positions
_DRAWS = tl.constexpr(int(SeqFlag.DRAWS))
_COUNT = tl.constexpr(int(Word.COUNT))
_PROMPT_LEN, _PROCESS = tl.constexpr(int(Word.PROMPT_LEN)), tl.constexpr(int(Word.PROCESS))
_PRESENCE, _FREQUENCY = tl.constexpr(int(Word.PRESENCE)), tl.constexpr(int(Word.FREQUENCY))
_REPETITION, _NUM_BIAS = tl.constexpr(int(Word.REPETITION)), tl.constexpr(int(Word.NUM_BIAS))
_NUM_BAD, _ALLOWED_ONLY = tl.constexpr(int(Word.NUM_BAD_WORDS)), tl.constexpr(int(Word.ALLOWED_ONLY))
_MAX_BIAS, _MAX_BAD = tl.constexpr(MAX_LOGIT_BIAS), tl.constexpr(MAX_BAD_WORDS)
_BAD_WIDTH = tl.constexpr(BAD_WORDS_WIDTH)
_IN_PROMPT = tl.constexpr(1 << 30)
_BANNED = tl.constexpr(-(1 << 31))
# Arguments whose alignment must not matter, or sizes of a batch would compile kernels of their own.
SMALL = ["rows_ptr", "positions_ptr", "flags_ptr", "arena_ptr", "words_ptr", "logits_ptr"]
OFFSETS = ["logits_stride", "params_at", "bias_at", "bad_words_at", "allowed_at", "mask_words", "max_model_len"]


@triton.jit
def _float(pointer):
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def _counts_anything(row_ptr):
    """Whether the row needs its tokens counted, or its bad words matched."""
    counts = (_float(row_ptr + _PRESENCE) != 0) | (_float(row_ptr + _FREQUENCY) != 0)
    counts = counts | (_float(row_ptr + _REPETITION) != 1) | (tl.load(row_ptr + _NUM_BAD) > 0)
    return counts & (tl.load(row_ptr + _PROCESS) != 0)


@triton.jit(do_not_specialize_on_alignment=SMALL, do_not_specialize=OFFSETS)
def _clear_kernel(rows_ptr, flags_ptr, arena_ptr, words_ptr, params_at, vocab, CHUNK: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    row_ptr = arena_ptr + params_at + tl.load(rows_ptr + s).to(tl.int64) * _COUNT
    if (tl.load(flags_ptr + s) & _DRAWS) != 0:  # noqa: SIM102
        if _counts_anything(row_ptr):
            ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
            tl.store(words_ptr + s * vocab + ids, tl.zeros([CHUNK], tl.int32), mask=ids < vocab)


@triton.jit
def _ban(words_ptr, bad_ptr, table_ptr, num_words, prompt_len, position, vocab):
    """Mark the last token of each bad word whose tokens before it are the latest generated ones."""
    word = tl.arange(0, _MAX_BAD)
    inside = word < num_words
    begin = tl.load(bad_ptr + word, mask=inside, other=0)
    before = tl.load(bad_ptr + word + 1, mask=inside, other=1) - begin - 1
    matches = inside & (before <= position - prompt_len)
    tokens_ptr = bad_ptr + _MAX_BAD + 1 + begin
    for i in range(tl.max(tl.where(matches, before, 0), 0)):
        here = matches & (i < before)
        expected = tl.load(tokens_ptr + i, mask=here, other=0)
        actual = tl.load(table_ptr + position - before + i, mask=here, other=0)
        matches = matches & ((i >= before) | (expected == actual))
    last = tl.load(tokens_ptr + before, mask=matches, other=0)
    matches = matches & (last >= 0) & (last < vocab)
    tl.atomic_or(words_ptr + last, tl.zeros([_MAX_BAD], tl.int32) + _BANNED, mask=matches, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=SMALL, do_not_specialize=OFFSETS)
def _count_kernel(
    rows_ptr,
    positions_ptr,
    flags_ptr,
    arena_ptr,
    words_ptr,
    params_at,
    bad_words_at,
    max_model_len,
    vocab,
    BLOCK: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s).to(tl.int64)
    row_ptr = arena_ptr + params_at + row * _COUNT
    position = tl.load(positions_ptr + s).to(tl.int32)
    words_ptr += s * vocab
    table_ptr = arena_ptr + row * max_model_len
    if ((tl.load(flags_ptr + s) & _DRAWS) != 0) & (position <= max_model_len):  # noqa: SIM102
        if _counts_anything(row_ptr):
            prompt_len = tl.load(row_ptr + _PROMPT_LEN)
            first = tl.where(_float(row_ptr + _REPETITION) != 1, 0, prompt_len)
            for start in range(first + tl.program_id(1) * BLOCK, position, tl.num_programs(1) * BLOCK):
                at = start + tl.arange(0, BLOCK)
                token = tl.load(table_ptr + at, mask=at < position, other=-1)
                known = (at < position) & (token >= 0) & (token < vocab)
                one = tl.zeros([BLOCK], tl.int32) + 1
                tl.atomic_or(words_ptr + token, one * _IN_PROMPT, mask=known & (at < prompt_len), sem="relaxed")
                tl.atomic_add(words_ptr + token, one, mask=known & (at >= prompt_len), sem="relaxed")
            num_words = tl.load(row_ptr + _NUM_BAD)
            if (tl.program_id(1) == 0) & (num_words > 0):
                bad_ptr = arena_ptr + bad_words_at + row * _BAD_WIDTH
                _ban(words_ptr, bad_ptr, table_ptr, num_words, prompt_len, position, vocab)


@triton.jit(do_not_specialize_on_alignment=SMALL, do_not_specialize=OFFSETS)
def _process_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    flags_ptr,
    arena_ptr,
    words_ptr,
    logits_stride,
    params_at,
    bias_at,
    allowed_at,
    mask_words,
    max_model_len,
    vocab,
    CHUNK: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s).to(tl.int64)
    row_ptr = arena_ptr + params_at + row * _COUNT
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    if (tl.load(flags_ptr + s) & _DRAWS) != 0:
        raw = tl.load(logits_ptr + s * logits_stride + ids, mask=inside, other=0.0).to(tl.float32)
        x = raw
        if (tl.load(row_ptr + _PROCESS) != 0) & (tl.load(positions_ptr + s) <= max_model_len):
            word = tl.zeros([CHUNK], tl.int32)
            if _counts_anything(row_ptr):
                word = tl.load(words_ptr + s * vocab + ids, mask=inside, other=0)
            if tl.load(row_ptr + _ALLOWED_ONLY) != 0:
                bits = tl.load(arena_ptr + allowed_at + row * mask_words + ids // 32, mask=inside, other=0)
                x = tl.where(((bits >> (ids % 32)) & 1) != 0, x, -float("inf"))
            x = tl.where(word < 0, -float("inf"), x)
            num_bias = tl.load(row_ptr + _NUM_BIAS)
            if num_bias > 0:  # the ids rise: those of this chunk are a range
                bias_ptr = arena_ptr + bias_at + row * 2 * _MAX_BIAS
                entry = tl.arange(0, _MAX_BIAS)
                named = tl.load(bias_ptr + entry, mask=entry < num_bias, other=2147483647)
                begin = tl.sum((named < tl.program_id(1) * CHUNK).to(tl.int32), 0)
                end = tl.sum((named < (tl.program_id(1) + 1) * CHUNK).to(tl.int32), 0)
                for i in range(begin, end):
                    x = tl.where(ids == tl.load(bias_ptr + i), x + _float(bias_ptr + _MAX_BIAS + i), x)
            penalty = _float(row_ptr + _REPETITION)
            seen = (word & 0x7FFFFFFF) != 0
            x = tl.where(seen, tl.where(x > 0, x / penalty, x * penalty), x)
            count = word & 0x3FFFFFFF
            x = x - _float(row_ptr + _FREQUENCY) * count.to(tl.float32)
            x = x - tl.where(count > 0, _float(row_ptr + _PRESENCE), 0.0)
            x = tl.where(raw == raw, x, raw)
        tl.store(words_ptr + s * vocab + ids, x.to(tl.int32, bitcast=True), mask=inside)


def process(
    logits: torch.Tensor,
    arena: torch.Tensor,
    layout: RowLayout,
    rows: torch.Tensor,
    positions: torch.Tensor,
    sample_flags: torch.Tensor,
) -> torch.Tensor:
    """See `gapless.sampling.process.process`. Rows without a token come back undefined."""
    seqs, vocab = logits.shape
    words = torch.empty((seqs, vocab), dtype=torch.int32, device=logits.device)
    if not seqs:
        return words.view(torch.float32)
    chunks, block = triton.cdiv(vocab, CHUNK), 1024
    _clear_kernel[(seqs, chunks)](rows, sample_flags, arena, words, layout.params_at, vocab, CHUNK=CHUNK)
    programs = min(_MAX_PROGRAMS, triton.cdiv(layout.max_model_len, block))
    _count_kernel[(seqs, programs)](
        rows,
        positions,
        sample_flags,
        arena,
        words,
        layout.params_at,
        layout.bad_words_at,
        layout.max_model_len,
        vocab,
        BLOCK=block,
    )
    _process_kernel[(seqs, chunks)](
        logits,
        rows,
        positions,
        sample_flags,
        arena,
        words,
        logits.stride(0),
        layout.params_at,
        layout.bias_at,
        layout.allowed_at,
        layout.mask_words,
        layout.max_model_len,
        vocab,
        CHUNK=CHUNK,
    )
    return words.view(torch.float32)
