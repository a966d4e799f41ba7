"""A small HTTP/1.1 client for load tests: many answers at once, each piece with the time at which it came.

A client that is slower than the server measures itself. One of a general library spends 25 to 130 microseconds on each
event of a stream; this one, an `asyncio.Protocol` around the parser of ``httptools``, spends about 12. It knows what a
load test needs and nothing else: keep-alive, chunked answers, TLS. No redirects, no proxies, no compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

MAX_KEPT = 1 << 20
"""Bytes that are kept of an answer that nobody reads piece by piece."""
MAX_LINE = 1 << 24
"""Bytes of one line of a stream of events."""

OnBody = Callable[[bytes, float], None]


class HttpError(ConnectionError):
    """No whole answer came."""


@dataclass(slots=True)
class Answer:
    """What came back.

    Attributes:
        status: of HTTP.
        headers: names in lower case.
        body: of an answer without a reader of its pieces, or that is not 2xx.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class EventReader:
    """Cuts pieces of a stream into server-sent events. Lines end with LF or CRLF."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ``piece`` completes; comments and other fields are left out.

        Raises:
            HttpError: a line is longer than `MAX_LINE`.
        """
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE:
            raise HttpError(f"a line of the stream has more than {MAX_LINE} bytes")
        events = list[bytes]()
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.heard = False
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._on_body: OnBody | None = None
        self._answer = Answer()
        self._now = 0.0

    def start(self, request: bytes, on_body: OnBody | None) -> asyncio.Future[Answer]:
        """Write a request; the future is its answer."""
        assert self.transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._answer, self._on_body, self.heard = Answer(), on_body, False
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._now, self.heard = time.perf_counter(), True
        if self._parser is None:
            self._fail(HttpError("the server sent what was not asked for"))
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(_cause(error))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        reason = f": {error}" if error else ""
        self._fail(HttpError(f"the server closed the connection before its answer was complete{reason}"))

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self._parser = None
        self.close()

    def close(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    # ---- called by the parser -------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._answer.status = self._parser.get_status_code()
        if self._answer.status >= 300:
            self._on_body = None

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None:
            self._on_body(body, self._now)
        elif len(self._answer.body) < MAX_KEPT:
            self._answer.body += body

    def on_message_complete(self) -> None:
        if self._answer.status < 200:  # an interim answer: the real one follows
            self._answer = Answer()
            return
        assert self._parser is not None
        if not self._parser.should_keep_alive():
            self.close()
        self._parser = None
        if self._done is not None and not self._done.done():
            self._done.set_result(self._answer)


def _cause(error: httptools.HttpParserError) -> Exception:
    """What one of our callbacks raised, else that the answer is not HTTP."""
    inner = error.__context__
    if isinstance(inner, Exception) and not isinstance(inner, httptools.HttpParserError):
        return inner
    return HttpError(f"the answer is not valid HTTP: {error}")


class HttpClient:
    """Requests to one server. Use it in one event loop, and close it.

    Args:
        base_url: ``http://`` or ``https://``, host, port, and a path that all others follow.
        headers: of each request.
        timeout: seconds for one request, from its first byte to the answer's last.
        insecure: do not check the certificate.

    Raises:
        ValueError: the address is none.
    """

    def __init__(self, base_url: str, headers: dict[str, str], timeout: float = 3600.0, insecure: bool = False) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url!r} is no address: http://HOST:PORT is needed")
        self._host, self._prefix = parts.hostname, parts.path.rstrip("/")
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
            if insecure:
                self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        own = {"host": parts.netloc.rpartition("@")[2], "accept": "*/*", "user-agent": "gapless-bench", **headers}
        for name, value in own.items():
            if not name or any(c in "\r\n\0" for c in name + value):
                raise ValueError(f"header {name!r} has a line break or no name")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in own.items())
        self._timeout = timeout
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def get(self, path: str) -> Answer:
        """A whole answer.

        Raises:
            OSError, TimeoutError: there is none.
        """
        return await self._request("GET", path, b"", "", None)

    async def post(self, path: str, body: bytes, on_body: OnBody | None = None, request_id: str = "") -> Answer:
        """Send JSON. ``on_body(piece, time)`` is called with each piece of a 2xx answer, with `time.perf_counter`.

        Raises:
            OSError, TimeoutError: there is no whole answer.
        """
        return await self._request("POST", path, body, request_id, on_body)

    async def _request(self, method: str, path: str, body: bytes, label: str, on_body: OnBody | None) -> Answer:
        own = f"x-request-id: {label}\r\n" if label else ""
        if method == "POST":
            own += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        request = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{own}\r\n".encode("latin-1") + body
        async with asyncio.timeout(self._timeout):
            while True:
                connection, used = await self._connection()
                try:
                    answer = await connection.start(request, on_body)
                except HttpError:
                    if used and not connection.heard:
                        continue  # the server had closed it between two requests: it never saw this one
                    raise
                except BaseException:
                    connection.close()
                    raise
                finally:
                    if connection.closed:
                        self._all.discard(connection)
                if not connection.closed:
                    self._idle.append(connection)
                return answer

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection, True
            self._all.discard(connection)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        self._all.add(connection)
        return connection, False

    async def close(self) -> None:
        """Close all connections."""
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()
        with contextlib.suppress(RuntimeError):
            await asyncio.sleep(0)
