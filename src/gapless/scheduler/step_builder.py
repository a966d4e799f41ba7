"""StepBuilder: a step while it is put together, what it can still spend, and the plan that comes of it.

For the loop's thread only. `StepBuilder.build` is where rows are launched: it moves their counts, so that the next plan
starts where this one ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gapless.batch.plan import Feature, StepPlan
from gapless.batch.row_layout import I32
from gapless.batch.row_table import RowTable
from gapless.scheduler.drafting import Drafting
from gapless.scheduler.steady import NO_UPDATES


@dataclass(slots=True)
class StepBuilder:
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

    def build(self, number: int, table: RowTable, drafting: Drafting | None, last_rows: I32) -> StepPlan | None:
        """The plan of step ``number``, and the counts of its rows moved; None for a step of no sequence.

        Args:
            table: of the rows.
            drafting: of an engine with drafts.
            last_rows: of the plan before. Equal rows are the same object in both, see
            `gapless.scheduler.steady.Steady.owns`.

        Raises:
            RuntimeError: more updates than a slot holds.
        """
        r = table
        rows, lens = np.concatenate(self.rows), np.concatenate(self.lens)
        if not len(rows):
            return None
        if np.array_equal(rows, last_rows):
            rows = last_rows
        starts = r.computed[rows]
        scores = np.isin(rows, self.scored) if self.scored else None
        if scores is not None:  # the sequences of one row lie side by side
            starts = starts + places(rows)
        drafts, follows, width = None, None, 1
        ends = starts + lens
        if drafting is not None:
            drafts = np.isin(rows, self.drafting)
            ends = np.where(drafts, starts + np.int32(1), ends)
            follows = drafting.launched(rows, drafts)
            if drafts.any() or follows.any():
                width = drafting.width
            else:
                drafts = follows = None
        samples = ends == r.total[rows]
        if len(rows) == lens.sum():
            flat_rows, positions = rows, starts
        else:
            flat_rows = np.repeat(rows, lens)
            first = np.cumsum(lens) - lens
            positions = np.arange(len(flat_rows), dtype=np.int32) + np.repeat(starts - first, lens).astype(np.int32)
        carry = positions >= r.known[flat_rows]
        input_ids = np.where(carry, np.int32(0), r.tokens[flat_rows, positions])
        features = Feature(int(np.bitwise_or.reduce(r.features[rows])))
        if (r.total[rows] < r.min_end[rows]).any():
            features |= Feature.MIN_TOKENS
        if scores is not None:
            features |= Feature.LOGPROBS
            r.scored[rows[scores]] = ends[scores]  # of several values for a row NumPy takes the last, here and below
        r.computed[rows] = ends
        r.total[rows] += samples
        r.in_flight[rows] += 1
        updates = np.concatenate(self.updates) if self.updates else NO_UPDATES
        if self.updates_left < 0:
            raise RuntimeError(f"step {number} has {len(updates)} updates, {-self.updates_left} more than a slot holds")
        constrained = samples & r.constrained[rows]
        return StepPlan(
            number, rows, starts, lens, samples, input_ids, carry, updates, features, scores,
            constrained if constrained.any() else None, bool(r.lora[rows].any()), width, drafts, follows,
            few=drafts is not None and bool((drafts | (lens == 1)).all()),
        )  # fmt: skip


def places(rows: I32) -> I32:
    """How many of the entries just before each are equal to it."""
    first = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
    counts = np.diff(np.append(first, len(rows)))
    return (np.arange(len(rows)) - np.repeat(first, counts)).astype(np.int32)
