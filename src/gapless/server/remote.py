"""An engine in another process, as its client sees it, and the socket to it.

One thread, that of the event loop, does all of this. What a turn of the event loop brings for the engine goes to it as
one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from gapless.config import EngineConfig
from gapless.engine.request_client import RequestClient
from gapless.engine.stats import EngineStats
from gapless.engine.submission import Submission
from gapless.errors import EngineClosedError, EngineDeadError, RequestError, shorter
from gapless.request.outputs import FinishReason
from gapless.request.request import LoraRef, Request
from gapless.request.sampling_params import SamplingParams
from gapless.scheduler.stats import SchedulerStats
from gapless.server.wire import (
    Act,
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
from gapless.text.outputs import RequestGroup

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
    """An `EngineService` in another process. On the event loop's thread only.

    Args:
        connection: to an engine that has said that it is ready.
        ready: what it said.
        has_tokenizer: grammars can be made, over there.

    Attributes:
        counters: as of the latest message.
        error: what ended the engine.
    """

    embeds_width, dtype = 0, None

    def __init__(self, connection: Connection, ready: Ready, *, has_tokenizer: bool) -> None:
        self.vocab_size, self.eos_token_ids, self.longest = ready.vocab_size, tuple(ready.eos_token_ids), ready.longest
        self.counters = EngineStats(), SchedulerStats()
        self.error: BaseException | None = None
        self.closed = False
        self._connection, self._has_tokenizer = connection, has_tokenizer
        self._adapters = {ref.name: ref for ref in ready.adapters}  # what was loaded at the start stays
        self._loop = asyncio.get_running_loop()
        self._requests: list[msgspec.Raw] = []
        self._finish: list[tuple[int, FinishReason]] = []
        self._due = False

    def raise_if_dead(self) -> None:
        """As `Engine.raise_if_dead`."""
        if self.error is not None:
            raise EngineDeadError(str(self.error)) from self.error
        if self.closed:
            raise EngineClosedError("the engine is closed")

    def refuse_what_never_fits(self, prompt_len: int, max_tokens: int) -> None:
        """As `Scheduler.refuse_what_never_fits`."""
        longest = self.longest
        if prompt_len + max_tokens > longest:
            raise RequestError(
                f"the prompt has {prompt_len} tokens and max_tokens is {max_tokens}, together "
                f"{prompt_len + max_tokens}; at most {longest} fit. {shorter(prompt_len, max_tokens, longest)}"
            )

    def submit(self, requests: list[Request]) -> None:
        """With the next message."""
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

    def stats(self) -> tuple[EngineStats, SchedulerStats]:
        """As of the latest message."""
        return self.counters

    @contextlib.contextmanager
    def locked(self, loras: Sequence[str | None]) -> Iterator[list[LoraRef | None]]:
        """The adapters of these names."""
        yield [None if name is None else self._adapters.get(name) for name in loras]

    def refuse_unknown_lora(self, name: object) -> None:
        """As `LoadedAdapters.refuse_unknown`."""
        if name not in self._adapters:
            raise RequestError(f"lora={name!r}: no adapter of this name is loaded")

    def compile(self, params: SamplingParams) -> None:
        """Later, over there, where they are used."""
        if not self._has_tokenizer:
            raise RequestError("structured_outputs needs a tokenizer, and there is none")

    def grammars(self, params: SamplingParams, stop_token_ids: tuple[int, ...], count: int) -> list[None]:
        """None yet."""
        self.compile(params)
        return [None] * count


class RemoteClient(RequestClient):
    """`RequestClient` before an engine in another process; all of it runs on the event loop's thread, `take` included.

    Args:
        connection, ready: see `RemoteEngine`.
        tokenizer: an object, or None.
    """

    def __init__(self, connection: Connection, ready: Ready, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.engine = RemoteEngine(connection, ready, has_tokenizer=tokenizer is not None)
        self._serve(self.engine, EngineConfig.from_dict(ready.options), ready.sampling_defaults)

    def submit(self, submissions: Sequence[Submission]) -> list[RequestGroup]:
        """See `RequestClient.submit`."""
        for submission in submissions:
            refuse_what_cannot_travel(submission.params)  # now: nothing of it has been registered yet
        return super().submit(submissions)

    def take(self, step: Step) -> None:
        """What a step brought: outputs to tickets, counters."""
        self.engine.counters = step.engine, step.scheduler
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
