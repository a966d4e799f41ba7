"""StepPlan: everything that one step needs to know, as plain arrays that could be sent to another process."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache

from gapless.batch.row_layout import I32, Bools


class Feature(enum.IntFlag):
    """What the sample half of a step must be able to do. See `COMBINATIONS` for what is captured."""

    GREEDY = 0
    SAMPLE = 1  # at least one row draws
    FILTER = 2  # at least one row has top-k, top-p or min-p
    MIN_TOKENS = 4  # at least one row masks its stop tokens
    PROCESS = 8  # at least one row has penalties, a bias, bad words or allowed ids
    LOGPROBS = 16  # at least one row wants log-probabilities


_ALL_DRAWS = Feature.SAMPLE | Feature.FILTER | Feature.MIN_TOKENS

COMBINATIONS = (
    *(
        draw | mask
        for draw in (Feature.GREEDY, Feature.SAMPLE, Feature.SAMPLE | Feature.FILTER)
        for mask in (Feature.GREEDY, Feature.MIN_TOKENS)
    ),
    _ALL_DRAWS | Feature.LOGPROBS,
    _ALL_DRAWS | Feature.LOGPROBS | Feature.PROCESS,
)
"""Sets of features that have a graph, from the cheapest to the one that can do everything. Each further one costs a
capture per width and slot, so that the rarer features come with everything that a batch may also need; rows that do
not ask for them skip their work."""


@lru_cache(maxsize=64)
def covering(features: Feature) -> Feature:
    """The cheapest of `COMBINATIONS` that can do what ``features`` name."""
    return next(c for c in COMBINATIONS if c & features == features)


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
        width: logits of each sequence. 1 for a plain step. In a step with drafts K + 1, and tokens may exist that the
            host does not count: ``starts`` are then lower bounds where ``follows`` is set.
        drafts: bool ``[S]`` in a step with drafts: the sequence is the row's last token and K drafts, and draws at
            each of them as far as the drafts are right. ``query_lens`` is then K + 1.
        few: in a step with drafts: no sequence computes more than one token, those with drafts aside.
        follows: bool ``[S]`` in a step with drafts: the device finds the start, one before the row's `Word.LENGTH`.
        scores: bool ``[S]``, or None for none: the sequence asks how likely the prompt's own next token is, which the
            token table holds. Such a sequence is one token long, and several of them may name the same row: what one
            of them writes into the cache, the later ones read, as every token of a chunk does.
        constrained: bool ``[S]``, or None for none: the sequence draws a token that a grammar restricts. The mask of
            what it allows depends on the tokens before, so the step is held between its forward and its sampling until
            all older steps are committed; see `gapless.engine.engine.Engine`.
        lora: some row runs with an adapter. Which one stands in the row (`Word.LORA`).
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
    scores: Bools | None = None
    constrained: Bools | None = None
    lora: bool = False
    width: int = 1
    drafts: Bools | None = None
    follows: Bools | None = None
    few: bool = False

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
        """Each sequence computes exactly one token, at a position that the host knows."""
        return self.width == 1 and len(self.input_ids) == len(self.rows)

    @property
    def draws_only(self) -> bool:
        """Each sequence computes one token and draws the next."""
        return self.decode_only and bool(self.samples.all())
