"""The scheduler: which tokens the next step computes, and what the tokens of a step mean for its requests.

Touched by the loop's thread only; knows neither torch nor the device. `schedule` reads counts of *launched* tokens, so
it never waits for a token. `commit` brings the tokens of the oldest step; what a finished request's later steps drew
(its overrun) is dropped there.

Policy, in this order: every running request that needs one token gets it; running prompts go on in chunks; waiting
requests are admitted, by priority and then first come first served, while rows, blocks and budget last. Drafts take at
most half of what those single tokens leave while prompts could use it, so that prompts always get on. When blocks run
out, the newest running request of the least priority is preempted.

The parts: `RowStates` owns rows, blocks, prefixes and counts. `StepBuilder` is a step while it is put together: decodes
are planned here, prompts by `Prefill`, and `RowStates.launch` makes the plan. While nothing changes, `Steady` moves the
last plan on instead. `MessageBuilder` collects what is told. A finish reason is set by abort, stop, length or error
alike; the release follows in `RowStates.release`, and nowhere else.

What is optional stands behind these: drafts (`gapless.scheduler.seams`), scores of prompts
(`gapless.scheduler.prompt_scores`), masks of grammars (`gapless.scheduler.masks`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from gapless.batch.plan import StepPlan
from gapless.batch.row_layout import I32, RowLayout
from gapless.batch.row_table import NEVER
from gapless.config import EngineConfig
from gapless.errors import RequestError, shorter
from gapless.request.messages import Finished, StepMessage
from gapless.request.outputs import FinishReason
from gapless.request.request import Request
from gapless.scheduler.masks import GrammarMasks
from gapless.scheduler.prefill import Prefill
from gapless.scheduler.row_states import RowStates
from gapless.scheduler.stats import SchedulerStats
from gapless.scheduler.steady import Steady, SteadyDecode
from gapless.scheduler.step_builder import StepBuilder, max_updates
from gapless.scheduler.step_message import NO_TOKENS, Drawn, MessageBuilder
from gapless.scheduler.weight_versions import WeightVersions

NO_TOKEN = (
    "no token can be chosen: the logits of this request are not finite (NaN), or its own parameters "
    "(allowed_token_ids, bad_words, min_tokens, structured_outputs) mask all of them"
)


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
        self.states = RowStates(config, layout, num_blocks, prefix_root)
        self.rows, self.blocks, self.stats = self.states.rows, self.states.blocks, self.states.stats
        self.pool = self.blocks.pools[0]  # of the layers that keep everything, if there are any
        self.versions = WeightVersions(self.rows)
        self.admission_closed = False  # new requests do not wait to start, but for the end of a pause
        self._longest = layout.max_model_len - config.num_drafts
        self._budget = config.max_num_batched_tokens
        self._max_updates = max_updates(config, layout)
        self._message = MessageBuilder(self.rows)
        self._prefill = Prefill(self.states, self._message, budget=self._budget)
        self._waiting = self._prefill.waiting
        self._parked: dict[int, Request] = {}
        self._masks = GrammarMasks(self.rows, self.finish)
        self._steady: Steady | None = None  # while the last plan may go on
        self._step = 0

    # ---- requests -------------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Some request is waiting or running."""
        return bool(self._waiting or self.states.preempted or len(self.states.running))

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
            ended = Finished(request_id, NO_TOKENS, reason, error=error, weight_versions=versions)
            self._message.finished.append(ended)
            self.stats.requests_finished += 1
            return
        row = self.states.row_of.get(request_id)
        if row is not None and not self.rows.finished[row]:
            self._finish_row(row, reason, error=error)
            self.states.release()

    def release_parked(self) -> None:
        """The requests that came while `admission_closed` wait to start from now on."""
        self.admission_closed = False
        parked, self._parked = self._parked, {}
        for request in parked.values():
            self.add(request)

    def abort_all(self) -> None:
        """End every request, as `finish` does."""
        for request_id in [*self._waiting, *self._parked, *self.states.row_of]:
            self.finish(request_id, FinishReason.ABORT)

    # ---- planning -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed before a step in flight is committed, or while the
        latest one awaits its masks."""
        if self._masks.awaited:
            return None
        if self._steady is not None:
            if (plan := self._steady.next_plan()) is not None:
                return self._launched(plan)
            self._end_steady()
        if not self.has_requests:
            return None
        states = self.states
        if self.blocks.windowed:
            self.blocks.free_passed(states.running)
        builder = StepBuilder(self._budget, self._max_updates, self.layout.max_num_seqs - len(states.running))
        preempted_before = self.stats.preemptions
        self._schedule_decodes(builder)
        self._prefill.schedule_running(builder)
        if self.stats.preemptions == preempted_before:
            self._prefill.schedule_waiting(builder)
        plan = states.launch(builder, self._step)
        if plan is None:
            return None
        if not (states.preempted or builder.full) and plan.num_seqs == len(states.running):
            self._steady = self._go_steady(plan)
        return self._launched(plan)

    def _launched(self, plan: StepPlan) -> StepPlan:
        self._step += 1
        self._masks.launch(plan)
        self.stats.steps += 1
        self.stats.tokens_computed += plan.num_tokens
        self.stats.reads.count(plan, self.layout.windows)
        return plan

    def _go_steady(self, plan: StepPlan) -> Steady | None:
        """How the plan goes on while nothing joins or leaves."""
        drafts = self.states.drafts
        if plan.draws_only:
            return SteadyDecode(plan, self.blocks, drafts.steps_until_drafts(plan.rows))
        return drafts.steady(plan)

    def _end_steady(self) -> None:
        if self._steady is not None:
            self._steady.flush()
            self._steady = None

    def _schedule_decodes(self, builder: StepBuilder) -> None:
        """One token, or one and drafts, of each running row that has no more to compute."""
        r, states = self.rows, self.states
        running, before = states.running, self.stats.preemptions
        ready = running[(r.total[running] - r.computed[running] == 1) & (r.total[running] < r.limit[running])]
        lens, ends = states.drafts.choose(ready, builder, prompts=self._prefill.wanted)
        states.grow_each(ready, ends, builder)
        if self.stats.preemptions > before:
            kept = np.isin(ready, states.running)
            ready, lens = ready[kept], lens[kept]
        if len(ready):
            builder.extend(ready, lens)

    # ---- between forward and sampling -----------------------------------------------------------------------------

    @property
    def awaits_masks(self) -> bool:
        """The latest step waits for `fill_masks`, which needs the tokens of all steps before it."""
        return self._masks.awaited

    def fill_masks(self, masks: I32) -> I32:
        """What the grammars of the latest step allow, as bits, one after the other in ``masks [n, layout.mask_words]``.

        All older steps must be committed: then the host knows every token before those that the step will draw. A
        request ends here when its grammar has no next token.

        Returns:
            The rows ``[n]`` that the masks belong to.
        """
        return self._masks.fill(masks)

    # ---- results --------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, tokens: I32, records: I32 | None = None) -> None:
        """Take the tokens ``[S]`` of the oldest step. -1 marks a row whose logits were not finite.

        ``records [S, Record.COUNT]`` are there if the plan's features name log-probabilities. Of a step with drafts,
        ``tokens [S, query_width + 2]`` and ``records [S, query_width, Record.COUNT]``, see `Drafting.commit`.
        """
        states, steady = self.states, self._steady
        if steady is not None and steady.commit(plan, tokens, records, self._message):
            self.stats.generated_tokens += len(tokens)
            return
        if steady is not None and not steady.outlasts(plan):
            self._end_steady()
        self.rows.in_flight[plan.rows] -= 1
        if (prompts := states.scores.commit(plan, records)) is not None:
            self._message.prompts = prompts
        if plan.query_width == 1:
            drawn = self._take(plan, tokens, records)
        else:
            drawn = states.drafts.commit(plan, tokens, records, states.preempted)
        self.stats.generated_tokens += len(drawn.tokens)
        self.stats.overrun_tokens += drawn.overrun
        self._message.publish(drawn)
        self._finish_ended(drawn)

    def _take(self, plan: StepPlan, tokens: I32, records: I32 | None) -> Drawn:
        """The tokens of a step in which each sequence draws one at most."""
        r = self.rows
        drew = plan.draws & ~r.finished[plan.rows]
        rows, drawn = plan.rows[drew], tokens[drew]
        good = drawn >= 0
        at = (plan.starts + plan.query_lens)[drew]
        r.tokens[rows, at] = drawn
        r.known[rows] = at + good
        r.first_token_time[rows[at == r.prompt_len[rows]]] = time.monotonic()
        stopped = (drawn[:, None] == r.stop_ids[rows]).any(axis=1) & good
        of = None if records is None else records[drew][good]
        overrun = int(plan.draws.sum()) - len(rows)
        return Drawn(rows, drawn, ~good, stopped, rows[good], drawn[good], of, overrun)

    def _finish_ended(self, drawn: Drawn) -> None:
        """End the rows that could choose no token, whose last one is a stop token, or that are at their limit; and
        take rows back."""
        r = self.rows
        ended = drawn.bad | drawn.stopped | (r.known[drawn.rows] == r.limit[drawn.rows])
        for i in np.flatnonzero(ended).tolist():
            row = int(drawn.rows[i])
            if drawn.bad[i]:
                self._finish_row(row, FinishReason.ERROR, error=NO_TOKEN)
                self.stats.corrupted += 1
            elif drawn.stopped[i]:
                self._finish_row(row, FinishReason.STOP, stop_token=int(drawn.last[i]))
            else:
                self._finish_row(row, FinishReason.LENGTH)
        self.states.release()

    def _finish_row(
        self, row: int, reason: FinishReason, *, stop_token: int | None = None, error: str | None = None
    ) -> None:
        self._end_steady()
        r = self.rows
        self.states.finish(row, failed=reason is FinishReason.ERROR)
        new = r.tokens[row, r.prompt_len[row] : r.known[row]].copy()
        first = float(r.first_token_time[row]) if len(new) else None
        preemptions, versions = int(r.preemptions[row]), self.versions.of(row)
        cached = int(r.cached[row])
        ended = Finished(int(r.ids[row]), new, reason, stop_token, error, preemptions, first, versions, cached)
        self._message.finished.append(ended)
        self.stats.requests_finished += 1

    def message(self) -> StepMessage | None:
        """What happened since the last call, or None when nothing is to be told."""
        return self._message.take(self.versions.now)

    # ---- looking in, and what changes between steps ---------------------------------------------------------------

    def snapshot(self) -> SchedulerStats:
        """A copy of the counters, with the gauges of now."""
        stats = self.stats.copy()
        stats.running = len(self.states.running)
        stats.deferred = len(self._parked)
        stats.waiting = len(self._waiting) + stats.deferred + len(self.states.preempted)
        stats.used_by_group = tuple((p.capacity - p.available, p.capacity) for p in self.blocks.pools)
        stats.blocks_used, stats.blocks_total = map(sum, zip(*stats.used_by_group, strict=True))
        return stats

    def open_requests(self) -> Iterator[Request]:
        """Those that have not ended: running, preempted, waiting."""
        for row, request in enumerate(self.rows.requests):
            if request is not None and not self.rows.finished[row]:
                yield request
        yield from self._waiting.values()
        yield from self._parked.values()

    def reset_prefix_cache(self) -> None:
        """Forget every prefix. Running rows keep their blocks, and nothing of them is published any more: what they
        have computed so far is of before, and what follows is built on it."""
        self._end_steady()
        self.blocks.unpublish_all()
        self.rows.blocks_hashed[self.states.running] = NEVER  # no more; a preemption starts anew

    def new_weights(self, *, recompute: bool) -> int:
        """The weights have changed: forget every prefix and count the version, which is returned. Only while no step
        is in flight.

        Args:
            recompute: take the blocks of running rows, so that their past is computed again with the new weights.
                Otherwise they go on from what the old ones computed.
        """
        self.reset_prefix_cache()
        live = [row for row in self.states.row_of.values() if not self.rows.finished[row]]
        self.versions.advance(live, recompute=recompute)
        if recompute:
            self.preempt_all()
        return self.versions.now

    def preempt_all(self) -> None:
        """Take the blocks of every running row. Only while no step is in flight."""
        self._end_steady()
        builder = StepBuilder(0, 0)
        for row in self.states.running[::-1].tolist():
            self.states.preempt(row, builder)
        self._prefill.retry()

    def check(self) -> None:
        """Integrity of blocks and rows; for tests and debug runs.

        Raises:
            RuntimeError: blocks or rows do not add up.
        """
        if self._steady is not None:
            self._steady.flush()
        self.states.check()
