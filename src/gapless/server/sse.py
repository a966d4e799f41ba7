"""Server-sent events as clients of OpenAI's interface read them, and the answer that sends them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from gapless.server.errors import ApiError, engine_failed, event
from gapless.server.frontend import Ticket

logger = logging.getLogger("gapless.server")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encoder = msgspec.json.Encoder()


def data(value: Any) -> bytes:
    """One event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Returns when the client is gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An answer of events. It starts with the first event, so that what fails before has a status of its own.

    Args:
        events: already framed; ends by itself, or by an `ApiError`, which becomes an event.
        ticket: closed at the end, whatever the end is.
        done: the last event, which also follows an error.
        error_event: makes an event of an error.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        ticket: Ticket,
        *,
        done: bytes = DONE,
        error_event: Any = event,
    ) -> None:
        self._events = events
        self._ticket = ticket
        self._done = done
        self._error_event = error_event

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

        started = ended = False
        watcher.add_done_callback(gone)
        try:
            try:
                async with aclosing(self._events) as events:  # type: ignore[type-var]
                    async for chunk in events:
                        if not started:
                            started = True
                            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
                        ticket.sending_since = time.monotonic()
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                        ticket.sending_since = None
                last = self._done
            except ApiError as error:
                if not started:
                    ended = True
                    await error.response()(scope, receive, send)
                    return
                ticket.end_reason = ticket.end_reason or f"error {error.status}"
                last = self._error_event(error) + self._done
            except Exception:
                logger.exception("a stream failed")
                failure = engine_failed("This request failed on the server; its log says why.")
                if not started:
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
