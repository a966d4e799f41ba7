"""The two processes of `gapless serve`: what one does when the other is gone, and signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines import OPTIONS, model, tokenizer, wait_until

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 120, "temperature": 0, "ignore_eos": True}


class Server:
    """``gapless serve`` as a user starts it."""

    def __init__(self, folder: Path, log: Path) -> None:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if name != "check_model"]
        command = [sys.executable, "-m", "gapless", "serve", str(folder), "--port=0", "--no-check-model", *options]
        self._log = log
        self.process = subprocess.Popen(command, stderr=log.open("w"), stdout=subprocess.DEVNULL)
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
        wait_until(lambda: httpx.get(self.url + "/ready").status_code == 200, "the engine", 120)


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
    """Two, started together."""
    both = [Server(folder, tmp_path / name) for name in "ab"]
    yield both
    for server in both:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_either_process_ends_with_the_other(servers: list[Server]) -> None:
    one, two = servers
    for server in servers:
        server.wait_ready()
        answer = httpx.post(server.url + "/v1/completions", json={**LONG, "max_tokens": 3}, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3
    # The engine is killed: an open stream gets an error, and the server ends.
    with httpx.stream(
        "POST", one.url + "/v1/completions", json={**LONG, "n": 100, "stream": True}, timeout=60
    ) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(one.engine_pid, signal.SIGKILL)
        start = time.monotonic()
        rest = [line for line in lines if line]
    assert '"error"' in rest[-2]
    assert "signal 9" in rest[-2]
    assert rest[-1] == "data: [DONE]"
    assert one.process.wait(10) == 1
    assert time.monotonic() - start < 5
    assert "the server ends: the engine's process ended by signal 9" in one.log
    # The HTTP process is killed: the engine's ends by itself.
    engine = two.engine_pid
    two.process.kill()
    wait_until(lambda: not alive(engine), "the engine's end", 5)
    wait_until(lambda: "the front end is gone; the engine ends" in two.log, "the reason", 5)


def test_a_signal_while_loading(folder: Path, tmp_path: Path) -> None:
    server = Server(folder, tmp_path / "log")
    engine = server.engine_pid
    server.process.terminate()
    assert server.process.wait(20) == 0
    assert not alive(engine)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    server = Server(tmp_path, tmp_path / "log")
    assert server.process.wait(60) == 2
    assert "no config.json" in server.log


def test_drafts_over_http() -> None:
    """The option reaches the engine's process, a request may opt out, and the counters come back."""
    from live_server import MODEL, LiveServer

    server = LiveServer(engine={"speculative": "ngram,min_ngram=1,min_accepted=0"}).wait_ready()
    try:
        body = {"model": MODEL, "prompt": "ab ab ab ab", "max_tokens": 20, "temperature": 0}
        first = server.post("/v1/completions", body)
        assert first.status_code == 200, first.text
        again = server.post("/v1/completions", {**body, "speculative": False})
        assert again.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
        text = server.client.get("/metrics").text
        assert "spec_decode_num_accepted_tokens_per_pos" in text
    finally:
        server.stop()
