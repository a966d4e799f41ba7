"""The front end's side of the engine: a client whose engine runs in another process, and tickets for its outputs.

One thread, that of the event loop, does all of this: bytes of the socket become step messages, `OutputProcessor` makes
texts of them, and tickets hand them to the tasks of their HTTP requests. Nothing crosses a thread for a token. A task
that is slower than the engine gets several steps' tokens at once.

What a turn of the event loop brings for the engine goes to it as one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from gapless.client import EngineClient, Submission
from gapless.config import EngineConfig
from gapless.engine import EngineStats
from gapless.errors import EngineClosedError, EngineDeadError, RequestError
from gapless.request import FinishReason, LoraRef, Request, RequestOutput, SamplingParams
from gapless.scheduler import SchedulerStats
from gapless.server import errors
from gapless.server.wire import (
    Act,
    Acted,
    Commands,
    Frames,
    Ready,
    Refused,
    Setup,
    Step,
    Stop,
    ToFrontEnd,
    encode,
    encode_request,
    refuse_what_cannot_travel,
    to_front_end,
)
from gapless.text.chat import EncodedPrompt
from gapless.text.outputs import OutputMode, RequestGroup, accumulate

if TYPE_CHECKING:
    from gapless.build import Progress

logger = logging.getLogger("gapless.server")


class Connection(asyncio.Protocol):
    """The socket to the engine's process.

    Args:
        on_message: called with each message, in order.
        on_lost: called once, with the reason, when nothing more can come.
    """

    def __init__(self, on_message: Callable[[ToFrontEnd], None], on_lost: Callable[[str], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._lost = False
        self.heard = time.monotonic()

    @classmethod
    async def open(
        cls, end: socket.socket, on_message: Callable[[ToFrontEnd], None], on_lost: Callable[[str], None]
    ) -> Connection:
        """Take over one end of a socket pair."""
        end.setblocking(False)
        _, protocol = await asyncio.get_running_loop().create_connection(lambda: cls(on_message, on_lost), sock=end)
        return protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self.heard = time.monotonic()
        try:
            for body in self._frames.feed(data):
                self._on_message(to_front_end.decode(body))
        except Exception as error:
            logger.exception("a message of the engine could not be handled")
            self._end(f"a message of the engine could not be handled: {error!r}")

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self._end("the engine's process ended" if error is None else f"the engine's process cannot be read: {error}")

    def _end(self, reason: str) -> None:
        if not self._lost:
            self._lost = True
            self.close()
            self._on_lost(reason)

    def send(self, message: Setup | Commands | Act | Stop) -> None:
        """Write one message; dropped when the connection is gone, which `on_lost` has said."""
        if self._transport is not None and not self._lost:
            self._transport.write(encode(message))

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()


class RemoteEngine:
    """What `EngineClient` asks of an engine, sent to another process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._requests: list[msgspec.Raw] = []
        self._finish: list[tuple[int, FinishReason]] = []
        self._due = False
        self.error: BaseException | None = None
        self.closed = False
        self.stats = EngineStats()

    def start(self) -> None:
        """It runs already."""

    def raise_if_dead(self) -> None:
        """As `Engine.raise_if_dead`."""
        if self.error is not None:
            raise EngineDeadError(str(self.error)) from self.error
        if self.closed:
            raise EngineClosedError("the engine is closed")

    def submit(self, requests: list[Request]) -> None:
        """With the next message. On the event loop's thread only, as all of this class."""
        self.raise_if_dead()
        self._requests += map(encode_request, requests)
        self._flush_soon()

    def finish(self, request_id: int, reason: FinishReason) -> None:
        """With the next message."""
        self._finish.append((request_id, reason))
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._due = False
        message = Commands.of(self._requests, self._finish)
        self._requests, self._finish = [], []
        self._connection.send(message)


