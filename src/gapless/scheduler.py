"""The scheduler: which tokens the next step computes, and what the tokens of a step mean for its requests.

Touched by the loop's thread only; knows neither torch nor the device. `schedule` reads counts of *launched* tokens, so
it never waits for a token. `commit` brings the tokens of the oldest step; what a finished request's later steps drew
(its overrun) is dropped there.

Policy, in this order: every running request that needs one token gets it; running prompts go on in chunks; waiting
requests are admitted, by priority and then first come first served, while rows, blocks and budget last. Drafts take at
most half of what those single tokens leave while prompts could use it, so that prompts always get on. When blocks run
out, the newest running request of the least priority is preempted: it gives its blocks back and keeps its row, so that
it resumes from the tokens that the device already has. Running rows are kept by rank, which is priority (lower goes
first), then id.

Ownership: blocks go to a new owner at once (the compute stream keeps the order); a row only when no step in flight
names it. A finish reason is set by abort, stop, length or error alike; the release follows in `_release_rows`, and
nowhere else.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gapless.config import EngineConfig
from gapless.draft import Draft, places
from gapless.drafting import Drafting, DraftStats
from gapless.errors import RequestError
from gapless.grammar.matcher import fill_masks
from gapless.messages import Finished, PromptRecords, StepMessage
from gapless.plan import I32, Bools, Feature, RowLayout, StepPlan
from gapless.prefix import PrefixCache
from gapless.request import FinishReason, Request
from gapless.row_blocks import RowBlocks
from gapless.rows import RowTable
from gapless.steady import NO_UPDATES, Steady
from gapless.versions import WeightVersions
from gapless.volume import Volume
from gapless.waiting import WaitingQueue

NEVER = np.iinfo(np.int32).max
"""In place of a row's number of published blocks: there will be no more. A preemption starts it anew."""
NO_IDS = np.zeros(0, np.int64)
NO_TOKENS = np.zeros(0, np.int32)
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


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start; ``running``, ``waiting`` and what is said of blocks are of now.

    ``blocks_used`` and ``blocks_total`` count the blocks of all groups of layers, ``used_by_group`` has (used, total)
    of each (see `gapless.kv.groups`). ``drafts`` is None in an engine without drafts.
    """

    steps: int = 0
    tokens_computed: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    overrun_tokens: int = 0
    preemptions: int = 0
    requests_finished: int = 0
    corrupted: int = 0  # of them: those that ended because no token could be chosen, by NaN or by their own masks
    volume: Volume = field(default_factory=Volume)
    running: int = 0
    waiting: int = 0
    deferred: int = 0  # of them: those that came after a pause was asked for that lets others finish
    blocks_used: int = 0
    blocks_total: int = 0
    used_by_group: tuple[tuple[int, int], ...] = ()
    drafts: DraftStats | None = None

    @property
    def kv_use(self) -> float:
        """Share of the KV pool that requests hold, 0 to 1: of the group of layers that is fullest. Blocks that only the
        prefix cache keeps are free."""
        groups = self.used_by_group or ((self.blocks_used, self.blocks_total),)
        return max(used / max(total, 1) for used, total in groups)


class Scheduler:
    """See the module.

    Args:
        config: of the engine.
        layout: of the persistent rows.
        num_blocks: blocks of each group's pool, the null blocks among them; one number if they are equal.
    """

    def __init__(self, config: EngineConfig, layout: RowLayout, num_blocks: int | Sequence[int]) -> None:
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
        self._prefixes = PrefixCache(self.rows, self.blocks, enabled=config.enable_prefix_caching)
        self._steady: Steady | None = None
        self._repeated: StepPlan | None = None  # the last plan, if `Drafting.repeat` may go on with it
        self._last_rows = NO_TOKENS
        self.versions = WeightVersions(self.rows)
        self.holding = False  # new requests do not wait to start, but for the end of a pause
        self._parked: dict[int, Request] = {}
        self._waiting = WaitingQueue()
        self._row_of: dict[int, int] = {}  # running, preempted and draining requests, by id
        self._running = np.zeros(0, np.int32)  # rows, by rank
        self._preempted: OrderedDict[int, None] = OrderedDict()  # rows that wait for blocks, by rank
        self._draining: list[int] = []  # rows of finished requests that steps in flight still name
        # The first waiting request, and the blocks it did not fit in.
        self._blocked: tuple[int, tuple[int, ...]] | None = None
        self._step = 0
        self._held: StepPlan | None = None  # the latest step, while its masks are missing
        self._finished: list[Finished] = []
        self._waits: list[float] = []
        self._prefills: list[int] = []
        self._stream_ids, self._stream_tokens = NO_IDS, NO_TOKENS
        self._stream_records: I32 | None = None
        self._prompts: PromptRecords | None = None

    # ---- requests -------------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Some request is waiting or running."""
        return bool(self._waiting or self._preempted or len(self._running))

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
                f"is {longest}. Shorten the prompt or lower max_tokens to {max(longest - prompt_len, 0)} or less"
            )
        self.blocks.refuse_what_never_fits(length + self.layout.max_model_len - self._longest)  # drafts beyond the end

    def add(self, request: Request) -> None:
        """Queue a request that `refuse_what_never_fits` accepted."""
        self._end_steady()
        if self.holding:
            self._parked[request.id] = request
        else:
            self._waiting[request.id] = request

    def finish(self, request_id: int, reason: FinishReason, error: str | None = None) -> None:
        """End a request from outside (abort, or a stop string). Unknown and already ended ids are ignored."""
        self._end_steady()
        request = self._waiting.pop(request_id, None) or self._parked.pop(request_id, None)
        if request is not None:
            versions = (self.versions.now,) * 2
            self._finished.append(Finished(request_id, NO_TOKENS, reason, error=error, weight_versions=versions))
            self.stats.requests_finished += 1
            return
        row = self._row_of.get(request_id)
        if row is not None and not self.rows.finished[row]:
            self._finish_row(row, reason, error=error)
            self._release_rows()

    def release_parked(self) -> None:
        """The requests that came while `holding` wait to start from now on."""
        self.holding = False
        parked, self._parked = self._parked, {}
        for request in parked.values():
            self.add(request)

    def abort_all(self) -> None:
        """End every request, as `finish` does."""
        for request_id in [*self._waiting, *self._parked, *self._row_of]:
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
        if self.blocks.windowed:
            self.blocks.leave_behind(self._running, self._lowest(self._running))
        draft = Draft(self._budget, self._max_updates, self.layout.max_num_seqs - len(self._running))
        preempted_before = self.stats.preemptions
        self._plan_decodes(draft)
        self._plan_running_prompts(draft)
        if self.stats.preemptions == preempted_before:
            self._admit(draft)
        plan = self._finish_plan(draft) if draft.rows else None
        unchanged = plan is not None and not self._preempted and not draft.full and plan.num_seqs == len(self._running)
        if plan is not None and unchanged and plan.draws_only:
            self._steady = Steady(plan, self.rows, self._block_size)
            if self._drafting is not None:
                self._steady.left = min(self._steady.left, self._drafting.steps_until_resumed(plan.rows))
        elif plan is not None and unchanged and self._drafting is not None and self._drafting.goes_on(plan):
            self._repeated = plan
        return plan

    def _next_steady(self, steady: Steady) -> StepPlan | None:
        """The next step of an unchanged batch, or None when the general path must look."""
        updates = NO_UPDATES
        if steady.left > 0 and steady.room <= 0:
            steady.flush()
            needy = steady.needy()
            appended = self.blocks.append(needy, self._lowest(needy))
            if appended is not None:
                updates = appended
                steady.grown()
        if steady.left <= 0 or steady.room <= 0:
            self._end_steady()
            return None
        plan = steady.next_plan(self._step, updates)
        self._count_step(plan)
        return plan

    def _end_steady(self) -> None:
        self._repeated = None
        if self._steady is not None:
            self._steady.flush()
            self._steady = None

    def _lowest(self, rows: I32) -> I32:
        """For each row a lower bound of the first position that any later step computes: the next one, as whatever has
        been launched stays."""
        return self.rows.computed[rows]

    def _count_step(self, plan: StepPlan) -> None:
        self._step += 1
        self._held = None if plan.constrained is None else plan
        self.stats.steps += 1
        self.stats.tokens_computed += plan.num_tokens
        self.stats.volume.add(plan, self.layout.windows)

    def _plan_decodes(self, draft: Draft) -> None:
        r, running = self.rows, self._running
        ready = running[(r.total[running] - r.computed[running] == 1) & (r.total[running] < r.limit[running])]
        lens, ends = np.ones(len(ready), np.int32), r.computed[ready] + 1
        if self._drafting is not None:
            drafts = self._drafting.choose(ready, draft.budget, prompts=self._prompts_wait())
            lens += drafts * np.int32(self._drafting.num_drafts)
            ends = self._drafting.ends(ready, lens)
            draft.drafting = ready[drafts]
        needy = ends > r.num_blocks[ready] * self._block_size
        before = self.stats.preemptions
        for row, length in zip(ready[needy].tolist(), (ends - r.computed[ready])[needy].tolist(), strict=True):
            if row not in self._preempted:
                self._grow(row, length, draft)
        if self.stats.preemptions > before:
            kept = np.isin(ready, self._running)
            ready, lens = ready[kept], lens[kept]
        if len(ready):
            draft.rows.append(ready)
            draft.lens.append(lens)
            draft.budget -= int(lens.sum())

    def _prompts_wait(self) -> bool:
        """Some row needs tokens computed that exist, or could start if the budget lasts."""
        r, running = self.rows, self._running
        starting = self._preempted or (self._waiting and r.num_free)
        return bool(starting) or bool((r.total[running] - r.computed[running] > 1).any())

    def _plan_running_prompts(self, draft: Draft) -> None:
        r, running = self.rows, self._running
        for row in running[r.total[running] - r.computed[running] > 1].tolist():
            if draft.budget <= 0:
                return
            if row not in self._preempted:
                length = self._chunk(row, int(r.computed[row]), draft)
                if self._grow(row, length, draft):
                    self._plan_chunk(row, length, draft)

    def _chunk(self, row: int, start: int, draft: Draft) -> int:
        """Tokens of the row's next chunk, from position ``start``.

        A prompt whose tokens are scored goes as sequences of one token, since only the end of a sequence has logits:
        so the logits of a step stay as many as its sequences, however long the prompt is.
        """
        r = self.rows
        length = min(int(r.total[row]) - start, draft.budget, self.blocks.longest_chunk(row))
        scored, to_score = int(r.scored[row]), int(r.to_score[row])
        if scored == to_score:
            return length
        if start < scored:  # computed once more after a preemption
            return min(length, scored - start)
        return min(length, to_score - start, 1 + draft.seqs_left)

    def _plan_chunk(self, row: int, length: int, draft: Draft) -> None:
        r = self.rows
        start = int(r.computed[row])
        if r.scored[row] <= start < r.to_score[row]:
            draft.score(row, length)
            draft.update(r.token_updates(row, start + length, start + length + 1))  # no chunk has brought it yet
        else:
            draft.add(row, length)
        self._prefixes.publish(row, int(self.rows.computed[row]) + length)

    def _admit(self, draft: Draft) -> None:
        """Resume preempted rows and start waiting requests, by priority; of one priority preempted rows come first.
        Stop at the first that does not fit."""
        r = self.rows
        # A preempted row whose last token is in flight already needs no more steps; commit ends it.
        for row in [row for row in self._preempted if r.total[row] < r.limit[row]]:
            if self._drafting is not None and self._drafting.slack[row]:
                return  # how many tokens it has is known once its steps with drafts are committed
            if not self._admit_waiting(draft, before=int(r.priority[row])):
                return
            if draft.budget <= 0 or draft.seqs_left <= 0 or not self._start(row, draft):
                return
            del self._preempted[row]
        self._admit_waiting(draft)

    def _admit_waiting(self, draft: Draft, before: int | None = None) -> bool:
        """Start waiting requests, those whose priority is below ``before`` only. False: the next one does not fit."""
        while draft.budget > 0 and draft.seqs_left > 0:
            if self._waiting and self.rows.num_free:
                request_id, request = next(iter(self._waiting.items()))
                if before is not None and request.priority >= before:
                    return True
                if self._blocked == (request_id, self.blocks.available):
                    return False  # it did not fit, and nothing has been freed since
                if not draft.published:
                    self._prefixes.publish_generated(self._running.tolist())
                    draft.published = True
                row = self.rows.assign(request)
                if self._drafting is not None:
                    self._drafting.assign(row, request)
                params, hits = self.rows.param_updates(row), self.stats.prefix_hit_tokens
                draft.updates_left -= len(params)
                started = self._start(row, draft)
                draft.updates_left += len(params)
                if not started:
                    self.rows.release(row)
                    if not draft.full:
                        self._blocked = (request_id, self.blocks.available)
                    return False
                draft.update(params)
                del self._waiting[request_id]
                self._row_of[request_id] = row
                self._waits.append(time.monotonic() - request.arrival)
                self.stats.prompt_tokens += len(request.prompt_token_ids)
                self._prefills.append(len(request.prompt_token_ids) - (self.stats.prefix_hit_tokens - hits))
            else:
                return True
        return before is None

    def _start(self, row: int, draft: Draft) -> bool:
        """Plan a row's first chunk, after what the prefix cache holds of it. False: no room, and nothing changed.

        Where the sampler reads the prompt, the tokens of the hit are written to the row with the updates (no chunk
        brings them), so that the hit is as long as the updates allow.
        """
        r = self.rows
        groups = self.layout.num_groups
        per_block = groups + self._block_size if r.needs_prompt[row] else groups
        most = (draft.updates_left - groups * (self._blocks_for(draft.budget) + 1)) // per_block
        hit = self._prefixes.hit(row, most) if r.scored[row] == r.to_score[row] else self.blocks.no_hit
        start, total = hit.num_blocks * self._block_size, int(r.total[row])
        draft.seqs_left -= 1
        length = self._chunk(row, start, draft)
        # Room for all of its tokens, not for the first chunk only: it should not be preempted before it has decoded.
        chunk = min(total - start, self._budget, self.blocks.longest_chunk(row))
        if not self.blocks.fits(hit, total, chunk):
            return False
        tokens = start if r.needs_prompt[row] else 0
        if self.blocks.table_words(hit, start + length) + tokens > draft.updates_left:
            draft.full = True
            return False
        self.blocks.start(row, hit)
        r.blocks_sent[row] = 0
        r.blocks_hashed[row] = hit.num_blocks
        r.computed[row] = start
        self.stats.prefix_hit_tokens += start
        if tokens:
            draft.update(r.token_updates(row, 0, tokens))
        if not self._grow(row, length, draft, preempt=False):
            raise RuntimeError(f"{self.blocks.available} blocks are available but row {row} could not get its share")
        place = np.searchsorted(r.ranks[self._running], r.ranks[row])  # a resumed row takes its old place
        self._running = np.insert(self._running, place, row)
        self._plan_chunk(row, length, draft)
        return True

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _grow(self, row: int, length: int, draft: Draft, *, preempt: bool = True) -> bool:
        """Give ``row`` the blocks for ``length`` more positions, preempting rows of higher rank. False if it lost its
        own."""
        r = self.rows
        missing = self._blocks_for(int(r.computed[row]) + length) - int(r.num_blocks[row])
        if missing > 0:
            while not self.blocks.grow(row, missing):
                if not preempt:
                    return False
                victim = int(self._running[-1])
                self._preempt(victim, draft)
                if victim == row:
                    return False
        if r.blocks_sent[row] < r.num_blocks[row]:
            draft.update(r.table_updates(row))
            r.blocks_sent[row] = r.num_blocks[row]
        return True

    def _preempt(self, row: int, draft: Draft) -> None:
        """Take all blocks of ``row``; it is computed again later, from the tokens in its row on the device."""
        r = self.rows
        self._prefixes.publish_generated([row])
        self.blocks.release(row)
        r.blocks_sent[row] = r.blocks_hashed[row] = r.computed[row] = 0
        r.preemptions[row] += 1
        self.stats.preemptions += 1
        self._running = self._running[self._running != row]
        self._preempted[row] = None
        self._preempted.move_to_end(row, last=False)
        draft.drop(row)  # it may have a place in this very step already

    def preempt_all(self) -> None:
        """Take the blocks of every running row. Only while no step is in flight."""
        self._end_steady()
        draft = Draft(0, 0)
        for row in self._running[::-1].tolist():
            self._preempt(row, draft)
        self._blocked = None

    def _finish_plan(self, draft: Draft) -> StepPlan | None:
        r = self.rows
        rows, lens = np.concatenate(draft.rows), np.concatenate(draft.lens)
        if not len(rows):
            return None
        if np.array_equal(rows, self._last_rows):
            rows = self._last_rows  # the same object: see Steady.owns
        self._last_rows = rows
        starts = r.computed[rows]
        scores = np.isin(rows, draft.scored) if draft.scored else None
        if scores is not None:  # the sequences of one row lie side by side
            starts = starts + places(rows)
        drafts, follows, width = None, None, 1
        ends = starts + lens
        if self._drafting is not None:
            drafts = np.isin(rows, draft.drafting)
            ends = np.where(drafts, starts + np.int32(1), ends)
            follows = self._drafting.launched(rows, drafts)
            if drafts.any() or follows.any():
                width = self._drafting.width
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
        updates = np.concatenate(draft.updates) if draft.updates else NO_UPDATES
        if len(updates) > self._max_updates:
            raise RuntimeError(f"step {self._step} has {len(updates)} updates; a slot holds {self._max_updates}")
        constrained = samples & r.constrained[rows]
        plan = StepPlan(
            self._step, rows, starts, lens, samples, input_ids, carry, updates, features, scores,
            constrained if constrained.any() else None, bool(r.lora[rows].any()), width, drafts, follows,
            few=drafts is not None and bool((drafts | (lens == 1)).all()),
        )  # fmt: skip
        self._count_step(plan)
        return plan

    # ---- grammars -------------------------------------------------------------------------------------------------

    @property
    def held(self) -> bool:
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
                self._stream_ids, self._stream_tokens = steady.stream_ids, tokens[steady.streaming]
                self._stream_records = records[steady.streaming] if records is not None else None
            return
        repeated = self._repeated
        self._end_steady()
        r.in_flight[plan.rows] -= 1
        if plan.scores is not None and records is not None:
            live = plan.scores & ~r.finished[plan.rows]
            first = records[live] if plan.width == 1 else records[live, 0]
            self._prompts = PromptRecords(r.ids[plan.rows[live]], plan.starts[live] + 1, first)
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
        self._tell(rows[good], drawn[good], records[drew][good] if records is not None else None)
        self._finish_ended(rows, drawn, ~good, stop)

    def _commit_drafts(self, plan: StepPlan, tokens: I32, records: I32 | None) -> None:
        """The end of `commit` for a step with drafts: up to ``width`` tokens of a row."""
        assert self._drafting is not None
        stopped = self._drafting.stats.stopped
        done = self._drafting.commit(plan, tokens, self._preempted)
        if stopped != self._drafting.stats.stopped:
            self._repeated = None
        rows, counts = done.rows, done.counts
        self.stats.generated_tokens += int(counts.sum())
        self.stats.overrun_tokens += int(tokens[plan.samples, plan.width].sum() - counts.sum() - done.bad.sum())
        taken = np.arange(plan.width, dtype=np.int32) < counts[:, None]
        of = None if records is None else records[done.sequences][taken]
        self._tell(np.repeat(rows, counts), done.tokens[taken], of)
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
        self._release_rows()

    def _tell(self, rows: I32, drawn: I32, records: I32 | None) -> None:
        streaming = self.rows.streaming[rows]
        self._stream_ids, self._stream_tokens = self.rows.ids[rows[streaming]], drawn[streaming]
        self._stream_records = records[streaming] if records is not None else None

    def message(self) -> StepMessage | None:
        """What happened since the last call, or None when nothing is to be told."""
        if not len(self._stream_ids) and not self._finished and self._prompts is None:
            return None
        message = StepMessage(
            self._stream_ids,
            self._stream_tokens,
            tuple(self._finished),
            time.monotonic(),
            self._stream_records,
            self._prompts,
            self.versions.now,
            tuple(self._waits),
            tuple(self._prefills),
        )
        self._waits, self._prefills = [], []
        self._stream_ids, self._stream_tokens, self._stream_records, self._prompts = NO_IDS, NO_TOKENS, None, None
        self._finished = []
        return message

    def _finish_row(
        self, row: int, reason: FinishReason, *, stop_token: int | None = None, error: str | None = None
    ) -> None:
        r = self.rows
        self._prefixes.publish_generated([row])
        if reason is FinishReason.ERROR:
            self.blocks.unpublish(row)
        self.blocks.release(row)
        r.finished[row] = True
        new = r.tokens[row, r.prompt_len[row] : r.known[row]].copy()
        first = float(r.first_token_time[row]) if len(new) else None
        preemptions = int(r.preemptions[row])
        versions = self.versions.of(row)
        self._finished.append(Finished(int(r.ids[row]), new, reason, stop_token, error, preemptions, first, versions))
        self.stats.requests_finished += 1
        self._repeated = None
        self._running = self._running[self._running != row]
        self._preempted.pop(row, None)
        self._draining.append(row)

    def _release_rows(self) -> None:
        """The one place where rows come back: finished, and no step in flight names them."""
        waiting = []
        for row in self._draining:
            if self.rows.in_flight[row]:
                waiting.append(row)
            else:
                del self._row_of[int(self.rows.ids[row])]
                self.rows.release(row)
        self._draining = waiting

    # ---- looking in -----------------------------------------------------------------------------------------------

    def snapshot(self) -> SchedulerStats:
        """The counters, with the gauges of now."""
        stats = self.stats
        stats.running = len(self._running)
        stats.deferred = len(self._parked)
        stats.waiting = len(self._waiting) + stats.deferred + len(self._preempted)
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
        self.rows.blocks_hashed[self._running] = NEVER

    def new_weights(self, *, recompute: bool) -> int:
        """The weights have changed: forget every prefix and count the version, which is returned. Only while no step
        is in flight.

        Args:
            recompute: take the blocks of running rows, so that their past is computed again with the new weights.
                Otherwise they go on from what the old ones computed.
        """
        self.reset_prefix_cache()
        live = [row for row in self._row_of.values() if not self.rows.finished[row]]
        self.versions.advance(live, recompute=recompute)
        if recompute:
            self.preempt_all()
        return self.versions.now

    def check(self) -> None:
        """Integrity of blocks and rows; for tests and debug runs.

        Raises:
            RuntimeError: blocks or rows do not add up.
        """
        if self._steady is not None:
            self._steady.flush()
        r = self.rows
        used = [row for row, request in enumerate(r.requests) if request is not None]
        self.blocks.check(used)
        named = sorted([*self._running.tolist(), *self._preempted, *self._draining])
        if named != used or sorted(self._row_of.values()) != used:
            raise RuntimeError(f"rows in use {used}, but running, preempted and draining rows are {named}")
        if self._drafting is not None:
            self._drafting.check()
        for row in used:
            if not r.computed[row] <= r.total[row] <= r.limit[row] or r.known[row] > r.total[row]:
                raise RuntimeError(
                    f"row {row}: counts out of order: computed {r.computed[row]}, known {r.known[row]}, "
                    f"total {r.total[row]}, limit {r.limit[row]}"
                )
