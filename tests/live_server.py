"""A live server for tests: HTTP on a port of its own, in a thread, and a tiny engine behind a real socket pair.

Everything is as in `gapless serve`, but that the engine's side is a thread and not a process: it starts in a moment,
and tests can hold and break its model. `test_server_process.py` tests real processes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from engines import OPTIONS, Gate, model, tokenizer, wait_until
from gapless.server.engine_process import EngineServer
from gapless.server.lifecycle import Lifecycle
from gapless.server.logs import set_up_logging
from gapless.server.options import ServerOptions

MODEL = "tiny"


class ThreadProcess:
    """An `EngineServer` in a thread, with what the lifecycle asks of a process."""

    def __init__(self, end: socket.socket, model: Any) -> None:
        self.engine = EngineServer(end.dup(), model, tokenizer())
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.code = self.engine.run()
        self.engine._connection.shutdown(socket.SHUT_RDWR)
        self.engine._connection.close()

    def wait(self, timeout: float | None = None) -> int | None:
        self._thread.join(timeout)
        return self.code

    def kill(self) -> None:
        """The lifecycle only kills what does not end."""


class LiveServer:
    """See the module. ``lifecycle`` and ``engine`` are its two sides."""

    def __init__(
        self, *, engine: dict[str, Any] | None = None, adapters: dict[str, str] | None = None, **options: Any
    ) -> None:
        self.options = ServerOptions(**{"port": 0, "served_model_name": MODEL, "log_level": "warning", **options})
        set_up_logging(getattr(logging, self.options.log_level.upper()), self.options.log_format == "json")
        self.process: Any = None
        self.bound: socket.socket | None = None
        self.code: int | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.lifecycle = Lifecycle(
            "no-such-folder", self.options, {**OPTIONS, **(engine or {})}, adapters, self._start, self._on_bound
        )

        async def load_tokenizer() -> Any:
            return None if self.options.skip_tokenizer else tokenizer()

        self.lifecycle._load_tokenizer = load_tokenizer  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(lambda: self.bound is not None, "the port")

    def _start(self, end: socket.socket) -> Any:
        self.process = ThreadProcess(end, model())
        return self.process

    def _on_bound(self, bound: socket.socket) -> None:
        self.port = bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.bound = bound  # last: others wait for it

    def _run(self) -> None:
        async def whole() -> int:
            self.loop = asyncio.get_running_loop()
            return await self.lifecycle.run()

        self.code = asyncio.run(whole())

    def wait_ready(self, **headers: str) -> LiveServer:
        """``headers`` go with each request of ``client``."""
        wait_until(lambda: httpx.get(self.url + "/ready").status_code == 200, "the engine")
        self.client = httpx.Client(base_url=self.url, timeout=30, headers=headers)
        return self

    @property
    def engine(self) -> Any:
        return self.process.engine.built.engine

    @property
    def front_end(self) -> Any:
        return self.lifecycle.serving.front_end

    def signal(self) -> None:
        """As SIGTERM."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.lifecycle.stop)

    def wait(self, seconds: float = 20) -> int:
        self._thread.join(seconds)
        assert self.code is not None, "the server did not end"
        logging.getLogger("gapless").handlers.clear()
        logging.getLogger("gapless").propagate = True
        return self.code

    def stop(self) -> int:
        self.signal()
        return self.wait()

    def check_idle(self) -> None:
        """Every request has ended and every block and row has come back."""
        wait_until(lambda: not self.front_end.tickets, "the last tickets")
        wait_until(lambda: self.front_end.sequences == 0, "their sequences")
        scheduler = self.engine.scheduler
        wait_until(lambda: not scheduler.has_requests, "the scheduler's requests")
        pools = scheduler.blocks.pools
        wait_until(lambda: all(pool.available == pool.capacity for pool in pools), "the blocks")
        wait_until(lambda: scheduler.rows.num_free == len(scheduler.rows.requests), "the rows")
        wait_until(lambda: self.front_end.client.pending == 0, "the last words on them")

    @contextmanager
    def gated(self) -> Iterator[Gate]:
        """Hold or break the steps of the engine."""
        inner = self.process.engine.built.model
        gate = Gate(inner.forward)
        inner.forward = gate
        try:
            yield gate
        finally:
            gate.open.set()
            del inner.forward

    # ---- requests -------------------------------------------------------------------------------------------------

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream; the last one must be ``[DONE]``."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            return events(response.read().decode())

    def canary(self) -> None:
        """A good request, right now."""
        response = self.post("/v1/completions", {"prompt": "hello", "max_tokens": 2, "temperature": 0})
        assert response.status_code == 200, response.text


@contextmanager
def serving(**options: Any) -> Iterator[LiveServer]:
    """A server that has nothing left to do at its end, and ends in order."""
    live = LiveServer(**options).wait_ready()
    yield live
    live.check_idle()
    assert live.stop() == 0


def events(text: str) -> list[Any]:
    """The objects of a stream; comments are left out."""
    assert text.endswith("\n\n")
    found = []
    for event in text[:-2].split("\n\n"):
        lines = [line for line in event.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        assert lines[-1].startswith("data: ")
        found.append(lines[-1][6:])
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]]


def raw(port: int, data: bytes, seconds: float = 10.0) -> bytes:
    """Send bytes to a server and return all that it answers until it closes or falls silent."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(data)
        out = b""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                part = connection.recv(65536)
            except TimeoutError:
                break
            if not part:
                break
            out += part
        return out