class RemoteScheduler:
    """What `EngineClient` asks of a scheduler."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.stats = SchedulerStats()

    def refuse_what_never_fits(self, prompt_len: int, max_tokens: int) -> None:
        """As `Scheduler.refuse_what_never_fits`."""
        longest = self.longest
        if prompt_len + max_tokens > longest:
            raise RequestError(
                f"the prompt has {prompt_len} tokens and max_tokens is {max_tokens}, together "
                f"{prompt_len + max_tokens}; at most {longest} fit. Shorten the prompt or lower max_tokens to "
                f"{max(longest - prompt_len, 0)} or less"
            )

    def snapshot(self) -> SchedulerStats:
        """As of the latest message."""
        return self.stats


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """What `EngineClient` asks of a model."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class RemoteGrammars:
    """In the place of a `GrammarCompiler`: grammars are compiled where they are used."""

    def compile(self, params: SamplingParams) -> None:
        """Later, over there."""

    def grammars(self, params: SamplingParams, stop_token_ids: Sequence[int], count: int) -> list[None]:
        """None yet."""
        return [None] * count


class RemoteAdapters:
    """In the place of `LoadedAdapters`: what was loaded at the start stays."""

    def __init__(self, adapters: Sequence[LoraRef]) -> None:
        self._adapters = {ref.name: ref for ref in adapters}

    @contextlib.contextmanager
    def held(self, names: Sequence[str | None]) -> Iterator[list[LoraRef | None]]:
        """The adapters of these names."""
        yield [None if name is None else self._adapters.get(name) for name in names]

    def refuse_unknown(self, name: object) -> None:
        """Raise `RequestError` for a name that is not loaded."""
        if name not in self._adapters:
            raise RequestError(f"lora={name!r}: no adapter of this name is loaded")


@dataclass(frozen=True, slots=True)
class Terms:
    """How a request is queued and cached, and with which adapter it runs; see `Submission`."""

    priority: int = 0
    cache_salt: str | None = None
    lora: str | None = None


PLAIN = Terms()


@dataclass(slots=True)
class RemoteBuilt:
    """In the place of `Built`."""

    engine: RemoteEngine
    scheduler: RemoteScheduler
    model: RemoteModel | None
    config: EngineConfig


