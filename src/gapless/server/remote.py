"""An engine in another process, as `EngineClient` sees one: its socket, and stand-ins for what is over there.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from gapless.config import EngineConfig
from gapless.engine.client import EngineClient, Submission
from gapless.engine.stats import EngineStats
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

if TYPE_CHECKING:
    from gapless.engine.assemble import Progress

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
                f"{prompt_len + max_tokens}; at most {longest} fit. {shorter(prompt_len, max_tokens, longest)}"
            )

    def snapshot(self) -> SchedulerStats:
        """As of the latest message."""
        return self.stats


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """What `EngineClient` asks of a model."""

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
    def locked(self, names: Sequence[str | None]) -> Iterator[list[LoraRef | None]]:
        """The adapters of these names."""
        yield [None if name is None else self._adapters.get(name) for name in names]

    def refuse_unknown(self, name: object) -> None:
        """Raise `RequestError` for a name that is not loaded."""
        if name not in self._adapters:
            raise RequestError(f"lora={name!r}: no adapter of this name is loaded")


@dataclass(slots=True)
class RemoteBuilt:
    """In the place of `Built`."""

    engine: RemoteEngine
    scheduler: RemoteScheduler
    model: RemoteModel
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

    def _sampling_defaults(self, model: Any, config: EngineConfig) -> dict[str, float]:
        return dict(self._ready.sampling_defaults)

    def _build(self, model: Any, config: EngineConfig, progress: Progress) -> RemoteBuilt:  # type: ignore[override]
        ready = self._ready
        self._remote = RemoteBuilt(
            RemoteEngine(self._connection),
            RemoteScheduler(ready.longest),
            RemoteModel(ready.vocab_size, tuple(ready.eos_token_ids)),
            config,
        )
        return self._remote

    def _grammars(self) -> RemoteGrammars:  # type: ignore[override]
        if self.tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer, and there is none")
        return RemoteGrammars()

    def _requests(self, submission: Submission, lora: LoraRef | None) -> list[Request]:
        refuse_what_cannot_travel(submission.params)  # now: nothing of it has been registered yet
        return super()._requests(submission, lora)

    def _start(self) -> None:
        """There is no thread: `take` is called instead."""
        self.adapters = RemoteAdapters(self._ready.adapters)  # type: ignore[assignment]

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
