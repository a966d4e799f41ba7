"""Prefill: tokens that exist and are not computed. Running prompts go on in chunks, preempted rows resume, and waiting
requests start, after what the prefix cache holds of them.

Touched by the loop's thread only. A prompt, a prefix hit (which starts later) and the past of a preempted row are one
case: more than one token between ``computed`` and ``total``.
"""

from __future__ import annotations

import time

from gapless.scheduler.queue import WaitingQueue
from gapless.scheduler.row_states import RowStates
from gapless.scheduler.step_builder import StepBuilder
from gapless.scheduler.step_message import MessageBuilder


class Prefill:
    """See the module.

    Args:
        states: of the rows.
        message: is told of requests that start.
        budget: tokens of a whole step.

    Attributes:
        waiting: requests that have not started.
    """

    def __init__(self, states: RowStates, message: MessageBuilder, *, budget: int) -> None:
        self.waiting = WaitingQueue()
        self._states, self._message = states, message
        self._rows, self._blocks, self._prefixes = states.rows, states.blocks, states.prefixes
        self._budget = budget
        self._block_size = states.rows.layout.block_size
        # The first waiting request, and the blocks it did not fit in.
        self._blocked: tuple[int, tuple[int, ...]] | None = None

    @property
    def wanted(self) -> bool:
        """Some row has tokens to compute, or could start, if the budget lasts."""
        r, running = self._rows, self._states.running
        starting = self._states.preempted or (self.waiting and r.num_free)
        return bool(starting) or bool((r.total[running] - r.computed[running] > 1).any())

    def retry(self) -> None:
        """The next request that waits may fit now, whatever was found before."""
        self._blocked = None

    # ---- running prompts ------------------------------------------------------------------------------------------

    def schedule_running(self, builder: StepBuilder) -> None:
        """The next chunks of running prompts, by rank, while the budget lasts."""
        r, running = self._rows, self._states.running
        for row in running[r.total[running] - r.computed[running] > 1].tolist():
            if builder.budget <= 0:
                return
            if row not in self._states.preempted:
                start = int(r.computed[row])
                length = self._chunk(row, start, builder)
                if self._states.grow(row, start + length, builder):
                    self._add_chunk(row, start, length, builder)

    def _chunk(self, row: int, start: int, builder: StepBuilder) -> int:
        """Tokens of the row's next chunk, from position ``start``."""
        r = self._rows
        length = min(int(r.total[row]) - start, builder.budget, self._blocks.longest_chunk(int(r.limit[row])))
        return self._states.scores.chunk(row, start, length, builder)

    def _add_chunk(self, row: int, start: int, length: int, builder: StepBuilder) -> None:
        """Also publishes the blocks that the chunk completes, so a row with a chunk must stay in the step.

        It does: blocks are taken from the last of the running rows, chunks are planned by rank, and a starting row
        takes from none.
        """
        if not self._states.scores.add(row, start, length, builder):
            builder.add(row, length)
        self._prefixes.publish(row, start + length)

    # ---- who starts -----------------------------------------------------------------------------------------------

    def schedule_waiting(self, builder: StepBuilder) -> None:
        """Resume preempted rows and start waiting requests, by priority; of one priority preempted rows come first.
        Stop at the first that does not fit."""
        r, preempted = self._rows, self._states.preempted
        # A preempted row whose last token is in flight already needs no more steps; commit ends it.
        for row in [row for row in preempted if r.total[row] < r.limit[row]]:
            if not self._states.drafts.may_resume(row):
                return
            if not self._admit_waiting(builder, before=int(r.priority[row])):
                return
            if builder.budget <= 0 or builder.seqs_left <= 0 or not self._start(row, builder):
                return
            del preempted[row]
        self._admit_waiting(builder)

    def _admit_waiting(self, builder: StepBuilder, before: int | None = None) -> bool:
        """Start waiting requests, those whose priority is below ``before`` only. False: the next one does not fit."""
        states, stats = self._states, self._states.stats
        while builder.budget > 0 and builder.seqs_left > 0:
            if not self.waiting or not self._rows.num_free:
                return True
            request_id, request = next(iter(self.waiting.items()))
            if before is not None and request.priority >= before:
                return True
            if self._blocked == (request_id, self._blocks.available):
                return False  # it did not fit, and nothing has been freed since
            if request.embeds is not None and len(request.embeds) > states.embeds.num_free:
                return False
            if not builder.published:
                self._prefixes.publish_generated(states.running.tolist())
                builder.published = True
            row = states.assign(request)
            upload = states.embeds.take(row)
            params, hits = self._rows.param_updates(row), stats.prefix_hit_tokens
            builder.updates_left -= len(params)
            started = self._start(row, builder)
            builder.updates_left += len(params)
            if not started:
                states.embeds.give_back(row)
                self._rows.release(row)  # takes back the assignment above: no step has named the row
                if not builder.full:
                    self._blocked = (request_id, self._blocks.available)
                return False
            builder.update(params)
            if upload is not None:
                builder.embeds.append(upload)
            del self.waiting[request_id]
            states.row_of[request_id] = row
            self._message.waits.append(time.monotonic() - request.arrival)
            length = len(request.prompt_token_ids)
            stats.prompt_tokens += length
            self._message.prefills.append(length - (stats.prefix_hit_tokens - hits))
        return before is None

    def _start(self, row: int, builder: StepBuilder) -> bool:
        """Plan a row's first chunk, after what the prefix cache holds of it. False: no room, and nothing changed.

        Where the device reads the prompt, the tokens of the hit are written to the row with the updates (no chunk
        brings them), so that the hit is as long as the updates allow.
        """
        r, blocks = self._rows, self._blocks
        groups = r.layout.num_groups
        per_block = groups + self._block_size if r.needs_prompt[row] else groups
        most = (builder.updates_left - groups * (-(-builder.budget // self._block_size) + 1)) // per_block
        hit = blocks.no_hit if self._states.scores.pending(row) else self._prefixes.hit(row, most)
        start, total = hit.num_blocks * self._block_size, int(r.total[row])
        builder.seqs_left -= 1
        length = self._chunk(row, start, builder)
        # Room for all of its tokens, not for the first chunk only: it should not be preempted before it has decoded.
        chunk = min(total - start, self._budget, blocks.longest_chunk(int(r.limit[row])))
        if not blocks.fits(hit, total, chunk):
            return False
        tokens = start if r.needs_prompt[row] else 0
        if blocks.table_words(hit, start + length) + tokens > builder.updates_left:
            builder.full = True
            return False
        blocks.start(row, hit)
        r.blocks_hashed[row] = hit.num_blocks
        r.computed[row] = start
        if not r.preemptions[row]:
            r.cached[row] = start
        self._states.stats.prefix_hit_tokens += start
        if tokens:
            builder.update(r.token_updates(row, 0, tokens))
        if not self._states.grow(row, start + length, builder, preempt=False):
            raise RuntimeError(f"{blocks.available} blocks are available but row {row} could not get its share")
        self._states.run(row)
        self._add_chunk(row, start, length, builder)
        return True
