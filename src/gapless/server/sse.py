"""Server-sent events as clients of OpenAI's interface read them, and the answer that sends them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from gapless.request.outputs import RequestOutput
from gapless.server.errors import ApiError, engine_failed, event
from gapless.server.ticket import Sink, Ticket, Writer

logger = logging.getLogger("gapless.server")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode


def data(value: Any) -> bytes:
    """One event."""
    return b"data: " + _encode(value) + b"\n\n"


_MARK = "(the text)"


class PlainEvent:
    """Writes events that differ in one text only, without encoding the rest of them again.

    Args:
        example: makes the event for a text. What else it says, such as the model's name, comes before the text.
    """

    __slots__ = ("_head", "_tail")

    def __init__(self, example: Callable[[str], Any]) -> None:
        self._head, _, self._tail = data(example(_MARK)).rpartition(_encode(_MARK))

    def data(self, text: str) -> bytes:
        """The same as `data` of the example."""
        return self._head + _encode(text) + self._tail


async def disconnected(receive: Receive) -> None:
    """Returns when the client is gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(Protocol):
    """Makes the events of one answer."""

    def take(self, outputs: dict[int, RequestOutput], /) -> bytes:
        """Those for what is new, by prompt. Raises `ApiError` for what has failed."""

    def text(self, prompt: int, index: int, text: str, tokens: int, /) -> bytes | None:
        """Those for what is new of one completion, if its text is all that they say; else None, and it is for `take`.

        ``tokens``: how many are new.
        """

    def finish(self) -> bytes:
        """Those after the last token."""


class EventStream:
    """An answer of events. It starts with the first event, so that what fails before has a status of its own.

    The first and the last events, and those for a client that is slow, go through ASGI's ``send``. All others are made
    and written within the step that brought their tokens (`Ticket.sink`): a task's turn for each token would cost as
    much as all the rest.

    Args:
        events: makes them.
        ticket: closed at the end, whatever the end is.
        keep_alive: seconds without an event after which there is a comment; None for never.
        done: the last event, which also follows an error.
        error_event: makes an event of an error.
    """

    def __init__(
        self,
        events: Events,
        ticket: Ticket,
        keep_alive: float | None = None,
        *,
        done: bytes = DONE,
        error_event: Callable[[ApiError], bytes] = event,
    ) -> None:
        self._events = events
        self._ticket = ticket
        self._keep_alive = keep_alive
        self._done = done
        self._error_event = error_event
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client is gone."""
        ticket = self._ticket
        task = ticket.task = asyncio.current_task()
        watcher = asyncio.create_task(disconnected(receive))

        def gone(watched: asyncio.Task[None]) -> None:
            if not watched.cancelled() and not ended and task is not None:
                ticket.end_reason = ticket.end_reason or "disconnect"
                ticket.close()  # at once: the engine must not work on for nobody
                task.cancel()

        ended = False
        watcher.add_done_callback(gone)
        try:
            try:
                await self._send_all(scope.get("state", {}).get("writer"), send)
                last = self._events.finish() + self._done
            except ApiError as error:
                if not self._started:
                    ended = True
                    await error.response()(scope, receive, send)
                    return
                ticket.end_reason = ticket.end_reason or f"error {error.status}"
                last = self._error_event(error) + self._done
            except Exception:
                logger.exception("a stream failed")
                failure = engine_failed("This request failed on the server; its log says why.")
                if not self._started:
                    ended = True
                    await failure.response()(scope, receive, send)
                    return
                last = self._error_event(failure) + self._done
            ended = True
            ticket.sending_since = time.monotonic()
            await send({"type": "http.response.body", "body": last, "more_body": False})
        except asyncio.CancelledError:
            if ticket.end_reason is None or task is None:
                raise
            task.uncancel()
            abort = scope.get("state", {}).get("abort")
            if abort is not None and ticket.end_reason != "disconnect":
                abort()
        finally:
            ended = True
            ticket.close()
            watcher.cancel()

    async def _send_all(self, writer: Writer | None, send: Send) -> None:
        ticket, events = self._ticket, self._events
        sink = None if writer is None else Sink(events.take, events.text, writer)
        while not ticket.exhausted:
            ticket.sink = sink if self._started else None  # only while this task waits: the order of events
            try:
                outputs = await ticket.next(self._keep_alive)
            finally:
                ticket.sink = None
            body = events.take(outputs) if outputs else KEEP_ALIVE
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            ticket.sending_since = time.monotonic()
            await send({"type": "http.response.body", "body": body, "more_body": True})
            ticket.sending_since = None
