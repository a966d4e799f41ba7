"""StepPlan: everything that one step needs to know, as plain arrays that could be sent to another process.

The device keeps one persistent row per running request. All 32-bit words of all rows lie in one arena, so that there
is one kind of change: "word w becomes v". `RowLayout` says where each word lives; the scheduler writes changes with
it, the pipeline cuts views with it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gapless.request import MAX_STOP_TOKEN_IDS

I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

NULL_BLOCK = 0
"""Block 0 of every pool: padding writes and reads it, no request ever owns it."""


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
    STOP_IDS = 8  # MAX_STOP_TOKEN_IDS words
    COUNT = 8 + MAX_STOP_TOKEN_IDS


class Feature(enum.IntFlag):
    """What the sample half of a step must be able to do. A graph is captured per combination that is used."""

    GREEDY = 0
    SAMPLE = 1  # at least one row draws
    FILTER = 2  # at least one row has top-k, top-p or min-p
    MIN_TOKENS = 4  # at least one row masks its stop tokens


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the words of the rows lie in the arena. Row ``max_num_seqs`` is the null row, which padding uses.

    Three sections, one after the other: ``token_table [R + 1, max_model_len]``, ``block_tables [R + 1, max_blocks]``,
    ``params [R + 1, Word.COUNT]``, with R = ``max_num_seqs``.
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int

    @property
    def num_rows(self) -> int:
        """Rows with the null row."""
        return self.max_num_seqs + 1

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
    def params_at(self) -> int:
        """First word of the sampling parameters."""
        return self.block_tables_at + self.num_rows * self.max_blocks

    @property
    def num_words(self) -> int:
        """Words of the whole arena."""
        return self.params_at + self.num_rows * int(Word.COUNT)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Frozen: nothing in it changes once the scheduler has returned it.

    S sequences, T tokens, packed in the order of ``rows``. Sequence s computes the positions
    [starts[s], starts[s] + query_lens[s]) of its row. Where ``samples[s]``, its last token's logits give the token at
    position starts[s] + query_lens[s], which the device writes into the token table and into the output.

    Attributes:
        step: 0, 1, 2, ... in launch order.
        rows, starts, query_lens: int32 ``[S]``.
        samples: bool ``[S]``.
        input_ids: int32 ``[T]``, placeholder 0 where ``carry`` is set.
        carry: bool ``[T]``, the carry-over mask: the host did not know this id when it planned; the device takes it
            from token_table[row, position].
        updates: int32 ``[U, 2]``, changes (word, value) of the arena, applied before anything else of the step.
        features: what sampling needs.
    """

    step: int
    rows: I32
    starts: I32
    query_lens: I32
    samples: Bools
    input_ids: I32
    carry: Bools
    updates: I32
    features: Feature

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def decode_only(self) -> bool:
        """Each sequence computes exactly one token."""
        return len(self.input_ids) == len(self.rows)

    @property
    def draws_only(self) -> bool:
        """Each sequence computes one token and draws the next."""
        return self.decode_only and bool(self.samples.all())
