"""Steady: a batch that goes on unchanged, so that the host pays for what changes and not for the batch.

While nothing joins, leaves or ends, the next plan is the last one moved on (`StepPlan.moved_on`). The scheduler then
plans from this object instead of from the rows. Whatever needs true counts ends the steady phase first (`flush`); the
general path takes over and makes the next one.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from gapless.batch.plan import NO_UPDATES, StepPlan
from gapless.batch.row_layout import I32, Bools
from gapless.batch.row_params import Feature
from gapless.cache.block_tables import BlockTables
from gapless.scheduler.step_message import MessageBuilder


class Steady(Protocol):
    """How the last plan goes on."""

    def next_plan(self) -> StepPlan | None:
        """The last plan moved on; None, with nothing changed, when the general path must look."""
        ...

    def commit(self, plan: StepPlan, tokens: I32, records: I32 | None, message: MessageBuilder) -> bool:
        """Take and publish a step's tokens, if it is one of this batch and nothing ends by it. False leaves everything
        as it was."""
        ...

    def outlasts(self, plan: StepPlan) -> bool:
        """The phase goes on when the general path has committed this step."""
        ...

    def flush(self) -> None:
        """Make the rows' counts true."""
        ...


class SteadyDecode:
    """Of a plan in which every sequence computes and draws one token. Updates of the rows' counts are put off.

    Args:
        plan: the last one.
        blocks: of the rows.
        left: steps that can be planned at most.
    """

    def __init__(self, plan: StepPlan, blocks: BlockTables, left: int) -> None:
        table = self._table = blocks.rows
        rows = self._rows = plan.rows
        self._plan, self._blocks = plan, blocks
        self._block_size = table.layout.block_size
        # Steps that can still be planned before a row reaches its limit, or the features change.
        self._left = min(left, int((table.limit[rows] - table.total[rows]).min()))
        if plan.features & Feature.MIN_TOKENS:
            self._left = min(self._left, int((table.min_end[rows] - table.total[rows]).max()))
        self._room = int(self._rooms().min())  # positions that the row that is shortest of blocks can still take
        num_stops = int((table.stop_ids[rows] >= 0).sum(axis=1).max())
        self._stops = table.stop_ids[rows, :num_stops] if num_stops else None
        self._streaming: Bools = table.streaming[rows]
        self._any_streaming = bool(self._streaming.any())
        self._stream_ids = table.ids[rows[self._streaming]]
        self._until_limit = int((table.limit[rows] - table.known[rows]).min())  # commits until the first end by length
        self._in_flight = int(table.in_flight[rows].max())
        self._last_drawn: I32 | None = None  # of the latest committed step
        self._first = rows[table.known[rows] == table.prompt_len[rows]]  # their first token is in flight
        self._planned = 0  # since the table's counts were true
        self._committed = 0

    def _rooms(self) -> I32:
        return self._blocks.num_blocks[self._rows] * np.int32(self._block_size) - self._table.computed[self._rows]

    def next_plan(self) -> StepPlan | None:
        """See `Steady`. Rows without a block for the step get one, all at once."""
        if self._left <= 0:
            return None
        updates = NO_UPDATES
        if self._room <= 0:
            self.flush()
            appended = self._blocks.append(self._rows[self._rooms() <= 0])
            if appended is None:
                return None
            updates = appended
            self._room = int(self._rooms().min())
        known = None if self._in_flight else self._last_drawn
        self._plan = plan = self._plan.moved_on(updates, known)
        self._left -= 1
        self._room -= 1
        self._in_flight += 1
        self._planned += 1
        return plan

    def commit(self, plan: StepPlan, tokens: I32, records: I32 | None, message: MessageBuilder) -> bool:
        """See `Steady`. Also takes a step just before the phase that decoded exactly these rows."""
        if plan.rows is not self._rows or not (plan.draws_only if not plan.repeats else plan.query_width == 1):
            return False
        if self._until_limit <= 1 or int(tokens.min()) < 0:
            return False
        if self._stops is not None and (tokens[:, None] == self._stops).any():
            return False
        self._table.tokens[self._rows, plan.starts + np.int32(1)] = tokens
        if len(self._first):
            self._table.first_token_time[self._first] = time.monotonic()
            self._first = self._first[:0]
        self._until_limit -= 1
        self._in_flight -= 1
        self._committed += 1
        self._last_drawn = tokens
        if self._any_streaming:
            of = records[self._streaming] if records is not None else None
            message.stream(self._stream_ids, tokens[self._streaming], of)
        return True

    def outlasts(self, plan: StepPlan) -> bool:
        """What the general path takes, the phase does not know."""
        return False

    def flush(self) -> None:
        """See `Steady`."""
        t, rows = self._table, self._rows
        if self._planned:
            t.computed[rows] += self._planned
            t.total[rows] += self._planned
        if self._planned != self._committed:
            t.in_flight[rows] += self._planned - self._committed
        if self._committed:
            t.known[rows] += self._committed
        self._planned = self._committed = 0