class RemoteClient(EngineClient):
    """`EngineClient` before an engine in another process; all of it runs on the event loop's thread.

    Args:
        connection: to an engine that has said that it is ready.
        ready: what it said.
        tokenizer: an object, or None.
    """

    def __init__(self, connection: Connection, ready: Ready, tokenizer: Any) -> None:
        self._connection = connection
        self._ready = ready
        super().__init__(None, EngineConfig.from_dict(ready.options), tokenizer)

    def _build(self, model: Any, config: EngineConfig, progress: Progress) -> RemoteBuilt:  # type: ignore[override]
        ready = self._ready
        self._remote = RemoteBuilt(
            RemoteEngine(self._connection),
            RemoteScheduler(ready.longest),
            RemoteModel(ready.model_name, ready.vocab_size, tuple(ready.eos_token_ids)),
            config,
        )
        return self._remote

    def _adapters(self, built: Any) -> RemoteAdapters:  # type: ignore[override]
        return RemoteAdapters(self._ready.adapters)

    def _grammars(self) -> RemoteGrammars:  # type: ignore[override]
        if self.tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer, and there is none")
        return RemoteGrammars()

    def _requests(self, submission: Submission, lora: LoraRef | None) -> list[Request]:
        refuse_what_cannot_travel(submission.params)  # now: nothing of it has been registered yet
        return super()._requests(submission, lora)

    def _start(self) -> None:
        """There is no thread: `take` is called instead."""

    @property
    def engine(self) -> RemoteEngine:
        """The stand-in."""
        return self._remote.engine

    def take(self, step: Step) -> None:
        """What a step brought: outputs to tickets, counters."""
        self._remote.engine.stats = step.engine
        self._remote.scheduler.stats = step.scheduler
        if step.message is not None:
            self._outputs.process(step.message)

    def fail(self, error: BaseException) -> None:
        """The engine is gone: every open request gets ``error``."""
        self.engine.error = self.engine.error or error
        self._outputs.fail(error)

    def refuse(self, message: Refused) -> None:
        """The engine's process did not take a request."""
        self._outputs.refuse(message.id, RequestError(message.message))

    def close(self) -> None:
        """Open requests fail with `EngineClosedError`."""
        self.engine.closed = True
        self._outputs.fail(EngineClosedError("the server was stopped before this request ended"))


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
        self.sequences = sequences
        self.prompt_tokens = prompt_tokens
        self.groups: list[RequestGroup] = []
        self.generated: dict[int, dict[int, int]] = {}  # new tokens by prompt, of each of its completions
        self.reasons: list[str] = []  # of the completions that have ended
        self.started = False
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
        if not self._is_due:
            self._is_due = True
            self._due.append(self)
        return True

    def _put(self, index: int, output: RequestOutput) -> None:
        if self._closed:
            return
        before = self._outputs.get(index)
        if before is None:
            self._outputs[index] = output
        else:
            accumulate(before, output)
        new, generated = 0, self.generated.get(index)
        if generated is None:
            generated = self.generated[index] = {}
        for c in output.outputs:
            new += len(c.token_ids)
            generated[c.index] = generated.get(c.index, 0) + len(c.token_ids)
            if c.finish_reason is not None:
                self.reasons.append(c.finish_reason)
        self._pending += new
        wake = output.finished or not self.started or self._pending >= self._interval
        self.started = True
        if output.finished:
            self._open -= 1
        elif self._pending > self._buffer_tokens:
            self.cut("slow reader")
        if not wake or self._woken:
            return
        if self.sink is None or output.finished:
            self._wake()
        elif not self._is_due:  # once a step, however many of its prompts got something
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
    def done(self) -> bool:
        """Every prompt has had its last output, taken or not."""
        return self._open == 0

    @property
    def exhausted(self) -> bool:
        """Every prompt's last output has been taken."""
        return self._open == 0 and not self._outputs and self._error is None

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


