"""Draft: a step while the scheduler puts it together, and what it can still spend. For the loop's thread only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gapless.plan import I32


@dataclass(slots=True)
class Draft:
    """Sequences in order, as pieces of arrays.

    Attributes:
        budget: tokens that it can still take.
        updates_left: changes of the arena that it can still carry.
        seqs_left: sequences that it can still take, beside one for each running row.
        full: a request waits for room among the updates of a later step.
        published: what the running rows generated can be found in the prefix cache by now.
        drafting: rows that decode with drafts in it.
        scored: rows that score their prompt in it, one token a sequence.
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

    def add(self, row: int, length: int) -> None:
        """One sequence of ``length`` tokens."""
        self.rows.append(np.array([row], np.int32))
        self.lens.append(np.array([length], np.int32))
        self.budget -= length

    def score(self, row: int, length: int) -> None:
        """``length`` sequences of one token, side by side; the row has its one sequence already."""
        self.rows.append(np.full(length, row, np.int32))
        self.lens.append(np.ones(length, np.int32))
        self.budget -= length
        self.seqs_left -= length - 1
        self.scored.append(row)

    def update(self, changes: I32) -> None:
        """Changes ``[n, 2]`` of the arena."""
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


def places(rows: I32) -> I32:
    """How many of the entries just before each are equal to it."""
    first = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
    counts = np.diff(np.append(first, len(rows)))
    return (np.arange(len(rows)) - np.repeat(first, counts)).astype(np.int32)
