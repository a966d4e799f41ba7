"""Roster: which request has which row, and the life of a row from its start to its release.

    free > running, and from there preempted and running again, as often as it takes > draining > free

A *running* row has blocks and is in the steps. A *preempted* one has lost its blocks and keeps its row, so that it
resumes from the tokens that the device already has. A *draining* row is that of a finished request while steps in
flight still name it.

Touched by the loop's thread only. Blocks go to a new owner at once, as the compute stream keeps the order; a row only
when no step in flight names it. Running rows are kept by rank, which is priority (lower goes first), then id.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from gapless.batch.row_layout import I32
from gapless.batch.row_table import RowTable
from gapless.cache.block_tables import RowBlocks
from gapless.cache.prefix_cache import PrefixCache
from gapless.scheduler.stats import SchedulerStats
from gapless.scheduler.step_builder import StepBuilder


class Roster:
    """See the module.

    Attributes:
        running: int32, rows by rank.
        preempted: rows that wait for blocks, by rank.
        row_of: rows of running, preempted and draining requests, by id.
    """

    def __init__(self, rows: RowTable, blocks: RowBlocks, prefixes: PrefixCache, stats: SchedulerStats) -> None:
        self.running: I32 = np.zeros(0, np.int32)
        self.preempted: OrderedDict[int, None] = OrderedDict()
        self.row_of: dict[int, int] = {}
        self._draining: list[int] = []
        self._rows = rows
        self._blocks = blocks
        self._prefixes = prefixes
        self._stats = stats
        self._block_size = rows.layout.block_size

    def run(self, row: int) -> None:
        """A row that starts, or resumes in its old place."""
        ranks, running = self._rows.ranks, self.running
        place = int(np.searchsorted(ranks[running], ranks[row]))
        self.running = np.concatenate((running[:place], np.array([row], np.int32), running[place:]))

    def grow(self, row: int, length: int, builder: StepBuilder, *, preempt: bool = True) -> bool:
        """Give ``row`` the blocks for ``length`` more positions, preempting rows of higher rank. False if it lost its
        own."""
        r = self._rows
        missing = -(-(int(r.computed[row]) + length) // self._block_size) - int(r.num_blocks[row])
        if missing > 0:
            while not self._blocks.grow(row, missing):
                if not preempt:
                    return False
                victim = int(self.running[-1])
                self.preempt(victim, builder)
                if victim == row:
                    return False
        if r.blocks_sent[row] < r.num_blocks[row]:
            builder.update(r.table_updates(row))
            r.blocks_sent[row] = r.num_blocks[row]
        return True

    def preempt(self, row: int, builder: StepBuilder) -> None:
        """Take all blocks of ``row``; it is computed again later, from the tokens in its row on the device."""
        r = self._rows
        self._prefixes.publish_generated([row])
        self._blocks.release(row)
        r.blocks_sent[row] = r.blocks_hashed[row] = r.computed[row] = 0
        r.preemptions[row] += 1
        self._stats.preemptions += 1
        self.running = self.running[self.running != row]
        self.preempted[row] = None
        self.preempted.move_to_end(row, last=False)
        builder.drop(row)  # it may have a place in this very step already

    def finish(self, row: int, *, failed: bool) -> None:
        """The row's request has ended: its blocks go, and the row waits for `release`. Nobody shall find what a failed
        one has computed."""
        self._prefixes.publish_generated([row])
        if failed:
            self._blocks.unpublish(row)
        self._blocks.release(row)
        self._rows.finished[row] = True
        self.running = self.running[self.running != row]
        self.preempted.pop(row, None)
        self._draining.append(row)

    def release(self) -> None:
        """The one place where rows that ran come back: finished, and no step in flight names them."""
        waiting = []
        for row in self._draining:
            if self._rows.in_flight[row]:
                waiting.append(row)
            else:
                del self.row_of[int(self._rows.ids[row])]
                self._rows.release(row)
        self._draining = waiting

    def check(self) -> list[int]:
        """The rows in use, after a look at whether all lists agree about them.

        Raises:
            RuntimeError: they do not.
        """
        used = [row for row, request in enumerate(self._rows.requests) if request is not None]
        named = sorted([*self.running.tolist(), *self.preempted, *self._draining])
        if named != used or sorted(self.row_of.values()) != used:
            raise RuntimeError(f"rows in use {used}, but running, preempted and draining rows are {named}")
        return used
