"""What came of one HTTP request's prompts, on its way to the client: straight to the socket, or through its task.

All on the event loop's thread. A task that is slower than the engine gets several steps' tokens at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gapless.engine.submission import Submission
from gapless.errors import EngineClosedError, EngineDeadError, RequestError
from gapless.request.outputs import RequestOutput
from gapless.request.sampling_params import SamplingParams
from gapless.server import errors
from gapless.text.chat import EncodedPrompt
from gapless.text.outputs import OutputMode, RequestGroup, accumulate

logger = logging.getLogger("gapless.server")


@dataclass(frozen=True, slots=True)
class Terms:
    """How a request is queued and cached, and with which adapter it runs; see `Submission`."""

    priority: int = 0
    cache_salt: str | None = None
    lora: str | None = None


PLAIN = Terms()


class SlowReaderError(RuntimeError):
    """A client does not take what it asked for."""


class Writer(Protocol):
    """Writes to a client without waiting."""

    @property
    def ready(self) -> bool:
        """False while the client is slow, and once it is gone."""

    def write(self, body: bytes, /) -> None:
        """A piece of the answer's body; only if `ready`, and never an empty one."""


@dataclass(frozen=True, slots=True)
class Sink:
    """Where outputs go without their task, in the turn of the event loop that brought them.

    Attributes:
        make: bytes of outputs.
        make_text: bytes of one completion's new text: of a prompt, the completion's index, the text, its tokens. None
            if only an output will do.
        writer: of the client's connection.
    """

    make: Callable[[dict[int, RequestOutput]], bytes]
    make_text: Callable[[int, int, str, int], bytes | None]
    writer: Writer


