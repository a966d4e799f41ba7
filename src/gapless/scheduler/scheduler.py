"""The scheduler: which tokens the next step computes, and what the tokens of a step mean for its requests.

Touched by the loop's thread only; knows neither torch nor the device. `schedule` reads counts of *launched* tokens, so
it never waits for a token. `commit` brings the tokens of the oldest step; what a finished request's later steps drew
(its overrun) is dropped there.

Policy, in this order: every running request that needs one token gets it; running prompts go on in chunks; waiting
requests are admitted, by priority and then first come first served, while rows, blocks and budget last. Drafts take at
most half of what those single tokens leave while prompts could use it, so that prompts always get on. When blocks run
out, the newest running request of the least priority is preempted.

The parts: `Roster` knows who has a row, `Prefill` plans prompts and lets requests start, `StepBuilder` turns what was
planned into a `StepPlan`, `Outbox` collects what is told. Decodes, and the end of requests, are planned here. A finish
reason is set by abort, stop, length or error alike; the release follows in `Roster.release`, and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from gapless.batch.plan import StepPlan
from gapless.batch.row_layout import I32, Bools, RowLayout
from gapless.batch.row_table import NEVER, RowTable
from gapless.cache.block_tables import RowBlocks
from gapless.cache.prefix_cache import PrefixCache
from gapless.config import EngineConfig
from gapless.errors import RequestError, shorter
from gapless.grammar.matcher import fill_masks
from gapless.request.messages import Finished, PromptRecords, StepMessage
from gapless.request.outputs import FinishReason
from gapless.request.request import Request
from gapless.scheduler.drafting import Drafting
from gapless.scheduler.outbox import NO_TOKENS, Outbox
from gapless.scheduler.prefill import Prefill
from gapless.scheduler.row_states import Roster
from gapless.scheduler.stats import SchedulerStats
from gapless.scheduler.steady import NO_UPDATES, Steady
from gapless.scheduler.step_builder import StepBuilder
from gapless.scheduler.weight_versions import WeightVersions

NO_TOKEN = (
    "no token can be chosen: the logits of this request are not finite (NaN), or its own parameters "
    "(allowed_token_ids, bad_words, min_tokens, structured_outputs) mask all of them"
)


def max_updates(config: EngineConfig, layout: RowLayout) -> int:
    """Changes of the arena that one step can carry: every row may need a block, a full budget of prompt tokens its
    blocks, and some new requests their parameters, a few of them with masks and everything else that one may ask for.
    What does not fit waits for the next step. Where drafts are looked up in the prompt, a hit in the prefix cache
    brings its tokens along, as long as it may be."""
    looked_up = config.speculative is not None and config.speculative.reads_prompt
    decodes = (1 + layout.num_groups) * config.max_num_seqs
    updates = max(config.max_num_batched_tokens, 1024) + decodes + 4 * layout.request_words
    return updates + (layout.max_model_len + layout.num_groups * layout.max_blocks if looked_up else 0)


class Scheduler:
    """See the module.

    Args:
        config: of the engine.
        layout: of the persistent rows.
        num_blocks: blocks of each group's pool, the null blocks among them; one number if they are equal.
        prefix_root: see `PrefixCache`.
    """

    def __init__(
        self, config: EngineConfig, layout: RowLayout, num_blocks: int | Sequence[int], *, prefix_root: bytes = b""
    ) -> None:
        self.layout = layout
        self.rows = RowTable(layout)
        self.blocks = RowBlocks(self.rows, num_blocks)
        self.pool = self.blocks.pools[0]  # of the layers that keep everything, if there are any
        self.stats = SchedulerStats()
        self._drafting = None if config.speculative is None else Drafting(config.speculative, self.blocks)
        if self._drafting is not None:
            self.stats.drafts = self._drafting.stats
        self._longest = layout.max_model_len - config.num_drafts
        self._block_size = layout.block_size
        self._budget = config.max_num_batched_tokens
        self._max_updates = max_updates(config, layout)
        self._prefixes = PrefixCache(self.rows, self.blocks, enabled=config.enable_prefix_caching, root=prefix_root)
        self.roster = Roster(self.rows, self.blocks, self._prefixes, self.stats)
        self._outbox = Outbox(self.rows)
        self._prefill = Prefill(
            self.rows, self.blocks, self._prefixes, self.roster, self._drafting, self._outbox, self.stats,
            budget=self._budget,
        )  # fmt: skip
        self._waiting = self._prefill.waiting
        self.admission_closed = False  # new requests do not wait to start, but for the end of a pause
        self._parked: dict[int, Request] = {}
        self.versions = WeightVersions(self.rows)
        self._steady: Steady | None = None
        self._repeated: StepPlan | None = None  # the last plan, if `Drafting.repeat` may go on with it
        self._last_rows = NO_TOKENS
        self._step = 0
        self._held: StepPlan | None = None  # the latest step, while its masks are missing

    # ---- requests -------------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Some request is waiting or running."""
        return bool(self._waiting or self.roster.preempted or len(self.roster.running))

    @property
    def longest(self) -> int:
        """Tokens, prompt and output, of the longest request that could ever be finished."""
        return self.blocks.longest - (self.layout.max_model_len - self._longest)  # drafts lie beyond the end

    def refuse_what_never_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raise `RequestError` for a request that no empty engine could finish. May be called from any thread."""
        length, longest = prompt_len + max_tokens, self._longest
        if length > longest:
            raise RequestError(
                f"the prompt has {prompt_len} tokens and max_tokens is {max_tokens}, together {length}; max_model_len "
                f"is {longest}. {shorter(prompt_len, max_tokens, longest)}"
            )
        self.blocks.refuse_what_never_fits(length + self.layout.max_model_len - self._longest)  # drafts beyond the end

    def add(self, request: Request) -> None:
        """Queue a request that `refuse_what_never_fits` accepted."""
        self._end_steady()
        if self.admission_closed:
            self._parked[request.id] = request
        else:
            self._waiting[request.id] = request

    def finish(self, request_id: int, reason: FinishReason, error: str | None = None) -> None:
        """End a request from outside (abort, or a stop string). Unknown and already ended ids are ignored."""
        self._end_steady()
        request = self._waiting.pop(request_id, None) or self._parked.pop(request_id, None)
        if request is not None:
            versions = (self.versions.now,) * 2
            self._outbox.finished.append(Finished(request_id, NO_TOKENS, reason, error=error, weight_versions=versions))
            self.stats.requests_finished += 1
            return
        row = self.roster.row_of.get(request_id)
        if row is not None and not self.rows.finished[row]:
            self._finish_row(row, reason, error=error)
            self.roster.release()

    def release_parked(self) -> None:
        """The requests that came while `admission_closed` wait to start from now on."""
        self.admission_closed = False
        parked, self._parked = self._parked, {}
        for request in parked.values():
            self.add(request)

    def abort_all(self) -> None:
        """End every request, as `finish` does."""
        for request_id in [*self._waiting, *self._parked, *self.roster.row_of]:
            self.finish(request_id, FinishReason.ABORT)

    # ---- planning -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed before a step in flight is committed, or while the
        latest one is held for its masks."""
        if self._held is not None:
            return None
        if self._steady is not None and (plan := self._next_steady(self._steady)) is not None:
            return plan
        if self._repeated is not None and self._drafting is not None:
            self._repeated = self._drafting.repeat(self._repeated, self._step)
            if self._repeated is not None:
                self._count_step(self._repeated)
                return self._repeated
        if not self.has_requests:
            return None
        roster = self.roster
        if self.blocks.windowed:
            self.blocks.leave_behind(roster.running)
        builder = StepBuilder(self._budget, self._max_updates, self.layout.max_num_seqs - len(roster.running))
        preempted_before = self.stats.preemptions
        self._plan_decodes(builder)
        self._prefill.go_on(builder)
        if self.stats.preemptions == preempted_before:
            self._prefill.admit(builder)
        plan = self._finish_plan(builder) if builder.rows else None
        if plan is None or roster.preempted or builder.full or plan.num_seqs != len(roster.running):
            return plan
        if plan.draws_only:
            self._steady = Steady(plan, self.rows, self._block_size)
            if self._drafting is not None:
                self._steady.left = min(self._steady.left, self._drafting.steps_until_resumed(plan.rows))
        elif self._drafting is not None and self._drafting.goes_on(plan):
            self._repeated = plan
        return plan

    def _next_steady(self, steady: Steady) -> StepPlan | None:
        """The next step of an unchanged batch, or None when the general path must look."""
        updates = NO_UPDATES
        if steady.left > 0 and steady.room <= 0:
            steady.flush()
            needy = steady.needy()
            appended = self.blocks.append(needy)
            if appended is not None:
                updates = appended
                steady.grown()
        if steady.left <= 0 or steady.room <= 0:
            self._end_steady()
            return None
        plan = steady.next_plan(self._step, updates)
        self._count_step(plan, goes_on=True)
        return plan

    def _end_steady(self) -> None:
        self._repeated = None
        if self._steady is not None:
            self._steady.flush()
            self._steady = None

    def _count_step(self, plan: StepPlan, *, goes_on: bool = False) -> None:
        self._step += 1
        self._held = None if plan.constrained is None else plan
        self.stats.steps += 1
        self.stats.tokens_computed += plan.num_tokens
        volume = self.stats.volume
        (volume.go_on if goes_on else volume.add)(plan, self.layout.windows)

    def _plan_decodes(self, builder: StepBuilder) -> None:
        r, running = self.rows, self.roster.running
        ready = running[(r.total[running] - r.computed[running] == 1) & (r.total[running] < r.limit[running])]
        lens, ends = np.ones(len(ready), np.int32), r.computed[ready] + 1
        if self._drafting is not None:
            drafts = self._drafting.choose(ready, builder.budget, prompts=self._prefill.wanted)
            lens += drafts * np.int32(self._drafting.num_drafts)
            ends = self._drafting.ends(ready, lens)
            builder.drafting = ready[drafts]
        missing = ends - r.num_blocks[ready] * self._block_size
        needy, before = missing > 0, self.stats.preemptions
        appended = None
        if needy.any() and int(missing.max()) <= self._block_size:  # one block each, as a rule
            appended = self.blocks.append(ready[needy])
        if appended is not None:
            builder.update(appended)
        else:
            for row, length in zip(ready[needy].tolist(), (ends - r.computed[ready])[needy].tolist(), strict=True):
                if row not in self.roster.preempted:
                    self.roster.grow(row, length, builder)
        if self.stats.preemptions > before:
            kept = np.isin(ready, self.roster.running)
            ready, lens = ready[kept], lens[kept]
        if len(ready):
            builder.rows.append(ready)
            builder.lens.append(lens)
            builder.budget -= int(lens.sum())

    def _finish_plan(self, builder: StepBuilder) -> StepPlan | None:
        plan = builder.build(self._step, self.rows, self._drafting, self._last_rows)
        if plan is not None:
            self._last_rows = plan.rows
            self._count_step(plan)
        return plan

    # ---- grammars -------------------------------------------------------------------------------------------------

    @property
    def awaits_masks(self) -> bool:
        """The latest step waits for `fill_masks`, which needs the tokens of all steps before it."""
        return self._held is not None

    def fill_masks(self, masks: I32) -> I32:
        """What the grammars of the held step allow, as bits, one after the other in ``masks [n, layout.mask_words]``.

        All older steps must be committed: then the host knows every token before those that the step will draw. A
        request ends here when its grammar has no next token.

        Returns:
            The rows ``[n]`` that the masks belong to.
        """
        plan, self._held = self._held, None
        assert plan is not None
        assert plan.constrained is not None
        r = self.rows
        at = np.flatnonzero(plan.constrained & ~r.finished[plan.rows])
        rows, ends = plan.rows[at], (plan.starts + plan.query_lens)[at]
        requests = [request for row in rows.tolist() if (request := r.requests[row]) is not None]
        outputs = [r.tokens[row, r.prompt_len[row] : end] for row, end in zip(rows, ends, strict=True)]
        found = fill_masks([request.grammar for request in requests], outputs, masks[: len(rows)])
        for request, end in zip(requests, found, strict=True):
            if end is not None:
                self.finish(request.id, end.reason, end.error)
        return rows

    # ---- results --------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, tokens: I32, records: I32 | None = None) -> None:
        """Take the tokens ``[S]`` of the oldest step. -1 marks a row whose logits were not finite.

        ``records [S, Record.COUNT]`` are there if the plan's features name log-probabilities. Of a step with drafts,
        ``tokens [S, width + 2]`` and ``records [S, width, Record.COUNT]``, see `Drafting.commit`.
        """
        r, steady = self.rows, self._steady
        if steady is not None and steady.owns(plan) and steady.commit(plan, tokens):
            self.stats.generated_tokens += len(tokens)
            if steady.any_streaming:
                of = records[steady.streaming] if records is not None else None
                self._outbox.stream(steady.stream_ids, tokens[steady.streaming], of)
            return
        repeated = self._repeated
        self._end_steady()
        r.in_flight[plan.rows] -= 1
        if plan.scores is not None and records is not None:
            live = plan.scores & ~r.finished[plan.rows]
            first = records[live] if plan.width == 1 else records[live, 0]
            self._outbox.prompts = PromptRecords(r.ids[plan.rows[live]], plan.starts[live] + 1, first)
        if plan.width > 1:
            self._repeated = repeated  # goes on, unless some row ends or stops to draft
            self._commit_drafts(plan, tokens, records)
            return
        drew = plan.samples & ~r.finished[plan.rows]
        rows, drawn = plan.rows[drew], tokens[drew]
        self.stats.overrun_tokens += int(plan.samples.sum()) - len(rows)
        good = drawn >= 0
        at = (plan.starts + plan.query_lens)[drew]
        r.tokens[rows, at] = drawn
        r.known[rows] = at + good
        r.first_token_time[rows[at == r.prompt_len[rows]]] = time.monotonic()
        stop = (drawn[:, None] == r.stop_ids[rows]).any(axis=1) & good
        self.stats.generated_tokens += int(good.sum())
        self._outbox.tell(rows[good], drawn[good], records[drew][good] if records is not None else None)
        self._finish_ended(rows, drawn, ~good, stop)

    def _commit_drafts(self, plan: StepPlan, tokens: I32, records: I32 | None) -> None:
        """The end of `commit` for a step with drafts: up to ``width`` tokens of a row."""
        assert self._drafting is not None
        stopped = self._drafting.stats.stopped
        done = self._drafting.commit(plan, tokens, self.roster.preempted)
        if stopped != self._drafting.stats.stopped:
            self._repeated = None
        rows, counts = done.rows, done.counts
        self.stats.generated_tokens += int(counts.sum())
        self.stats.overrun_tokens += int(tokens[plan.samples, plan.width].sum() - counts.sum() - done.bad.sum())
        taken = np.arange(plan.width, dtype=np.int32) < counts[:, None]
        of = None if records is None else records[done.sequences][taken]
        self._outbox.tell(np.repeat(rows, counts), done.tokens[taken], of)
        self._finish_ended(rows, done.last, done.bad, done.stopped)

    def _finish_ended(self, rows: I32, last: I32, bad: Bools, stopped: Bools) -> None:
        """End those of ``rows`` that could choose no token (``bad``), whose ``last`` one is a stop token, or that are
        at their limit; and take rows back."""
        r = self.rows
        for i in np.flatnonzero(bad | stopped | (r.known[rows] == r.limit[rows])).tolist():
            row = int(rows[i])
            if bad[i]:
                self._finish_row(row, FinishReason.ERROR, error=NO_TOKEN)
                self.stats.corrupted += 1
            elif stopped[i]:
                self._finish_row(row, FinishReason.STOP, stop_token=int(last[i]))
            else:
                self._finish_row(row, FinishReason.LENGTH)
        self.roster.release()

    def message(self) -> StepMessage | None:
        """What happened since the last call, or None when nothing is to be told."""
        return self._outbox.message(self.versions.now)

    def _finish_row(
        self, row: int, reason: FinishReason, *, stop_token: int | None = None, error: str | None = None
    ) -> None:
        r = self.rows
        self.roster.finish(row, failed=reason is FinishReason.ERROR)
        new = r.tokens[row, r.prompt_len[row] : r.known[row]].copy()
        first = float(r.first_token_time[row]) if len(new) else None
        preemptions, versions = int(r.preemptions[row]), self.versions.of(row)
        ended = Finished(int(r.ids[row]), new, reason, stop_token, error, preemptions, first, versions)
        self._outbox.finished.append(ended)
        self.stats.requests_finished += 1
        self._repeated = None

    # ---- looking in, and what changes between steps ---------------------------------------------------------------

    def snapshot(self) -> SchedulerStats:
        """The counters, with the gauges of now."""
        stats = self.stats
        stats.running = len(self.roster.running)
        stats.deferred = len(self._parked)
        stats.waiting = len(self._waiting) + stats.deferred + len(self.roster.preempted)
        stats.used_by_group = tuple((p.capacity - p.available, p.capacity) for p in self.blocks.pools)
        stats.blocks_used, stats.blocks_total = map(sum, zip(*stats.used_by_group, strict=True))
        return stats

    def lora_users(self, lora_id: int) -> int:
        """Requests that run with this adapter, or wait to: none of their later steps may find other weights there."""
        started = [r for row, r in enumerate(self.rows.requests) if r is not None and not self.rows.finished[row]]
        others = (*self._waiting.values(), *self._parked.values())
        return sum(r.lora is not None and r.lora.id == lora_id for r in (*started, *others))

    def reset_prefix_cache(self) -> None:
        """Forget every prefix. Running rows keep their blocks, and nothing of them is published any more: what they
        have computed so far is of before, and what follows is built on it."""
        self._end_steady()
        self.blocks.unpublish_all()
        self.rows.blocks_hashed[self.roster.running] = NEVER  # no more; a preemption starts anew

    def new_weights(self, *, recompute: bool) -> int:
        """The weights have changed: forget every prefix and count the version, which is returned. Only while no step
        is in flight.

        Args:
            recompute: take the blocks of running rows, so that their past is computed again with the new weights.
                Otherwise they go on from what the old ones computed.
        """
        self.reset_prefix_cache()
        live = [row for row in self.roster.row_of.values() if not self.rows.finished[row]]
        self.versions.advance(live, recompute=recompute)
        if recompute:
            self.preempt_all()
        return self.versions.now

    def preempt_all(self) -> None:
        """Take the blocks of every running row. Only while no step is in flight."""
        self._end_steady()
        builder = StepBuilder(0, 0)
        for row in self.roster.running[::-1].tolist():
            self.roster.preempt(row, builder)
        self._prefill.look_again()

    def check(self) -> None:
        """Integrity of blocks and rows; for tests and debug runs.

        Raises:
            RuntimeError: blocks or rows do not add up.
        """
        if self._steady is not None:
            self._steady.flush()
        r = self.rows
        used = self.roster.check()
        self.blocks.check(used)
        if self._drafting is not None:
            self._drafting.check()
        for row in used:
            if not r.computed[row] <= r.total[row] <= r.limit[row] or r.known[row] > r.total[row]:
                raise RuntimeError(
                    f"row {row}: counts out of order: computed {r.computed[row]}, known {r.known[row]}, "
                    f"total {r.total[row]}, limit {r.limit[row]}"
                )
