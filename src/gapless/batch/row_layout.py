"""Words of a row: where each word of the persistent rows lies, and what it means.

The device keeps one persistent row per running request. All 32-bit words of all rows lie in one arena, so that there
is one kind of change: "word w becomes v". `RowLayout` says where each word lives; the scheduler writes changes with
it, the runner cuts views with it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gapless.request.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
)

I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

NULL_BLOCK = 0
"""Block 0 of every pool: padding writes and reads it, no request ever owns it."""

BAD_WORDS_WIDTH = MAX_BAD_WORDS + 1 + MAX_BAD_WORD_TOKENS
"""Words of one row's bad words: offsets, then tokens."""


class Word(enum.IntEnum):
    """Places of one row's sampling parameters, in 32-bit words. F: the word holds a float's bits."""

    TEMPERATURE = 0  # F, 0 is greedy
    TOP_K = 1  # 0 keeps all
    TOP_P = 2  # F
    MIN_P = 3  # F
    SEED_LOW = 4
    SEED_HIGH = 5
    MIN_END = 6  # the first position that a stop token may take
    NUM_STOP = 7
    PROMPT_LEN = 8
    PRESENCE = 9  # F
    FREQUENCY = 10  # F
    REPETITION = 11  # F
    NUM_BIAS = 12  # entries of the row's `RowLayout.bias_at`
    NUM_BAD_WORDS = 13  # entries of the row's `RowLayout.bad_words_at`
    ALLOWED_ONLY = 14  # 1: only what `RowLayout.allowed_at` marks
    PROCESS = 15  # 1: any of the seven words before this one asks for something
    NUM_LOGPROBS = 16  # 0: none; k + 1: of the chosen token and the k most likely ones
    NUM_PROMPT_LOGPROBS = 17  # the same for tokens of the prompt
    LORA = 18  # slot of the row's adapter, 0 for none; read by the forward half
    LIMIT = 19  # the first position that no token may take
    LENGTH = 20  # tokens that exist; written by steps with drafts (see `StepPlan.width`), and true after one
    NUM_DRAFTS = 21  # drafts at the positions from the row's length on; written by the proposer
    STOP_IDS = 22  # MAX_STOP_TOKEN_IDS words
    COUNT = 22 + MAX_STOP_TOKEN_IDS


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
