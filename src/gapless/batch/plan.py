"""StepPlan: everything that one step needs to know, as plain arrays that could be sent to another process.

Most steps of a batch are the one before, moved on: the same sequences, each where it has got to. Such a plan says so
(`StepPlan.repeats`), and follows from the last one and its changes alone (`StepPlan.moved_on`). So whoever has the last
plan, a slot or another process, need not be given its arrays again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gapless.batch.row_layout import I32, Bools
from gapless.batch.row_params import Feature


class SeqFlag(enum.IntFlag):
    """What one sequence of a step does: bits of its flags in the plan, in the slot, and in every kernel."""

    DRAWS = 1  # its last token's logits give a token
    SCORES = 2  # it asks how likely the prompt's own next token is
    DEVICE_START = 4  # where it starts only the device knows: one before the row's `Word.LENGTH`
    DRAFTS = 8  # it is the row's last token and K drafts, and draws at each of them as far as they are right


NO_UPDATES = np.zeros((0, 2), np.int32)
_DRAWS = int(SeqFlag.DRAWS)  # NumPy makes 64 bits of an enum's


@dataclass(frozen=True, slots=True)
class EmbedUpload:
    """Embeddings of prompt tokens, written on the device before the step's forward: ``data`` ``[n, bytes]`` to the rows
    ``rows`` int32 ``[n]`` of the table, no row twice."""

    rows: I32
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Frozen: nothing in it changes once the scheduler has returned it.

    S sequences, T tokens, packed in the order of ``rows``. Sequence s computes the positions
    [starts[s], starts[s] + query_lens[s]) of its row. Where it draws, its last token's logits give the token at
    position starts[s] + query_lens[s], which the device writes into the token table and into the output.

    Attributes:
        step: 0, 1, 2, ... in launch order.
        rows, starts, query_lens: int32 ``[S]``.
        flags: int32 ``[S]``, see `SeqFlag`. A sequence that scores is one token long, and several of them may name the
            same row: what one of them writes into the cache, the later ones read, as every token of a chunk does.
        input_ids: int32 ``[T]``, placeholder 0 where ``carry`` is set.
        carry: bool ``[T]``, the carry-over mask: the host did not know this id when it planned; the device takes it
            from token_table[row, position].
        updates: int32 ``[U, 2]``, changes (word, value) of the arena, applied before anything else of the step.
        features: what sampling needs.
        constrained: bool ``[S]``, or None for none: the sequence draws a token that a grammar restricts. The mask of
            what it allows depends on the tokens before, so the step waits between its forward and its sampling until
            all older steps are committed; see `gapless.scheduler.masks`.
        embeds: what requests that start in this step bring, or None. An input id ``-1 - r`` means row r of that table.
        lora: some row runs with an adapter. Which one stands in the row (`Word.LORA`).
        query_width: logits of each sequence: 1, and in a step with drafts K + 1. Then tokens may exist that the host
            does not count: ``starts`` are lower bounds where the device knows the start.
        max_query_len: in a step with drafts and no prompt the most tokens of a sequence, K + 1; else None.
        repeats: 0, or for how many steps the plan has been the one before, moved on.
        carried: every id is carried over.
    """

    step: int
    rows: I32
    starts: I32
    query_lens: I32
    flags: I32
    input_ids: I32
    carry: Bools
    updates: I32
    features: Feature
    constrained: Bools | None = None
    lora: bool = False
    query_width: int = 1
    max_query_len: int | None = None
    repeats: int = 0
    carried: bool = False
    embeds: EmbedUpload | None = None

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def draws(self) -> Bools:
        """Bool ``[S]``: the sequences that draw."""
        found: Bools = (self.flags & _DRAWS) != 0
        return found

    def having(self, flag: SeqFlag) -> Bools:
        """Bool ``[S]``: the sequences with this flag."""
        found: Bools = (self.flags & int(flag)) != 0
        return found

    @property
    def decode_only(self) -> bool:
        """Each sequence computes exactly one token, at a position that the host knows."""
        return self.query_width == 1 and len(self.input_ids) == len(self.rows)

    @property
    def draws_only(self) -> bool:
        """Each sequence computes one token and draws the next."""
        return self.decode_only and bool((self.flags == _DRAWS).all())

    @property
    def has_prompts(self) -> bool:
        """Some sequence computes several tokens, drafts aside, or scores one."""
        if self.repeats or self.draws_only:
            return False
        return not (self.decode_only or self.max_query_len) or bool(self.having(SeqFlag.SCORES).any())

    def moved_on(self, updates: I32 = NO_UPDATES, input_ids: I32 | None = None) -> StepPlan:
        """The next step of an unchanged batch, in which every sequence draws.

        Each sequence is one position further, or still one before the row's length where the device knows the start.

        Args:
            updates: of this step.
            input_ids: int32 ``[T]`` if the host knows all of them; else all are carried over.
        """
        if input_ids is None and self.carried and self.repeats:
            ids, carry = self.input_ids, self.carry
        else:
            ids = np.zeros(self.num_tokens, np.int32) if input_ids is None else input_ids
            carry = np.full(self.num_tokens, input_ids is None)
        starts = self.starts + np.int32(1) if self.query_width == 1 else self.starts
        return StepPlan(  # `dataclasses.replace` takes twice as long
            self.step + 1, self.rows, starts, self.query_lens, self.flags, ids, carry, updates, self.features,
            self.constrained, self.lora, self.query_width, self.max_query_len, self.repeats + 1, input_ids is None,
        )  # fmt: skip
