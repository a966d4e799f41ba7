"""Drafting: the host's part of speculative decoding. Which rows draft, what is not known of their lengths, and what the
tokens of a step with drafts mean.

Touched by the loop's thread only. The host plans without knowing how many drafts are right, so a row's counts become
bounds while its steps with drafts are in flight:

    total              the fewest tokens that exist: every step in flight gives at least one
    total + slack      the most: every draft of every step in flight is accepted
    computed           as before one behind ``total`` when the row decodes, and so a lower bound too

``slack`` grows by K when a step with K drafts is launched; its commit takes the K off again and adds the accepted ones
to ``total``. Where it is 0, the host's counts are exact, and a plain step may be planned. Blocks are taken for the
upper bound, and every decision that ends or publishes something uses the lower one.

The rule by which a row stops to draft is `SpeculativeConfig`'s.
"""

from __future__ import annotations

import time
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from gapless.batch.plan import NO_UPDATES, SeqFlag, StepPlan
from gapless.batch.row_layout import I32, Bools
from gapless.batch.row_table import NEVER
from gapless.cache.block_tables import BlockTables
from gapless.request.request import Request
from gapless.scheduler.seams import NoDrafts
from gapless.scheduler.stats import DraftStats
from gapless.scheduler.step_builder import StepBuilder
from gapless.scheduler.step_message import Drawn, MessageBuilder
from gapless.speculative_config import SpeculativeConfig

I64 = npt.NDArray[np.int64]
LONGEST_PAUSE = 4096
"""Tokens; where the doubling of a row's pauses ends."""


