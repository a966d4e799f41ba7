"""RowLayout: where each word of the persistent rows lies.

The device keeps one persistent row per running request. All 32-bit words of all rows lie in one arena, so that there
is one kind of change: "word w becomes v". The scheduler writes changes with the layout (`gapless.batch.row_updates`),
the runner cuts views with it (`gapless.batch.arena`). What a row's parameters are is in `gapless.batch.row_params`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gapless.batch.row_params import BAD_WORDS_WIDTH, Word
from gapless.request.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS

I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

NULL_BLOCK = 0
"""Block 0 of every pool: padding writes and reads it, no request ever owns it."""

class Record(enum.IntEnum):
    """Places in what a step brings back for a sequence that asks for log-probabilities. F: a float's bits."""

    LOGPROB = 0  # F, of the chosen token
    RANK = 1  # of the chosen token, from 1
    IDS = 2  # MAX_LOGPROBS words: the most likely tokens, in falling order
    LOGPROBS = 2 + MAX_LOGPROBS  # F, theirs
    COUNT = 2 + 2 * MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the words of the rows lie in the arena. Row ``max_num_seqs`` is the null row, which padding uses.

    ``windows`` has one entry for each of the G groups of layers that share a block table: how many positions their
    queries see, None for all. See `gapless.cache.groups`. In an engine with K drafts ``max_model_len`` is K more than
    the longest request, so that the drafts of a row that is nearly full have a place, if no use.

    Sections, one after the other, with R = ``max_num_seqs``:

        token_table    [R + 1, max_model_len]
        block_tables   [G, R + 1, max_blocks]
        params         [R + 1, Word.COUNT]
        bias           [R + 1, 2, MAX_LOGIT_BIAS]    ids in rising order; their biases, as float bits
        bad_words      [R + 1, BAD_WORDS_WIDTH]      where each sequence begins, and where the last ends; their tokens
        allowed        [R + 1, ceil(vocab_size / 32)]    bit i % 32 of word i // 32: id i may be chosen
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int
    vocab_size: int = 0
    windows: tuple[int | None, ...] = (None,)

    @property
    def num_rows(self) -> int:
        """Rows with the null row."""
        return self.max_num_seqs + 1

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.windows)

    @property
    def null_row(self) -> int:
        """The row that padding sequences name."""
        return self.max_num_seqs

    @property
    def max_blocks(self) -> int:
        """Blocks of a request of ``max_model_len`` tokens."""
        return -(-self.max_model_len // self.block_size)

    @property
    def block_tables_at(self) -> int:
        """First word of the block tables."""
        return self.num_rows * self.max_model_len

    @property
    def table_words(self) -> int:
        """Words of one group's block tables."""
        return self.num_rows * self.max_blocks

    @property
    def params_at(self) -> int:
        """First word of the sampling parameters."""
        return self.block_tables_at + self.num_groups * self.table_words

    @property
    def bias_at(self) -> int:
        """First word of the biases."""
        return self.params_at + self.num_rows * int(Word.COUNT)

    @property
    def bad_words_at(self) -> int:
        """First word of the bad words."""
        return self.bias_at + self.num_rows * 2 * MAX_LOGIT_BIAS

    @property
    def allowed_at(self) -> int:
        """First word of the masks of allowed ids."""
        return self.bad_words_at + self.num_rows * BAD_WORDS_WIDTH

    @property
    def mask_words(self) -> int:
        """Words of one mask over the vocabulary."""
        return -(-self.vocab_size // 32)

    @property
    def num_words(self) -> int:
        """Words of the whole arena."""
        return self.allowed_at + self.num_rows * self.mask_words

    @property
    def request_words(self) -> int:
        """Most words that a new request has to bring, its prompt and blocks aside."""
        return int(Word.COUNT) + 2 * MAX_LOGIT_BIAS + BAD_WORDS_WIDTH + self.mask_words
