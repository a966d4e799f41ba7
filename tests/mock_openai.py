"""A server with OpenAI's interface whose answers a test writes itself, byte by byte, in a thread."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

Write = Callable[[bytes], Awaitable[None]]
Handler = Callable[[dict[str, Any], Write], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """In the form of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def answer(status: int, value: Any) -> bytes:
    """A whole answer."""
    body = json.dumps(value).encode()
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


class MockServer:
    """``handler(body, write)`` answers each POST. ``requests`` are (path, headers, body)."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.connections = 0
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, sock=self._socket)
        await self._stopped.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1

        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
                method, path, _ = head[0].split()
                if method == "GET":
                    models = {"object": "list", "data": [{"id": "mock"}]}
                    await write(answer(200 if path == "/v1/models" else 404, models))
                    continue
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self.requests.append((path, headers, body))
                await self._handler(body, write)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError, EOFError):
            pass
        finally:
            writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)
        self._loop.close()
