"""StepBuilder: a step while it is put together, and what it can still spend. For the loop's thread only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gapless.batch.plan import EmbedUpload
from gapless.batch.row_layout import I32, RowLayout
from gapless.config import EngineConfig


def max_updates(config: EngineConfig, layout: RowLayout) -> int:
    """Changes of the arena that one step can carry: every row may need a block, a full budget of prompt tokens its
    blocks, and some new requests their parameters, a few of them with masks and everything else that one may ask for.
    What does not fit waits for the next step. Where drafts are looked up in the prompt, a hit in the prefix cache
    brings its tokens along, as long as it may be."""
    looked_up = config.speculative is not None and config.speculative.reads_prompt
    decodes = (1 + layout.num_groups) * config.max_num_seqs
    updates = max(config.max_num_batched_tokens, 1024) + decodes + 4 * layout.request_words
    return updates + (layout.max_model_len + layout.num_groups * layout.max_blocks if looked_up else 0)


@dataclass(slots=True)
class StepBuilder:
    """Sequences in order, as pieces of arrays. `gapless.scheduler.row_states.RowStates.launch` makes the plan of them.

    Attributes:
        budget: tokens that it can still take.
        updates_left: changes of the arena that it can still carry.
        seqs_left: sequences that it can still take, beside one for each running row.
        full: a request waits for room among the updates of a later step.
        published: what the running rows generated can be found in the prefix cache by now.
        drafting: rows that decode with drafts in it.
        scored: rows that score their prompt in it, one token a sequence.
        embeds: of requests that start in it.
    """

    budget: int
    updates_left: int
    seqs_left: int = 0
    full: bool = False
    published: bool = False
    drafting: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    scored: list[int] = field(default_factory=list)
    rows: list[I32] = field(default_factory=list)
    lens: list[I32] = field(default_factory=list)
    updates: list[I32] = field(default_factory=list)
    embeds: list[EmbedUpload] = field(default_factory=list)

    def extend(self, rows: I32, lens: I32) -> None:
        """One sequence of each of the ``rows [n]``, of ``lens [n]`` tokens."""
        self.rows.append(rows)
        self.lens.append(lens)
        self.budget -= int(lens.sum())

    def add(self, row: int, length: int) -> None:
        """One sequence of ``length`` tokens."""
        self.rows.append(np.array([row], np.int32))
        self.lens.append(np.array([length], np.int32))
        self.budget -= length

    def update(self, changes: I32) -> None:
        """Changes ``[n, 2]`` of the arena."""
        if len(changes):
            self.updates.append(changes)
            self.updates_left -= len(changes)

    def drop(self, row: int) -> None:
        """Take the row's sequences out again; its updates stay, they are true."""
        self.scored = [other for other in self.scored if other != row]
        for i, rows in enumerate(self.rows):
            if row in rows:
                keep = rows != row
                self.budget += int(self.lens[i][~keep].sum())
                self.rows[i], self.lens[i] = rows[keep], self.lens[i][keep]