class Drafting(NoDrafts):
    """See the module."""

    stats: DraftStats

    def __init__(self, config: SpeculativeConfig, blocks: BlockTables) -> None:
        rows = blocks.rows
        super().__init__(rows)
        count = rows.layout.max_num_seqs
        self.config = config
        self.num_drafts = config.num_speculative_tokens
        self.slack = np.zeros(count, np.int32)
        self.stats = DraftStats(proposed=[0] * self.num_drafts, accepted=[0] * self.num_drafts)
        self._blocks = blocks
        self._resume_at = np.zeros(count, np.int32)  # drafts from this many tokens on
        self._pause = np.zeros(count, np.int32)
        self._patience = np.zeros(count, np.int32)
        self._tried = np.zeros(count, np.int32)  # steps since the row was judged
        self._accepted = np.zeros(count, np.int32)  # drafts accepted in them

    @property
    def query_width(self) -> int:
        """K + 1: the query tokens, and the logits, of a sequence with drafts."""
        return self.num_drafts + 1

    def assign(self, row: int, request: Request) -> None:
        """A request takes the row."""
        self.slack[row] = self._tried[row] = self._accepted[row] = 0
        # What a grammar allows is known one token at a time.
        never = request.params.speculative is False or self._rows.constrained[row]
        self._resume_at[row] = NEVER if never else 0
        self._rows.needs_prompt[row] |= self.config.reads_prompt and not never
        self._pause[row], self._patience[row] = self.config.pause, self.config.patience

    def check(self) -> None:
        """Raise `RuntimeError` where slack and steps in flight disagree."""
        r, k = self._rows, self.num_drafts
        if (self.slack < 0).any() or (self.slack > k * r.in_flight).any():
            raise RuntimeError(f"slack {self.slack} with steps in flight {r.in_flight}")

    # ---- planning -------------------------------------------------------------------------------------------------

    def choose(self, rows: I32, builder: StepBuilder, *, prompts: bool) -> tuple[I32, I32]:
        """See `NoDrafts.choose`. The end is the upper bound.

        Drafts beyond the row's limit have a place too. They are of no use, but they share a tile with tokens that are,
        and where nothing is written a NaN of an earlier owner may lie.
        """
        drafts = self.wanted(rows, builder.budget, prompts=prompts)
        builder.drafting = rows[drafts]
        lens = np.ones(len(rows), np.int32) + drafts * np.int32(self.num_drafts)
        return lens, self._ends(rows, lens)

    def _ends(self, rows: I32, lens: I32) -> I32:
        r = self._rows
        ends: I32 = np.minimum(r.computed[rows] + self.slack[rows] + lens, r.limit[rows] + np.int32(self.num_drafts))
        return ends

    def wanted(self, rows: I32, budget: int, *, prompts: bool) -> Bools:
        """Which of the rows that decode in a step do it with drafts. The budget holds one token of each; of what is
        left drafts may take all, or half if there are ``prompts`` that could use it. The oldest rows get it. A row that
        can take one more token only needs none."""
        r = self._rows
        wanted = (r.total[rows] >= self._resume_at[rows]) & (r.limit[rows] - r.total[rows] > 1)
        if self._blocks.windowed:
            wanted &= self._fits_a_window(rows)
        left = max(budget - len(rows), 0)
        affordable = (left // 2 if prompts else left) // self.num_drafts
        chosen: Bools = wanted & (np.cumsum(wanted) <= affordable)
        return chosen

    def _fits_a_window(self, rows: I32) -> Bools:
        """A row must be able to go on alone, from its lowest start to its last draft."""
        fits: Bools = self.slack[rows] + 2 * self.num_drafts + 1 <= self._blocks.longest_window_chunk
        return fits

    def may_resume(self, row: int) -> bool:
        """Its steps with drafts are committed."""
        return not self.slack[row]

    def steps_until_drafts(self, rows: I32) -> int:
        """See `NoDrafts.steps_until_drafts`; in tokens of a row."""
        return int(np.maximum(self._resume_at[rows].astype(np.int64) - self._rows.total[rows], 0).min())

    def launch(
        self, builder: StepBuilder, rows: I32, starts: I32, lens: I32, flags: I32
    ) -> tuple[I32, int, int | None]:
        """See `NoDrafts.launch`. A sequence with drafts computes one position for certain."""
        drafts, device_start = np.isin(rows, builder.drafting), self.slack[rows] > 0
        self.slack[rows[drafts]] += self.num_drafts
        if not (drafts.any() or device_start.any()):
            return starts + lens, 1, None
        flags += drafts * np.int32(SeqFlag.DRAFTS) + device_start * np.int32(SeqFlag.DEVICE_START)
        ends = np.where(drafts, starts + np.int32(1), starts + lens)
        no_prompt = bool((drafts | (lens == 1)).all())
        return ends, self.query_width, self.query_width if no_prompt else None

    def steady(self, plan: StepPlan) -> SteadyDrafts | None:
        """Of a plan in which each sequence drafts, from where only the device knows."""
        both = int(SeqFlag.DRAFTS | SeqFlag.DEVICE_START)
        return SteadyDrafts(plan, self) if bool((plan.flags & both == both).all()) else None

    def another(self, plan: StepPlan) -> I32 | None:
        """Launch the plan's sequences, all of which draft, once more; the changes of the arena that this takes.

        None when the general path must look, and then nothing has changed.
        """
        r, rows = self._rows, plan.rows
        if not self.slack[rows].all() or int((r.limit[rows] - r.total[rows]).min()) <= 1:
            return None
        if self._blocks.windowed and not self._fits_a_window(rows).all():
            return None
        size = r.layout.block_size
        missing = self._ends(rows, plan.query_lens) - self._blocks.num_blocks[rows] * np.int32(size)
        updates = NO_UPDATES
        if int(missing.max()) > 0:
            appended = self._blocks.append(rows[missing > 0]) if int(missing.max()) <= size else None
            if appended is None:
                return None
            updates = appended
        r.total[rows] += 1
        r.computed[rows] += 1
        r.in_flight[rows] += 1
        self.slack[rows] += self.num_drafts
        return updates

    # ---- results --------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, brought: I32, records: I32 | None, preempted: Collection[int]) -> Drawn:
        """Correct the counts by what a step with drafts brought, and find where runs end.

        Args:
            plan: of the step.
            brought: int32 ``[S, W + 2]`` for a ``query_width`` of W: the tokens of a sequence, how many of them were
                drawn at true places, and how many drafts there were.
            records: int32 ``[S, W, Record.COUNT]``, or None.
            preempted: rows that have nothing computed.
        """
        r, width = self._rows, self.query_width
        self.slack[plan.rows[plan.having(SeqFlag.DRAFTS)]] -= self.num_drafts
        draws = plan.draws
        live = np.flatnonzero(draws & ~r.finished[plan.rows])
        rows, tokens, counts = plan.rows[live], brought[live, :width], brought[live, width].copy()
        if len(rows) and int(counts.min()) < 1:
            raise RuntimeError(f"step {plan.step}: a row that has not ended got no token; counts {counts}")
        extra = counts - 1
        grown = np.minimum(r.total[rows] + extra, r.limit[rows]) - r.total[rows]
        r.total[rows] += grown
        if preempted:  # nothing of such a row is computed, and it starts anew at slack 0 only
            running = ~np.isin(rows, list(preempted))
            r.computed[rows[running]] += grown[running]
        else:
            r.computed[rows] += grown
        at = r.known[rows].copy()

        place = np.arange(width, dtype=np.int32)
        drawn = place < counts[:, None]
        bad = drawn & (tokens < 0)
        stop = drawn & ~bad & (tokens[:, :, None] == r.stop_ids[rows][:, None, :]).any(axis=2)
        ended = bad | stop
        last = np.where(ended.any(axis=1), ended.argmax(axis=1), counts - 1)
        sequence = np.arange(len(rows))
        is_bad, stopped = bad[sequence, last], stop[sequence, last]
        counts = (last + ~is_bad).astype(np.int32)
        taken = place < counts[:, None]
        which, j = np.nonzero(taken)  # sync-ok: NumPy, the slot's output copied by the wait
        r.tokens[rows[which], at[which] + j] = tokens[which, j]
        r.known[rows] = at + counts
        r.first_token_time[rows[(at == r.prompt_len[rows]) & (counts > 0)]] = time.monotonic()
        self._judge(plan, live, brought[live, width + 1], np.minimum(extra, counts))
        return Drawn(
            rows, tokens[sequence, last], is_bad, stopped,
            rows[which], tokens[which, j], None if records is None else records[live][taken],
            int(brought[draws, width].sum() - len(which) - is_bad.sum()),
        )  # fmt: skip

    def _judge(self, plan: StepPlan, live: I64, proposed: I32, accepted: I32) -> None:
        """Count; and let rows stop that have too little of it."""
        drafted = plan.having(SeqFlag.DRAFTS)[live]
        rows, proposed, accepted = plan.rows[live][drafted], proposed[drafted], accepted[drafted]
        if not len(rows):
            return
        stats, config = self.stats, self.config
        stats.steps += len(rows)
        for i in range(self.num_drafts):
            stats.proposed[i] += int(np.count_nonzero(proposed > i))
            stats.accepted[i] += int(np.count_nonzero(accepted > i))
        if not config.min_accepted:
            return
        trying = self._resume_at[rows] <= self._rows.total[rows]  # else the row has stopped since the step was planned
        rows, accepted = rows[trying], accepted[trying]
        self._tried[rows] += 1
        self._accepted[rows] += accepted
        judged = rows[self._tried[rows] >= self._patience[rows]]
        low = self._accepted[judged] < config.min_accepted * self._tried[judged]
        stopping, going_on = judged[low], judged[~low]
        self._tried[judged] = self._accepted[judged] = 0
        self._patience[going_on], self._pause[going_on] = config.patience, config.pause
        if len(stopping):
            stats.stopped += len(stopping)
            once = config.method == "draft_model"
            self._resume_at[stopping] = NEVER if once else self._rows.total[stopping] + self._pause[stopping]
            self._pause[stopping] = np.minimum(2 * self._pause[stopping], LONGEST_PAUSE)
            self._patience[stopping] = -(-config.patience // 4)


class SteadyDrafts:
    """See `gapless.scheduler.steady.Steady`: of a plan in which each sequence drafts. The counts are always true.

    The general path takes what its steps bring, since most of them bring another number of tokens to each row.
    """

    def __init__(self, plan: StepPlan, drafting: Drafting) -> None:
        self._plan = plan
        self._drafting = drafting
        self._stopped = drafting.stats.stopped

    def next_plan(self) -> StepPlan | None:
        """All but the blocks is as it was, unless some row has stopped to draft."""
        if self._stopped != self._drafting.stats.stopped:
            return None
        updates = self._drafting.another(self._plan)
        if updates is None:
            return None
        self._plan = self._plan.moved_on(updates)
        return self._plan

    def commit(self, plan: StepPlan, tokens: I32, records: I32 | None, message: MessageBuilder) -> bool:
        """Takes nothing."""
        return False

    def outlasts(self, plan: StepPlan) -> bool:
        """Steps with drafts end nothing, unless some row ends."""
        return plan.query_width > 1

    def flush(self) -> None:
        """They are true."""