class FrontEnd:
    """Tickets in, step messages to outputs, and what is known of the engine's state.

    Args:
        max_queued_requests, max_queued_tokens, buffer_tokens: see `ServerOptions`.
        on_step: called with each step, after its outputs were handed on.
        on_closed: called with each ticket that ends.
    """

    def __init__(
        self,
        connection: Connection,
        ready: Ready,
        tokenizer: Any,
        *,
        max_queued_requests: int,
        max_queued_tokens: int | None,
        buffer_tokens: int,
        on_step: Callable[[Step], None] = lambda step: None,
        on_closed: Callable[[Ticket], None] = lambda ticket: None,
    ) -> None:
        self.client = RemoteClient(connection, ready, tokenizer)
        self.ready = ready
        self.tickets: set[Ticket] = set()
        self.rejected: dict[str, int] = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
        self._connection = connection
        self._max_queued_requests = max_queued_requests
        self._max_queued_tokens = max_queued_tokens
        self._buffer_tokens = buffer_tokens
        self._on_step = on_step
        self._on_closed = on_closed
        self._due: list[Ticket] = []
        self.sequences = 0  # that were taken and have not ended
        self.paused = False
        self.sleep_level = 0
        self._acts: dict[int, asyncio.Future[None]] = {}
        self._act_numbers = itertools.count()
        self._steps = -1
        self.progressed = time.monotonic()

    def submit(
        self,
        prompts: Sequence[EncodedPrompt],
        params: Sequence[SamplingParams],
        mode: OutputMode,
        label: str,
        interval: int = 1,
        terms: Terms = PLAIN,
    ) -> Ticket:
        """Hand prompts to the engine, all or none.

        Raises:
            ApiError: 503, there is no room in the queue.
            RequestError: one of them cannot be served.
            EngineDeadError: the engine is gone.
        """
        sequences = sum(p.n for p in params)
        tokens = sum(len(p.token_ids) for p in prompts)
        self._admit(sequences, tokens)
        ticket = Ticket(sequences, tokens, self._buffer_tokens * sequences, interval, self._close, self._due)
        ticket.lora = terms.lora
        ticket.groups = self.client.submit(
            [
                ticket.submission(i, prompt, own, mode, label, terms)
                for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))
            ]
        )
        if not self.tickets:
            self.progressed = time.monotonic()
        self.tickets.add(ticket)
        self.sequences += sequences
        return ticket

    def _admit(self, sequences: int, tokens: int) -> None:
        running = self.client.config.max_num_seqs
        room = running + self._max_queued_requests
        if sequences > room:
            raise errors.bad_request(
                f"the request asks for {sequences} completions at once; this server takes at most {room}", "n"
            )
        if self.sequences + sequences > room:
            self.rejected["max_num_queued_reqs"] += 1
            raise errors.unavailable(f"The queue is full: {self._max_queued_requests} requests wait already.")
        if self._max_queued_tokens is not None:
            waiting = sum(t.prompt_tokens for t in self.tickets if not t.started)
            if waiting and waiting + tokens > self._max_queued_tokens:
                self.rejected["max_num_queued_tokens"] += 1
                raise errors.unavailable(f"The queue is full: prompts of {waiting} tokens wait already.")

    def _close(self, ticket: Ticket) -> None:
        if ticket in self.tickets:
            self.tickets.remove(ticket)
            self.sequences -= ticket.sequences
        if not ticket.done:
            for group in ticket.groups:
                self.client.abort_group(group)
        self._on_closed(ticket)

    def take(self, step: Step) -> None:
        """A message of the engine."""
        if step.engine.steps != self._steps:
            self._steps = step.engine.steps
            self.progressed = time.monotonic()
        self.client.take(step)
        for ticket in self._due:
            ticket.pump()
        self._due.clear()
        self._on_step(step)

    def fail(self, reason: str) -> None:
        """The engine is gone."""
        self.client.fail(EngineDeadError(reason))
        for done in self._acts.values():
            if not done.done():
                done.set_exception(errors.engine_failed(f"The engine has stopped: {reason}"))

    async def act(self, action: str, argument: str = "") -> None:
        """Have the engine do what `gapless.server.actions.perform` says.

        Raises:
            ApiError: it cannot, or has ended.
        """
        if self.client.engine.error is not None:
            raise errors.engine_failed(f"The engine has stopped: {self.client.engine.error}")
        number = next(self._act_numbers)
        done = self._acts[number] = asyncio.get_running_loop().create_future()
        self._connection.send(Act(number, action, argument))
        try:
            await done
        finally:
            del self._acts[number]
        if action in ("pause", "resume"):
            self.paused = action == "pause"
        elif action in ("sleep", "wake"):
            self.sleep_level = max(self.sleep_level, int(argument)) if action == "sleep" else 0
        self.progressed = time.monotonic()

    def acted(self, message: Acted) -> None:
        """The engine's answer to `act`."""
        done = self._acts.get(message.number)
        if done is None or done.done():
            return
        if message.error is None:
            done.set_result(None)
        else:
            done.set_exception(errors.bad_request(message.error))

    def stalled(self) -> float:
        """Seconds without progress of an engine that has work, or without any word of its process."""
        now = time.monotonic()
        silent = now - self._connection.heard
        held = self.paused or self.sleep_level > 0
        working = self.client.engine.stats.in_flight or (self.sequences and not held)
        return max(silent, now - self.progressed if working else 0.0)

    def cut_slow_readers(self, seconds: float) -> None:
        """End the requests whose clients have taken nothing for so long; call it now and then."""
        limit = time.monotonic() - seconds
        for ticket in list(self.tickets):
            if ticket.sending_since is not None and ticket.sending_since < limit:
                ticket.cut("slow reader")

    def stop(self) -> None:
        """Ask the engine's process to end."""
        self.client.close()
        self._connection.send(Stop())
