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

import dataclasses
import time
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gapless.batch.plan import StepPlan
from gapless.batch.row_layout import I32, Bools
from gapless.batch.row_table import NEVER
from gapless.cache.block_tables import RowBlocks
from gapless.request.request import Request
from gapless.speculative_config import SpeculativeConfig

I64 = npt.NDArray[np.int64]
LONGEST_PAUSE = 4096
"""Tokens; where the doubling of a row's pauses ends."""


@dataclass(slots=True)
class DraftStats:
    """Counters since the start.

    Attributes:
        steps: row-steps with drafts that were committed: a step with drafts of three rows counts three times.
        proposed, accepted: drafts, at each of the K places after a row's last token.
        stopped: times that a row stopped to draft because too few were accepted.
    """

    steps: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    stopped: int = 0

    @property
    def per_step(self) -> float:
        """Drafts that a row's step had accepted, in the mean; one more is the mean of its tokens."""
        return sum(self.accepted) / self.steps if self.steps else 0.0

    def __str__(self) -> str:
        if not self.steps:
            return "no step had drafts"
        places = " ".join(f"{a / p:.0%}" if p else "-" for a, p in zip(self.accepted, self.proposed, strict=True))
        return (
            f"{self.per_step:.2f} of {sum(self.proposed) / self.steps:.2f} accepted in each of {self.steps} steps; "
            f"by place {places}"
        )


@dataclass(slots=True)
class Committed:
    """What a step with drafts brought, for the rows that still live.

    Attributes:
        rows: int32 ``[n]``.
        tokens: int32 ``[n, width]``; -1 where the logits were not finite.
        counts: int32 ``[n]``, how many of them count, an end included and a token that is -1 not.
        last: int32 ``[n]``, the token that ends the run, a -1 included.
        sequences: int64 ``[n]``, which of the plan's sequences they are.
        bad, stopped: bool ``[n]``, the run ends by a -1, by a stop token.
    """

    rows: I32
    tokens: I32
    counts: I32
    last: I32
    sequences: I64
    bad: Bools
    stopped: Bools


class Drafting:
    """See the module."""

    def __init__(self, config: SpeculativeConfig, blocks: RowBlocks) -> None:
        rows = blocks.rows
        count = rows.layout.max_num_seqs
        self.config = config
        self.num_drafts = config.num_speculative_tokens
        self.slack = np.zeros(count, np.int32)
        self.stats = DraftStats(proposed=[0] * self.num_drafts, accepted=[0] * self.num_drafts)
        self._rows = rows
        self._blocks = blocks
        self._resume_at = np.zeros(count, np.int32)  # drafts from this many tokens on
        self._pause = np.zeros(count, np.int32)
        self._patience = np.zeros(count, np.int32)
        self._tried = np.zeros(count, np.int32)  # steps since the row was judged
        self._accepted = np.zeros(count, np.int32)  # drafts accepted in them

    @property
    def width(self) -> int:
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

    def choose(self, rows: I32, budget: int, *, prompts: bool) -> Bools:
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

    def ends(self, rows: I32, lens: I32) -> I32:
        """One beyond the last position that a step of ``lens`` tokens may write: the upper bound.

        Drafts beyond the row's limit have a place too. They are of no use, but they share a tile with tokens that are,
        and where nothing is written a NaN of an earlier owner may lie.
        """
        r = self._rows
        ends: I32 = np.minimum(r.computed[rows] + self.slack[rows] + lens, r.limit[rows] + np.int32(self.num_drafts))
        return ends

    def steps_until_resumed(self, rows: I32) -> int:
        """Tokens until one of the rows, none of which drafts now, may draft."""
        return int(np.maximum(self._resume_at[rows].astype(np.int64) - self._rows.total[rows], 0).min())

    def launched(self, rows: I32, drafts: Bools) -> Bools:
        """A step is planned, ``rows [S]`` with or without drafts. Which of them start where only the device knows."""
        follows: Bools = self.slack[rows] > 0
        self.slack[rows[drafts]] += self.num_drafts
        return follows

    def goes_on(self, plan: StepPlan) -> bool:
        """Whether the plan is one that `repeat` can repeat: each sequence drafts, from where only the device knows."""
        return plan.drafts is not None and plan.follows is not None and bool((plan.drafts & plan.follows).all())

    def repeat(self, plan: StepPlan, step: int) -> StepPlan | None:
        """The next step of an unchanged batch in which every row drafts: all but its blocks is as it was.

        None when the general path must look, and then nothing has changed.
        """
        r, rows = self._rows, plan.rows
        if not self.slack[rows].all() or int((r.limit[rows] - r.total[rows]).min()) <= 1:
            return None
        if self._blocks.windowed and not self._fits_a_window(rows).all():
            return None
        size = r.layout.block_size
        missing = self.ends(rows, plan.query_lens) - r.num_blocks[rows] * np.int32(size)
        updates = plan.updates[:0]
        if int(missing.max()) > 0:
            needy = rows[missing > 0]
            appended = self._blocks.append(needy) if int(missing.max()) <= size else None
            if appended is None:
                return None
            updates = appended
        r.total[rows] += 1
        r.computed[rows] += 1
        r.in_flight[rows] += 1
        self.slack[rows] += self.num_drafts
        return dataclasses.replace(plan, step=step, updates=updates)

    # ---- results --------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, brought: I32, preempted: Collection[int]) -> Committed:
        """Correct the counts by what a step with drafts brought, and find where runs end.

        Args:
            plan: of the step.
            brought: int32 ``[S, width + 2]``: the tokens of a sequence, how many of them were drawn at true places,
                and how many drafts there were.
            preempted: rows that have nothing computed.
        """
        assert plan.drafts is not None
        r, width = self._rows, self.width
        drafting = plan.rows[plan.drafts]
        self.slack[drafting] -= self.num_drafts
        live = np.flatnonzero(plan.samples & ~r.finished[plan.rows])
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
        which, j = np.nonzero(place < counts[:, None])  # sync-ok: NumPy, the slot's output copied by the wait
        r.tokens[rows[which], at[which] + j] = tokens[which, j]
        r.known[rows] = at + counts
        r.first_token_time[rows[(at == r.prompt_len[rows]) & (counts > 0)]] = time.monotonic()
        self._judge(plan, live, brought[live, width + 1], np.minimum(extra, counts))
        return Committed(rows, tokens, counts, tokens[sequence, last], live, is_bad, stopped)

    def _judge(self, plan: StepPlan, live: I64, proposed: I32, accepted: I32) -> None:
        """Count; and let rows stop that have too little of it."""
        assert plan.drafts is not None
        drafted = plan.drafts[live]
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
