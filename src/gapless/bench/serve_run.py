"""Send requests to a server at their times, and note when each token came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gapless.bench.serve_http import EventReader, HttpClient, HttpError
from gapless.bench.serve_load import Ask

_encoder = msgspec.json.Encoder()


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class Record:
    """What became of one request. Times are in seconds.

    Attributes:
        start: when it was sent, by `time.perf_counter`.
        lag: how much later that was than planned, through no fault of the server.
        prompt_len, output_len: tokens, as the server counted them if it did.
        ttft: from its start to its first token.
        itls: between two chunks with tokens.
        latency: from its start to its last token.
        error: why it failed; empty if it did not.
    """

    start: float = 0.0
    lag: float = 0.0
    prompt_len: int = 0
    output_len: int = 0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None


@dataclass(frozen=True, slots=True)
class Target:
    """What every request has in common.

    Attributes:
        path: of the endpoint.
        chat: its form is that of chats.
        model: name to ask for.
        extra: more fields of the body.
    """

    path: str
    chat: bool
    model: str
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self, ask: Ask) -> bytes:
        """The request's JSON."""
        fields: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            fields["messages"] = [{"role": "user", "content": ask.prompt}]
            fields["max_completion_tokens"] = ask.output_len
        else:
            fields["prompt"] = ask.prompt
            fields["max_tokens"] = ask.output_len
        return _encoder.encode({**fields, **self.extra})


class _Stream:
    """Reads one answer."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.done = False
        self.chunks = 0
        self.usage: _Usage | None = None
        self._reader = EventReader()
        self._texts: list[str] = []
        self._last = 0.0

    def take(self, piece: bytes, now: float) -> None:
        """Called with what has come."""
        for data in self._reader.feed(piece):
            if data == b"[DONE]":
                self.done = True
                continue
            try:
                chunk = _decoder.decode(data)
            except msgspec.DecodeError as error:
                raise HttpError(f"an event is not what was expected: {error}") from error
            if chunk.error is not None:
                message = chunk.error.get("message") if isinstance(chunk.error, dict) else chunk.error
                raise HttpError(f"the server gave up: {message}")
            self.usage = chunk.usage or self.usage
            for choice in chunk.choices:
                if self._has_token(choice):
                    self._token(now)

    def _has_token(self, choice: _Choice) -> bool:
        """Text, or a token without any: but an opening chunk has only a role, and a closing one a reason."""
        delta = choice.delta
        text = choice.text if delta is None else delta.content
        thought = None if delta is None else delta.reasoning_content
        self._texts += [t for t in (thought, text) if t]
        if text or thought or (delta is not None and delta.tool_calls):
            return True
        opening = delta is not None and delta.role is not None
        return text is not None and not opening and choice.finish_reason is None

    def _token(self, now: float) -> None:
        record = self.record
        if not self.chunks:
            record.ttft = now - record.start
        else:
            record.itls.append(now - self._last)
        self.chunks += 1
        self._last = now
        record.latency = now - record.start

    def end(self) -> None:
        """All has come."""
        record = self.record
        record.text = "".join(self._texts)
        record.output_len = self.chunks
        if self.usage is not None:
            record.prompt_len = self.usage.prompt_tokens or record.prompt_len
            record.output_len = self.usage.completion_tokens or self.chunks
        if not self.chunks:
            record.error = "the server sent no token"
        elif not self.done:
            record.error = "the stream ended without [DONE]"


async def send(client: HttpClient, target: Target, ask: Ask, planned: float | None = None, label: str = "") -> Record:
    """One request; whatever fails is in the record."""
    body = target.body(ask)
    record = Record(prompt_len=ask.prompt_len)
    stream = _Stream(record)
    record.start = time.perf_counter()
    record.lag = max(record.start - planned, 0.0) if planned is not None else 0.0
    try:
        answer = await client.post(target.path, body, stream.take, label)
    except TimeoutError:
        record.error = "timed out"
    except OSError as error:
        record.error = str(error) or repr(error)
    else:
        if answer.status >= 300:
            text = answer.body[:500].decode("utf-8", "replace")
            record.error = f"HTTP {answer.status}: {text}"
        else:
            stream.end()
    return record


async def run(
    client: HttpClient,
    target: Target,
    asks: Sequence[Ask],
    at: Sequence[float],
    max_concurrency: int | None,
    label: str,
    on_end: Callable[[Record], None] = lambda record: None,
) -> tuple[list[Record], float]:
    """All requests, each at its time whatever became of those before it (an open loop).

    Args:
        at: seconds after the start at which each is sent.
        max_concurrency: no more are open at once; a request that waits for that starts later, and its times count from
            then.

    Returns:
        The records, in the order of ``asks``, and the seconds that it all took.
    """
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    begin = time.perf_counter()

    async def one(i: int, ask: Ask, planned: float) -> Record:
        if gate is None:
            record = await send(client, target, ask, planned, f"{label}-{i}")
        else:
            async with gate:
                record = await send(client, target, ask, None, f"{label}-{i}")
        on_end(record)
        return record

    tasks = []
    try:
        for i, (ask, offset) in enumerate(zip(asks, at, strict=True)):
            wait = begin + offset - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(i, ask, begin + offset)))
        records = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return records, time.perf_counter() - begin