class Ticket:
    """The outputs of the prompts of one HTTP request, for one task.

    Args:
        sequences: that it runs, all ``n`` of all prompts.
        prompt_tokens: of all prompts.
        buffer_tokens: more tokens than these may not wait for the task.
        interval: tokens that a piece has at least, but for the first and the last.
        on_close: called once.
        due: where it notes that `pump` is to be called at the end of the step.
    """

    def __init__(
        self,
        sequences: int,
        prompt_tokens: int,
        buffer_tokens: int,
        interval: int,
        on_close: Callable[[Ticket], None],
        due: list[Ticket],
    ) -> None:
        self.since = time.monotonic()
        self.sequences = sequences
        self.prompt_tokens = prompt_tokens
        self.groups: list[RequestGroup] = []
        self.generated: dict[int, dict[int, int]] = {}  # new tokens by prompt, of each of its completions
        self.reasons: list[str] = []  # of the completions that have ended
        self.lora: str | None = None
        self.sending_since: float | None = None
        self.end_reason: str | None = None
        self.task: asyncio.Task[None] | None = None  # that sends a stream
        self.sink: Sink | None = None  # while the task has nothing to send
        self._due = due
        self._is_due = False
        self._written = 0.0  # when the sink got something
        self._buffer_tokens = buffer_tokens
        self._interval = interval
        self._on_close = on_close
        self._ready = asyncio.Event()
        self._woken = False  # the same, asked more often
        self._outputs: dict[int, RequestOutput] = {}
        self._events: list[bytes] = []  # of this step, for the sink
        self._pending = 0
        self._open = 0
        self._error: BaseException | None = None
        self._closed = False

    def submission(
        self,
        index: int,
        prompt: EncodedPrompt,
        params: SamplingParams,
        mode: OutputMode,
        label: str,
        terms: Terms,
    ) -> Submission:
        """Prompt ``index`` of this ticket."""
        self._open += 1
        return Submission(
            prompt,
            params,
            lambda output: self._put(index, output),
            self.fail,
            mode,
            label,
            terms.priority,
            terms.cache_salt,
            terms.lora,
            partial(self._put_text, index) if self._interval == 1 else None,
        )

    def _put_text(self, index: int, number: int, text: str, tokens: int) -> bool:
        """The short way of most tokens: no output is made, and no task wakes; see `RequestGroup.on_text`."""
        sink = self.sink
        if self._closed:
            return True
        if sink is None or self._woken or not sink.writer.ready:
            return False
        event = sink.make_text(index, number, text, tokens)
        if event is None:
            return False
        self._events.append(event)
        self.generated[index][number] += tokens
        self._note()
        return True

    def _put(self, index: int, output: RequestOutput) -> None:
        if self._closed:
            return
        before = self._outputs.get(index)
        if before is None:
            self._outputs[index] = output
        else:
            accumulate(before, output)
        first = not self.started
        new, generated = 0, self.generated.get(index)
        if generated is None:
            generated = self.generated[index] = {}
        for c in output.outputs:
            new += len(c.token_ids)
            generated[c.index] = generated.get(c.index, 0) + len(c.token_ids)
            if c.finish_reason is not None:
                self.reasons.append(c.finish_reason)
        self._pending += new
        wake = output.finished or first or self._pending >= self._interval
        if output.finished:
            self._open -= 1
        elif self._pending > self._buffer_tokens:
            self.cut("slow reader")
        if not wake or self._woken:
            return
        if self.sink is None or output.finished:
            self._wake()
        else:
            self._note()

    def _note(self) -> None:
        """Have `pump` called: once a step, however many of its prompts got something."""
        if not self._is_due:
            self._is_due = True
            self._due.append(self)

    def pump(self) -> None:
        """Write what has come, or wake the task for it. At the end of a step that this ticket is due for."""
        self._is_due = False
        events, self._events = self._events, []
        sink = self.sink
        if self._closed or sink is None:
            self._wake()
            return
        try:
            if self._outputs and not self._woken:
                if sink.writer.ready:
                    outputs, self._outputs, self._pending = self._outputs, {}, 0
                    self._written = time.monotonic()
                    events.append(sink.make(outputs))
                else:
                    self._wake()
            if body := events[0] if len(events) == 1 else b"".join(events):
                self._written = time.monotonic()
                sink.writer.write(body)
        except Exception as error:
            self.fail(error)

    def _wake(self) -> None:
        """Have the task take what has come."""
        if not self._woken:
            self._woken = True
            self._ready.set()

    def fail(self, error: BaseException) -> None:
        """The task gets ``error`` instead of more outputs."""
        self._error = self._error or error
        self._wake()

    def cut(self, reason: str) -> None:
        """End the request because of its client, whatever its task is waiting for."""
        self.end_reason = self.end_reason or reason
        if self.task is not None:
            self.task.cancel()
        else:
            self.fail(SlowReaderError(reason))
        self.close()

    async def next(self, timeout: float | None = None) -> dict[int, RequestOutput]:
        """What has come since the last call, by prompt; nothing after ``timeout`` seconds without anything.

        Raises:
            ApiError: the request was ended.
        """
        left = timeout
        while not self._woken:
            try:
                async with asyncio.timeout(left):
                    await self._ready.wait()
            except TimeoutError:
                left = self._written + (timeout or 0.0) - time.monotonic()
                if left <= 0:
                    return {}
        self._woken = False
        self._ready.clear()
        if self._error is not None:
            raise answer_of(self._error) from self._error
        outputs, self._outputs, self._pending = self._outputs, {}, 0
        return outputs

    async def all(self) -> list[RequestOutput]:
        """The final output of each prompt; for tickets of mode "final"."""
        found: dict[int, RequestOutput] = {}
        while len(found) < len(self.groups):
            found.update({i: o for i, o in (await self.next()).items() if o.finished})
        return [found[i] for i in range(len(self.groups))]

    @property
    def started(self) -> bool:
        """Some prompt has had an output."""
        return bool(self.generated)

    @property
    def done(self) -> bool:
        """Every prompt has had its last output, taken or not."""
        return self._open == 0

    @property
    def exhausted(self) -> bool:
        """Every prompt's last output has been taken."""
        return self.done and not self._outputs and self._error is None

    def close(self) -> None:
        """Release everything; what still runs is aborted. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._on_close(self)


def answer_of(error: BaseException) -> errors.ApiError:
    """What a client is told of it."""
    if isinstance(error, errors.ApiError):
        return error
    if isinstance(error, EngineClosedError):
        return errors.draining()
    if isinstance(error, EngineDeadError):
        return errors.engine_failed(f"The engine has stopped: {error}")
    if isinstance(error, RequestError):
        return errors.of_request_error(error)
    if isinstance(error, SlowReaderError):
        return errors.ApiError(408, "The client took nothing of its stream for too long.", type="timeout_error")
    logger.error("a request failed", exc_info=error)
    return errors.engine_failed("This request failed on the server; its log says why.", retry=False)
