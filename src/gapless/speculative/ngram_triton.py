"""The lookup of `gapless.speculative.ngram` as two Triton kernels, with equal results.

    search  programs share a row's places; each takes its best, and the row's best is found by an atomic maximum of
            (tokens that match, place) in one word
    write   the drafts, and how many; the word goes back to zero for the next step

Sizes are read on the device, so that a graph may hold the launches.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.attention.context import AttentionContext
from gapless.batch.plan import SeqFlag
from gapless.batch.row_params import Feature, Word
from gapless.device.base import Device
from gapless.speculative.base import Sequences
from gapless.speculative_config import MAX_NGRAM

_COUNT, _LENGTH = tl.constexpr(int(Word.COUNT)), tl.constexpr(int(Word.LENGTH))
_NUM_DRAFTS = tl.constexpr(int(Word.NUM_DRAFTS))
_DEVICE_START, _DRAFTS = tl.constexpr(int(SeqFlag.DEVICE_START)), tl.constexpr(int(SeqFlag.DRAFTS))
_PLACES = tl.constexpr(1 << 27)  # more than a row has; MAX_NGRAM times that fits a word
_MAX_PROGRAMS = 32  # that search one row
_BLOCK = 1024
assert MAX_NGRAM * _PLACES.value < 2**31


@triton.jit
def _row_length(params_ptr, row, flags, start):
    length = start + 1
    if (flags & _DEVICE_START) != 0:
        length = tl.load(params_ptr + row * _COUNT + _LENGTH)
    return length


@triton.jit(do_not_specialize=["max_model_len"])
def _search_kernel(
    arena_ptr, params_ptr, rows_ptr, starts_ptr, flags_ptr, best_ptr, max_model_len, MIN: tl.constexpr,
    MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    flags = tl.load(flags_ptr + s)
    if (flags & _DRAFTS) != 0:
        row = tl.load(rows_ptr + s).to(tl.int64)
        length = _row_length(params_ptr, row, flags, tl.load(starts_ptr + s))
        table_ptr = arena_ptr + row * max_model_len
        best = tl.zeros([BLOCK], tl.int32)
        for first in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
            place = first + tl.arange(0, BLOCK)
            going_on = place < length
            matches = tl.zeros([BLOCK], tl.int32)
            for k in tl.static_range(MAX):
                going_on = going_on & (place > k)
                latest = tl.load(table_ptr + tl.maximum(length - 1 - k, 0))
                going_on = going_on & (tl.load(table_ptr + place - 1 - k, mask=going_on, other=-1) == latest)
                matches += going_on.to(tl.int32)
            best = tl.maximum(best, tl.where(matches >= MIN, matches * _PLACES + place, 0))
        tl.atomic_max(best_ptr + s, tl.max(best, 0), sem="relaxed")


@triton.jit(do_not_specialize=["max_model_len"])
def _write_kernel(
    arena_ptr, params_ptr, rows_ptr, starts_ptr, flags_ptr, best_ptr, max_model_len, K: tl.constexpr,
    KP: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    flags = tl.load(flags_ptr + s)
    if (flags & _DRAFTS) != 0:
        row = tl.load(rows_ptr + s).to(tl.int64)
        length = _row_length(params_ptr, row, flags, tl.load(starts_ptr + s))
        best = tl.load(best_ptr + s)
        tl.store(best_ptr + s, 0)
        place = best % _PLACES
        count = tl.where(best > 0, tl.minimum(K, max_model_len - length), 0)
        j = tl.arange(0, KP)
        table_ptr = arena_ptr + row * max_model_len
        there = j < count
        draft = tl.load(table_ptr + place + j % tl.maximum(length - place, 1), mask=there, other=0)
        tl.store(table_ptr + length + j, draft, mask=there)
        tl.store(params_ptr + row * _COUNT + _NUM_DRAFTS, count)


class TritonNgramProposer:
    """See the module and `gapless.speculative.base.Proposer`."""

    samples = False

    def __init__(self, num_drafts: int, min_ngram: int, max_ngram: int, device: Device, max_seqs: int) -> None:
        self._num_drafts, self._min, self._max = num_drafts, min_ngram, max_ngram
        self._best = device.device_buffer((max_seqs,), torch.int32, "ngram_best")  # zero between steps
        self.state: tuple[torch.Tensor, ...] = (self._best,)

    def propose(self, sequences: Sequences, features: Feature) -> None:
        """See `gapless.speculative.base.Proposer`."""
        layout, seqs = sequences.layout, sequences.rows.shape[0]
        programs = min(_MAX_PROGRAMS, triton.cdiv(layout.max_model_len, _BLOCK))
        shared = (
            sequences.arena.words, sequences.arena.params, sequences.rows, sequences.starts, sequences.flags,
            self._best, layout.max_model_len,
        )  # fmt: skip
        _search_kernel[(seqs, programs)](*shared, MIN=self._min, MAX=self._max, BLOCK=_BLOCK, num_warps=4)
        k = self._num_drafts
        _write_kernel[(seqs,)](*shared, K=k, KP=triton.next_power_of_2(k), num_warps=1)

    def follow(self, input_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> None:
        """Nothing: the token table has them."""

    def drop_pool(self) -> None:
        """Nothing is large."""

    def take_pool(self) -> None:
        """Nothing was dropped."""
