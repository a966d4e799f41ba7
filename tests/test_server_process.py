"""The two processes of `gapless serve`: what one does when the other is gone, and signals."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines import OPTIONS, model, tokenizer, wait_until
from gapless.server.limits import RESERVED_FILES

BOUND = 60.0
"""Seconds after which a test says that something hangs: far more than it takes, since the machine may be busy."""
FILES = 160
"""Limit of open files of the servers."""
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 120, "temperature": 0, "ignore_eos": True}


class Server:
    """``gapless serve`` as a user starts it."""

    def __init__(self, folder: Path, log: Path, *more: str) -> None:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if name != "check_model"]
        options += ["--port=0", "--no-check-model", "--hang-timeout=2"]
        command = [sys.executable, "-m", "gapless", "serve", str(folder), *options, *more]
        self._log = log
        self.process = subprocess.Popen(
            command,
            stderr=log.open("w"),
            stdout=subprocess.DEVNULL,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
        )
        wait_until(lambda: "listening on" in self.log or self.process.poll() is not None, "the port", 60)
        assert "listening on" in self.log, self.log
        self.url = re.search(r"listening on (http://\S+);", self.log)[1]  # type: ignore[index]

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        wait_until(lambda: bool(children.read_text()), "the engine's process", 30)
        return int(children.read_text().split()[0])

    def wait_ready(self) -> None:
        wait_until(lambda: self.answers("/ready") == 200, "the engine", 120)

    def answers(self, path: str) -> int:
        """Its status; 0 if the connection was refused or cut."""
        try:
            return httpx.get(self.url + path, timeout=BOUND).status_code
        except httpx.TransportError:
            return 0

    def canary(self) -> None:
        answer = httpx.post(self.url + "/v1/completions", json={**LONG, "max_tokens": 3}, timeout=BOUND)
        assert answer.json()["usage"]["completion_tokens"] == 3


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    model().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def servers(folder: Path, tmp_path: Path) -> Iterator[list[Server]]:
    """Two, started together, because starting is most of what these tests cost."""
    both = [Server(folder, tmp_path / "a"), Server(folder, tmp_path / "b", "--skip-tokenizer")]
    yield both
    for server in both:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


@linux
def test_from_start_to_end(servers: list[Server]) -> None:
    """One server after the other dies, and its other process with it. Before that: many connections, a hang."""
    one, two = servers
    for server in servers:
        server.wait_ready()
        server.canary()
    check_many_connections(one)
    check_hang(one)
    # The engine is killed: an open stream gets an error, and the server ends.
    with httpx.stream(
        "POST", one.url + "/v1/completions", json={**LONG, "n": 100, "stream": True}, timeout=BOUND
    ) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(one.engine_pid, signal.SIGKILL)
        rest = [line for line in lines if line]
    assert '"error"' in rest[-2]
    assert "signal 9" in rest[-2]
    assert rest[-1] == "data: [DONE]"
    assert one.process.wait(BOUND) == 1
    assert "the server ends: the engine's process ended by signal 9" in one.log
    # The HTTP process is killed: the engine's ends by itself.
    engine = two.engine_pid
    two.process.kill()
    wait_until(lambda: not alive(engine), "the engine's end", BOUND)
    wait_until(lambda: "the front end is gone; the engine ends" in two.log, "the reason", BOUND)


def check_many_connections(server: Server) -> None:
    """More than the limit of open files allows: those that are too many are told so, and nothing else happens."""
    assert f"at most {FILES - RESERVED_FILES} connections" in server.log
    port = int(server.url.rpartition(":")[2])
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connections, answers = [], list[bytes]()
    for _ in range(FILES + 20):
        connections.append(socket.create_connection(("127.0.0.1", port), timeout=BOUND))
    for connection in connections:
        try:
            connection.sendall(request)
            answers.append(connection.recv(12))
        except ConnectionError:  # it was refused before it had asked
            answers.append(b"")
    good = answers.count(b"HTTP/1.1 200")
    assert 1 <= good <= FILES - RESERVED_FILES
    assert set(answers) <= {b"HTTP/1.1 200", b"HTTP/1.1 503", b""}
    for connection in connections:
        connection.close()
    wait_until(lambda: server.answers("/health") == 200, "room again", BOUND)
    server.canary()


def check_hang(server: Server) -> None:
    """A process that is stopped says nothing, which is a hang like any other; then it goes on."""
    os.kill(server.engine_pid, signal.SIGSTOP)
    wait_until(lambda: server.answers("/health") == 503, "the health check", BOUND)
    assert server.answers("/ready") == 503
    os.kill(server.engine_pid, signal.SIGCONT)
    wait_until(lambda: server.answers("/health") == 200, "the recovery", BOUND)
    server.canary()


@linux
def test_a_signal_while_loading(folder: Path, tmp_path: Path) -> None:
    server = Server(folder, tmp_path / "log")
    engine = server.engine_pid
    server.process.terminate()
    assert server.process.wait(BOUND) == 0
    assert not alive(engine)


STUCK = """
import ctypes, os, subprocess, sys
if sys.argv[1:]:
    from gapless.server.engine_process import die_with_parent
    die_with_parent()
    print(os.getpid(), flush=True)
    ctypes.PyDLL(None).sleep(600)  # a native call that keeps the interpreter's lock
else:
    subprocess.Popen([sys.executable, "-c", os.environ["STUCK"], "child"]).wait()
"""


@linux
def test_a_stuck_engine_ends_with_its_parent() -> None:
    """Not even its threads run, so that the end of the socket does not help: the kernel ends it."""
    environment = {**os.environ, "STUCK": STUCK}
    parent = subprocess.Popen([sys.executable, "-c", STUCK], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not alive(child), "its end", BOUND)
