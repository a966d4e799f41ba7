"""uvicorn's HTTP protocol with limits: size and time of a head, progress of a body, number of connections.

What is refused here gets one small answer, written without the application, and its connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gapless.server.errors import ApiError

logger = logging.getLogger("gapless.server")

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
MAX_URL_BYTES = 8 * 1024
MAX_AHEAD = 1 << 20
"""Bytes of further requests that are read while one is answered, so that a client's end is seen."""
MIN_BODY_RATE = 1024
"""Bytes per second that a body must bring."""
LINGER_SECONDS = 1.0
"""How long a refused client has to read the answer: closing before it has stopped sending would lose it."""


def guarded(max_connections: int, header_timeout: float, body_timeout: float) -> type[GuardedProtocol]:
    """The protocol class with these limits."""
    limits = {"max_connections": max_connections, "header_timeout": header_timeout, "body_timeout": body_timeout}
    return type("GuardedProtocol", (GuardedProtocol,), limits)


def _end_with_connection(cycle: Any) -> None:
    """HTTP/1.0 knows no chunks: an answer whose length is not known ends with its connection."""
    send, announced = cycle.send, False
    cycle.chunked_encoding = False

    async def plain(message: Any) -> None:
        nonlocal announced
        if message["type"] == "http.response.start":
            lengths = [int(value) for name, value in message["headers"] if name.lower() == b"content-length"]
            announced = bool(lengths)
            cycle.expected_content_length = sum(lengths)
        elif not announced:
            cycle.expected_content_length += len(message.get("body", b""))
        await send(message)

    cycle.send = plain


class DirectWriter:
    """Writes pieces of one answer's body, once its head has been sent: what the cycle's ``send`` does for a piece, but
    without waiting. See `gapless.server.ticket.Writer`."""

    __slots__ = ("_begun", "_cycle", "_flow", "_write")

    def __init__(self, protocol: GuardedProtocol, cycle: Any) -> None:
        self._cycle = cycle
        self._flow = protocol.flow
        self._write = protocol.transport.write
        self._begun = False  # the head has been sent, and the body is one of chunks

    @property
    def ready(self) -> bool:
        """Whether a piece can be written now."""
        cycle = self._cycle
        if not self._begun:
            self._begun = bool(cycle.chunked_encoding and cycle.response_started)
        return self._begun and not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, body: bytes) -> None:
        """One piece. An empty one would be a chunk without bytes, which ends the body for the client."""
        assert body
        self._write(b"%x\r\n%b\r\n" % (len(body), body))


class GuardedProtocol(HttpToolsProtocol):
    """See the module."""

    max_connections = 8192
    header_timeout = 20.0
    body_timeout = 20.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = False
        self._in_body = False
        self._upgrade = False
        self._cycles: list[Any] = []  # that have not been answered
        self._ahead = 0
        self._head_bytes = 0
        self._body_bytes = 0
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, "Too many connections.", "overloaded", ("retry-after: 1",))
            return
        self._arm(self.header_timeout, self._head_is_late)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self._disarm()
        super().connection_lost(error)
        for cycle in self._cycles:  # uvicorn tells the last one only
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if not self._refused:
                self._refuse(400, "The request is not valid HTTP.", None)
        if self._in_head and self._head_bytes > MAX_HEADER_BYTES and not self._refused:
            self._refuse(431, f"The request's head has more than {MAX_HEADER_BYTES} bytes.", None)
        if self.pipeline:
            self._ahead += len(data)
            if self._ahead <= MAX_AHEAD:
                self.flow.resume_reading()
        else:
            self._ahead = 0

    def _feed(self, data: bytes) -> None:
        """Parse. An upgrade is an offer that a server may pass over: the parser would take the body for the other
        protocol, so that a fresh one reads the same head without the offer, and what follows."""
        while data and not self._refused:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                method, version = self.parser.get_method(), self.parser.get_http_version().encode()
                if method == b"CONNECT":
                    self._refuse(400, "CONNECT is not allowed: this server is no proxy.", None)
                    return
                hop = {b"upgrade", b"http2-settings", b"connection"}
                fields = [(name, value) for name, value in self.headers if name not in hop]
                options = b",".join(value for name, value in self.headers if name == b"connection").split(b",")
                kept = [o.strip() for o in options if o.strip().lower() in (b"close", b"keep-alive")]
                fields += [(b"connection", o) for o in kept]
                head = b"".join(b"%b: %b\r\n" % field for field in fields)
                data = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, head) + data[upgrade.args[0] :]
                self._upgrade = False
                self.parser = httptools.HttpRequestParser(self)

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self.scope["state"]["abort"] = self._abort
        self._arm(self.header_timeout, self._head_is_late)

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refuse(414, f"The request's path has more than {MAX_URL_BYTES} bytes.", None)

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._in_head = False
        self._disarm()
        self._upgrade = bool(self.parser.should_upgrade())
        if self._refused or self._upgrade:
            return
        size = sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            limits = f"{MAX_HEADERS} fields of {MAX_HEADER_BYTES} bytes together"
            self._refuse(431, f"The request's head has more than {limits}.", None)
            return
        super().on_headers_complete()
        if self.cycle is not None:
            self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
            self._cycles.append(self.cycle)
            if self.scope["http_version"] == "1.0":
                _end_with_connection(self.cycle)
            self.scope["state"]["writer"] = DirectWriter(self, self.cycle)
        self._in_body, self._body_bytes = True, 0
        self._arm(self.body_timeout, self._body_is_late, 0)

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        if not self._refused:
            self._body_bytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._in_body = False
        if not self._refused and not self._upgrade:
            self._disarm()
            super().on_message_complete()

    # ---- limits ---------------------------------------------------------------------------------------------------

    def _arm(self, seconds: float, action: Any, *arguments: Any) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, action, *arguments)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        if self._in_head:
            self._refuse(408, f"The request's head was not complete after {self.header_timeout:g} seconds.", None)
        else:  # a connection without a request
            self.transport.close()

    def _body_is_late(self, before: int) -> None:
        if not self._in_body:
            return
        paused = self.flow.read_paused  # the application has enough for now
        if not paused and self._body_bytes - before < MIN_BODY_RATE * self.body_timeout:
            self._refuse(408, "The request's body comes too slowly.", None)
            return
        self._arm(self.body_timeout, self._body_is_late, self._body_bytes)

    def _abort(self) -> None:
        """Drop the connection and what has not been written."""
        self.transport.abort()

    def _refuse(self, status: int, message: str, code: str | None, headers: tuple[str, ...] = ()) -> None:
        """Answer without the application, and close."""
        if self._refused:
            return
        self._refused = True
        self._disarm()
        logger.info("a connection was refused: %d %s", status, message)
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = ApiError(status, message, code=code).json()
            lines = [
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                "connection: close",
                *headers,
            ]
            self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        else:
            self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
