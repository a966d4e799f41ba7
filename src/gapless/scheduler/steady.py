"""Steady: a decode batch that goes on unchanged, so that the host pays for what changes and not for the batch.

While nothing joins, leaves or ends, the next step is the one before, one position further. The scheduler then plans
from this object instead of from the row table, and puts off the updates of the table's counts (`flush`). Whatever
needs true counts ends the steady phase first; the general path takes over and makes the next one.
"""

from __future__ import annotations

import time

import numpy as np

from gapless.batch.plan import Feature, StepPlan
from gapless.batch.row_layout import I32, Bools
from gapless.batch.row_table import RowTable

NO_UPDATES = np.zeros((0, 2), np.int32)


class Steady:
    """Made from a plan in which every sequence computes and draws one token.

    Attributes:
        rows: the plan's own array, see `owns`.
        left: steps that can still be planned before a row reaches its limit, or the features change.
        room: positions that the row that is shortest of blocks can still take.
        last_drawn: tokens of the latest committed step, when none of the phase is in flight.
    """

    def __init__(self, plan: StepPlan, table: RowTable, block_size: int) -> None:
        rows = self.rows = plan.rows
        self._table = table
        self._block_size = block_size
        self._starts = plan.starts
        self._lens = plan.query_lens
        self._samples = plan.samples
        self._placeholders = np.zeros(len(rows), np.int32)
        self._carried = np.ones(len(rows), np.bool_)
        self._known = np.zeros(len(rows), np.bool_)
        self.features = plan.features
        self._constrained = plan.constrained
        self._lora = plan.lora
        self.left = int((table.limit[rows] - table.total[rows]).min())
        if plan.features & Feature.MIN_TOKENS:
            self.left = min(self.left, int((table.min_end[rows] - table.total[rows]).max()))
        self.room = int(self._rooms().min())
        width = int((table.stop_ids[rows] >= 0).sum(axis=1).max())
        self._stops = table.stop_ids[rows, :width] if width else None
        self.streaming: Bools = table.streaming[rows]
        self.any_streaming = bool(self.streaming.any())
        self.stream_ids = table.ids[rows[self.streaming]]
        self.until_limit = int((table.limit[rows] - table.known[rows]).min())  # commits until the first end by length
        self.in_flight = int(table.in_flight[rows].max())
        self.last_drawn: I32 | None = None
        self._first = rows[table.known[rows] == table.prompt_len[rows]]  # their first token is in flight
        self._planned = 0  # since the table's counts were true
        self._committed = 0

    def _rooms(self) -> I32:
        t = self._table
        return t.num_blocks[self.rows] * np.int32(self._block_size) - t.computed[self.rows]

    def needy(self) -> I32:
        """Rows that have no block for the next step; the counts must be true."""
        return self.rows[self._rooms() <= 0]

    def grown(self) -> None:
        """Blocks were added."""
        self.room = int(self._rooms().min())

    def next_plan(self, step: int, updates: I32) -> StepPlan:
        """The step after the last planned one."""
        self._starts = self._starts + np.int32(1)
        if self.in_flight:
            ids, carry = self._placeholders, self._carried
        else:
            assert self.last_drawn is not None
            ids, carry = self.last_drawn, self._known
        self.left -= 1
        self.room -= 1
        self.in_flight += 1
        self._planned += 1
        return StepPlan(
            step, self.rows, self._starts, self._lens, self._samples, ids, carry, updates, self.features,
            constrained=self._constrained,
            lora=self._lora,
        )  # fmt: skip

    def owns(self, plan: StepPlan) -> bool:
        """Whether the plan is a decode of exactly these rows: one of this phase, or one just before it."""
        return plan.rows is self.rows and (plan.samples is self._samples or plan.draws_only)

    def commit(self, plan: StepPlan, drawn: I32) -> bool:
        """Take a step's tokens if nothing ends by them; False leaves everything as it was."""
        if self.until_limit <= 1 or int(drawn.min()) < 0:
            return False
        if self._stops is not None and (drawn[:, None] == self._stops).any():
            return False
        self._table.tokens[self.rows, plan.starts + np.int32(1)] = drawn
        if len(self._first):
            self._table.first_token_time[self._first] = time.monotonic()
            self._first = self._first[:0]
        self.until_limit -= 1
        self.in_flight -= 1
        self._committed += 1
        self.last_drawn = drawn
        return True

    def flush(self) -> None:
        """Make the table's counts true."""
        t, rows = self._table, self.rows
        if self._planned:
            t.computed[rows] += self._planned
            t.total[rows] += self._planned
        if self._planned != self._committed:
            t.in_flight[rows] += self._planned - self._committed
        if self._committed:
            t.known[rows] += self._committed
        self._planned = self._committed = 0
