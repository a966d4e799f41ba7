"""The output side: step messages in, `RequestOutput` objects out.

Threads: `OutputProcessor.process` runs on one thread, the output thread; only it touches the text, ids and
detokenizers of a group. `add`, `abort` and `fail` may be called from any thread; the lock guards the two
tables of open requests and the flags of a group, and is never held while a callback runs.

Invariants:

* A completion is open from `add` until its `Finished` entry, a stop string, or the group's failure,
  whichever is first; what comes for it later is dropped, because its id is no longer in the table.
* A group gets outputs and then exactly one with ``finished=True``, or `RequestGroup.on_error` exactly once
  instead.
* ``token_ids`` include the token that ended the request; ``text`` does not include that token's text. A
  stop string ends the ids with the token that completed it, and the text where it begins. With
  ``include_stop_str_in_output`` the text keeps both. Log-probabilities are as many as ids.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from gapless.errors import EngineDeadError
from gapless.request.messages import PromptRecords, StepMessage
from gapless.request.outputs import RequestOutput
from gapless.text.completion import Completion, OutputMode, RequestGroup

__all__ = ["OutputMode", "OutputProcessor", "RequestGroup", "accumulate"]

logger = logging.getLogger(__name__)

_LAST = -1
"""Instead of the count of open completions: the last output is on its way, so `fail` comes too late."""


class OutputProcessor:
    """Turns step messages into outputs.

    Args:
        on_stop: called with an internal id that needs no more tokens; asks the engine to end it. The engine
            may have ended it by itself already. Called on the thread of `process`, or of `abort`.
    """

    def __init__(self, on_stop: Callable[[int], None]) -> None:
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._completions: dict[int, Completion] = {}
        self._open: dict[RequestGroup, int] = {}  # completions still open, or _LAST
        self._failure: BaseException | None = None

    @property
    def pending(self) -> int:
        """Groups that have not got their last output yet."""
        return len(self._open)

    def add(self, group: RequestGroup) -> None:
        """Registers a group; do it before the engine gets its requests.

        Raises:
            EngineDeadError: after `fail`.
            ValueError: an id that is open already.
        """
        completions = [Completion(group, index, id) for index, id in enumerate(group.ids)]
        with self._lock:
            if self._failure is not None:
                raise EngineDeadError("the engine has stopped and takes no more requests") from self._failure
            for id in group.ids:
                if id in self._completions:
                    raise ValueError(f"internal id {id} is in use by an open request")
            group.completions = completions
            self._completions.update((c.id, c) for c in completions)
            self._open[group] = len(completions)

    def abort(self, group: RequestGroup) -> None:
        """Ends a group for its user: no more output but the final one, by the engine's last word."""
        with self._lock:
            if group not in self._open:
                return
            group.silent = True
            ids = [id for id in group.ids if id in self._completions]
        for id in ids:
            self._on_stop(id)

    def refuse(self, id: int, error: BaseException) -> None:
        """Ends the group of an internal id that the engine has refused; its other completions are ended there."""
        c = self._completions.get(id)
        if c is None:
            return
        was_open, ids = self._forget(c.group)
        for other in ids:
            if other != id:
                self._on_stop(other)
        if was_open:
            self._report(c.group, error)

    def fail(self, error: BaseException) -> None:
        """The engine died: each open group's `on_error` gets ``error``, and `add` refuses from now on."""
        with self._lock:
            self._failure = self._failure or error
            groups = [group for group, left in self._open.items() if left != _LAST]
            for group in groups:
                del self._open[group]
            self._completions.clear()
        for group in groups:
            self._report(group, error)

    def _forget(self, group: RequestGroup) -> tuple[bool, list[int]]:
        """Takes a group out of the tables: whether it was open, and its completions that still were."""
        with self._lock:
            was_open = self._open.pop(group, None) is not None
            return was_open, [id for id in group.ids if self._completions.pop(id, None) is not None]

    def process(self, message: StepMessage) -> None:
        """Takes what one step brought and calls `RequestGroup.on_output` of the groups that it concerns."""
        ended, version = {f.id: f for f in message.finished}, message.weight_version
        touched: dict[Completion, None] = {}
        if message.prompts is not None:
            self._add_prompts(message.prompts)
        records = message.records
        for i, (id, token) in enumerate(zip(message.ids.tolist(), message.tokens.tolist(), strict=True)):
            c = self._completions.get(id)
            if c is None:  # ended by a stop string or an error; these are its steps in flight
                continue
            group, has_text = c.group, True
            if ended:
                end = ended.get(id)
                last = end is not None and end.stop_token is not None and c.count + 1 == len(end.token_ids)
                has_text = not last or group.params.include_stop_str_in_output
            try:
                c.append(token, None if records is None else records[i], has_text=has_text)
            except Exception as error:
                self._break(group, error, "detokenizing")
                continue
            if group.weight_version != version:
                group.saw_weights(version, version)
            if group.metrics.first_token_time is None:
                group.metrics.first_token_time = message.time
            touched[c] = None
            if c.reason is not None:
                self._close(c)
                self._on_stop(id)
        for end in message.finished:
            c = self._completions.get(end.id)
            if c is None:
                continue
            try:
                c.finish(end)
            except Exception as error:
                self._break(c.group, error, "detokenizing")
                continue
            metrics = c.group.metrics
            metrics.num_preemptions += end.num_preemptions
            before = metrics.cached_tokens
            metrics.cached_tokens = end.cached_tokens if before is None else min(before, end.cached_tokens)
            if end.first_token_time is not None:
                metrics.first_token_time = min(metrics.first_token_time or end.first_token_time, end.first_token_time)
            c.group.saw_weights(*end.weight_versions)
            touched[c] = None
            self._close(c)
        changed: dict[RequestGroup, list[Completion]] = {}
        for c in touched:
            group = c.group
            take = group.on_text
            try:
                if take is None or c.reason is not None or group.silent or not c.hand_text(take):
                    changed.setdefault(group, []).append(c)
            except Exception as error:
                self._break(group, error, "on_text")
        for group, completions in changed.items():
            self._emit(group, completions, message.time)

    def _add_prompts(self, prompts: PromptRecords) -> None:
        for id, position, record in zip(prompts.ids.tolist(), prompts.positions.tolist(), prompts.records, strict=True):
            c = self._completions.get(id)
            if c is not None:
                try:
                    c.group.add_prompt_record(position, record)
                except Exception as error:
                    self._break(c.group, error, "reading log-probabilities")

    def _close(self, c: Completion) -> None:
        with self._lock:
            if self._completions.pop(c.id, None) is not None:
                self._open[c.group] -= 1

    def _emit(self, group: RequestGroup, changed: Iterable[Completion], time: float) -> None:
        with self._lock:
            left = self._open.get(group)
            if left is None:  # failed meanwhile
                return
            if left == 0:
                self._open[group] = _LAST
            elif group.silent or group.mode == "final":
                return
        if left == 0:
            group.metrics.finished_time = time
        if group.prompt_list is None:
            group.prompt_list = group.prompt_token_ids.tolist()
        # A silent delta group emits once: then what is new is new for all.
        chosen = changed if group.mode == "delta" and not group.silent else group.completions
        outputs = [c.output() for c in chosen]
        output = RequestOutput(
            group.request_id,
            group.prompt,
            group.prompt_list,
            outputs,
            left == 0,
            group.metrics,
            group.take_prompt_logprobs(),
            group.weight_version,
            group.first_weight_version,
        )
        if left == 0:
            group.completions = []  # they refer back to the group
        try:
            group.on_output(output)
        except Exception as error:
            self._break(group, error, "on_output")
        else:
            if left == 0:
                self._forget(group)

    def _break(self, group: RequestGroup, error: Exception, what: str) -> None:
        """Ends one group for a fault of its own; the others must not notice."""
        logger.error("request %r is ended: %s raised", group.request_id, what, exc_info=error)
        was_open, ids = self._forget(group)
        for id in ids:
            self._on_stop(id)
        if was_open:
            self._report(group, error)

    @staticmethod
    def _report(group: RequestGroup, error: BaseException) -> None:
        try:
            group.on_error(error)
        except Exception:
            logger.exception("request %r: on_error raised", group.request_id)


def accumulate(total: RequestOutput, delta: RequestOutput) -> None:
    """Adds an output of mode "delta" to the sum of those before it, in place.

    Also merges deltas that a slow consumer has not taken yet into one.
    """
    by_index = {c.index: c for c in total.outputs}
    for new in delta.outputs:
        old = by_index.get(new.index)
        if old is None:
            total.outputs.append(new)
            continue
        old.text += new.text
        old.token_ids.extend(new.token_ids)
        old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
        if new.logprobs is not None:
            old.logprobs = [*(old.logprobs or ()), *new.logprobs]
        old.cumulative_logprob = new.cumulative_logprob
    total.outputs.sort(key=lambda c: c.index)
    total.prompt_logprobs = total.prompt_logprobs or delta.prompt_logprobs
    total.weight_version = delta.weight_version
    total.first_weight_version = min(total.first_weight_version, delta.first_weight_version)
    total.finished, total.metrics = delta.finished, delta.metrics
