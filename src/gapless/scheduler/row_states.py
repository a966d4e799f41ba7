"""RowStates: everything that is kept of the rows, and the life of a row from its start to its release.

    free > running, and from there preempted and running again, as often as it takes > draining > free

A *running* row has blocks and is in the steps. A *preempted* one has lost its blocks and keeps its row, so that it
resumes from the tokens that the device already has. A *draining* row is that of a finished request while steps in
flight still name it.

Touched by the loop's thread only. Blocks go to a new owner at once, as the compute stream keeps the order; a row only
when no step in flight names it. Running rows are kept by rank, which is priority (lower goes first), then id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from gapless.batch.plan import NO_UPDATES, SeqFlag, StepPlan
from gapless.batch.row_layout import I32, RowLayout
from gapless.batch.row_params import Feature
from gapless.batch.row_table import RowTable
from gapless.cache.block_tables import BlockTables
from gapless.cache.prefix_cache import PrefixCache
from gapless.config import EngineConfig
from gapless.request.request import Request
from gapless.scheduler.drafting import Drafting
from gapless.scheduler.embed_rows import EmbedRows, joined
from gapless.scheduler.prompt_scores import PromptScores
from gapless.scheduler.seams import NoDrafts
from gapless.scheduler.stats import SchedulerStats
from gapless.scheduler.step_builder import StepBuilder

_DRAWS = int(SeqFlag.DRAWS)


class RowStates:
    """See the module.

    Attributes:
        rows: counts and tokens.
        blocks, prefixes: who owns which block, and which may be found again.
        drafts, scores: of rows that draft, or whose prompts are scored.
        embeds: of rows whose prompts have embeddings in place of ids.
        stats: counters.
        running: int32, rows by rank.
        preempted: rows that wait for blocks, by rank.
        row_of: rows of running, preempted and draining requests, by id.
    """

    def __init__(
        self, config: EngineConfig, layout: RowLayout, num_blocks: int | Sequence[int], prefix_root: bytes = b""
    ) -> None:
        self.rows = RowTable(layout)
        self.blocks = BlockTables(self.rows, num_blocks)
        cached = config.enable_prefix_caching
        self.prefixes = PrefixCache(self.rows, self.blocks, enabled=cached, root=prefix_root)
        self.drafts = NoDrafts(self.rows) if config.speculative is None else Drafting(config.speculative, self.blocks)
        self.scores = PromptScores(self.rows)
        self.embeds = EmbedRows(self.rows, config.max_prompt_embeds)
        self.stats = SchedulerStats(drafts=self.drafts.stats)
        self.running: I32 = np.zeros(0, np.int32)
        self.preempted: OrderedDict[int, None] = OrderedDict()
        self.row_of: dict[int, int] = {}
        self._draining: list[int] = []
        self._last_rows = self.running  # of the latest plan

    # ---- who has a row --------------------------------------------------------------------------------------------

    def assign(self, request: Request) -> int:
        """A free row for the request, which `run` lets run."""
        row = self.rows.assign(request)
        self.drafts.assign(row, request)
        return row

    def run(self, row: int) -> None:
        """A row that starts, or resumes in its old place."""
        ranks, running = self.rows.ranks, self.running
        place = int(np.searchsorted(ranks[running], ranks[row]))
        self.running = np.concatenate((running[:place], np.array([row], np.int32), running[place:]))

    def preempt(self, row: int, builder: StepBuilder) -> None:
        """Take all blocks of ``row``; it is computed again later, from the tokens in its row on the device."""
        r = self.rows
        self.prefixes.publish_generated([row])
        self.blocks.release(row)
        r.blocks_hashed[row] = r.computed[row] = 0
        r.preemptions[row] += 1
        self.stats.preemptions += 1
        self.running = self.running[self.running != row]
        self.preempted[row] = None
        self.preempted.move_to_end(row, last=False)
        builder.drop(row)  # it may have a place in this very step already

    def finish(self, row: int, *, failed: bool) -> None:
        """The row's request has ended: its blocks go, and the row waits for `release`. Nobody shall find what a failed
        one has computed."""
        self.prefixes.publish_generated([row])
        if failed:
            self.blocks.unpublish(row)
        self.blocks.release(row)
        self.embeds.give_back(row)
        self.rows.finished[row] = True
        self.running = self.running[self.running != row]
        self.preempted.pop(row, None)
        self._draining.append(row)

    def release(self) -> None:
        """The one place where rows that ran come back: finished, and no step in flight names them."""
        waiting = []
        for row in self._draining:
            if self.rows.in_flight[row]:
                waiting.append(row)
            else:
                del self.row_of[int(self.rows.ids[row])]
                self.rows.release(row)
        self._draining = waiting

    # ---- blocks ---------------------------------------------------------------------------------------------------

    def grow(self, row: int, end: int, builder: StepBuilder, *, preempt: bool = True) -> bool:
        """Give ``row`` the blocks for the positions [0, ``end``), preempting rows of higher rank. False if it lost its
        own."""
        while (changes := self.blocks.grow(row, end)) is None:
            if not preempt:
                return False
            victim = int(self.running[-1])
            self.preempt(victim, builder)
            if victim == row:
                return False
        builder.update(changes)
        return True

    def grow_each(self, rows: I32, ends: I32, builder: StepBuilder) -> None:
        """As `grow`, for each of ``rows [n]`` in order, by its ``ends [n]``. Rows that lose their blocks are preempted
        afterwards."""
        size = self.rows.layout.block_size
        missing = ends - self.blocks.num_blocks[rows] * size
        without = missing > 0
        if not without.any():
            return
        if int(missing.max()) <= size:  # one block each, as a rule
            changes = self.blocks.append(rows[without])
            if changes is not None:
                builder.update(changes)
                return
        for row, end in zip(rows[without].tolist(), ends[without].tolist(), strict=True):
            if row not in self.preempted:
                self.grow(row, end, builder)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def launch(self, builder: StepBuilder, step: int) -> StepPlan | None:
        """The plan of what ``builder`` has, and the counts of its rows moved, so that the next plan starts where this
        one ends. None if no sequence is left in it. Equal rows are the same object in two plans that follow each other.

        Raises:
            RuntimeError: more updates than a slot holds.
        """
        r = self.rows
        if not builder.rows:
            return None
        rows, lens = np.concatenate(builder.rows), np.concatenate(builder.lens)
        if not len(rows):
            return None
        if np.array_equal(rows, self._last_rows):
            rows = self._last_rows
        self._last_rows = rows
        flags = np.zeros(len(rows), np.int32)
        features = Feature(int(np.bitwise_or.reduce(r.features[rows])))
        starts = self.scores.launch(builder, rows, r.computed[rows], flags)
        ends, query_width, max_query_len = self.drafts.launch(builder, rows, starts, lens, flags)
        draws = ends == r.total[rows]
        flags += draws * np.int32(_DRAWS)
        if len(rows) == lens.sum():
            flat_rows, positions = rows, starts
        else:
            flat_rows = np.repeat(rows, lens)
            first = np.cumsum(lens) - lens
            positions = np.arange(len(flat_rows), dtype=np.int32) + np.repeat(starts - first, lens).astype(np.int32)
        carry = positions >= r.known[flat_rows]
        input_ids = np.where(carry, np.int32(0), r.tokens[flat_rows, positions])
        if (r.total[rows] < r.min_end[rows]).any():
            features |= Feature.MIN_TOKENS
        if builder.scored:
            features |= Feature.LOGPROBS
        r.computed[rows] = ends  # of several values for a row NumPy takes the last, here and below
        r.total[rows] += draws
        r.in_flight[rows] += 1
        updates = np.concatenate(builder.updates) if builder.updates else NO_UPDATES
        if builder.updates_left < 0:
            raise RuntimeError(
                f"step {step} has {len(updates)} updates, {-builder.updates_left} more than a slot holds"
            )
        constrained = draws & r.constrained[rows]
        return StepPlan(
            step, rows, starts, lens, flags, input_ids, carry, updates, features,
            constrained if constrained.any() else None, bool(r.lora[rows].any()), query_width, max_query_len,
            carried=bool(carry.all()), embeds=joined(builder.embeds),
        )  # fmt: skip

    def check(self) -> list[int]:
        """The rows in use, after a look at whether all lists and counts agree about them.

        Raises:
            RuntimeError: they do not.
        """
        r = self.rows
        used = [row for row, request in enumerate(r.requests) if request is not None]
        named = sorted([*self.running.tolist(), *self.preempted, *self._draining])
        if named != used or sorted(self.row_of.values()) != used:
            raise RuntimeError(f"rows in use {used}, but running, preempted and draining rows are {named}")
        self.blocks.check(used)
        self.drafts.check()
        self.embeds.check([*self.running.tolist(), *self.preempted])
        for row in used:
            if not r.computed[row] <= r.total[row] <= r.limit[row] or r.known[row] > r.total[row]:
                raise RuntimeError(
                    f"row {row}: counts out of order: computed {r.computed[row]}, known {r.known[row]}, "
                    f"total {r.total[row]}, limit {r.limit[row]}"
                )
        return used
