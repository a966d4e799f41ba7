"""The life of a server: loading, draining, deaths, hangs, keys, slow and broken clients."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engines import model, options, tokenizer, wait_until
from gapless import LLM, SamplingParams
from gapless.errors import ConfigError, RequestError
from gapless.server.keys import Keys, read_keys
from gapless.server.lifecycle import Lifecycle
from gapless.server.listening import allowed_hosts, bind
from gapless.server.options import ServerOptions
from live_server import MODEL, LiveServer, ThreadProcess, events, raw

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True}


class InBackground:
    """A request in a thread."""

    def __init__(self, server: LiveServer, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self.response: httpx.Response | None = None
        self._thread = threading.Thread(target=self._run, args=(server, body, path), daemon=True)
        self._thread.start()

    def _run(self, server: LiveServer, body: dict[str, Any], path: str) -> None:
        with contextlib.suppress(httpx.HTTPError):  # a connection that the server cuts
            self.response = httpx.post(server.url + path, json=body, timeout=60)

    def join(self) -> httpx.Response:
        self._thread.join(60)
        assert self.response is not None
        return self.response


def test_the_port_answers_while_the_model_is_loaded() -> None:
    load = threading.Event()

    class Late(LiveServer):
        def _start(self, end: socket.socket) -> Any:
            held = end.dup()

            def start() -> None:
                load.wait(30)
                self.process = ThreadProcess(held, model())

            threading.Thread(target=start, daemon=True).start()

            class Starting:
                def wait(self, timeout: float | None = None) -> int:
                    return 0

                def kill(self) -> None:
                    pass

            return Starting()

    live = Late()
    for path in ("/v1/models", "/tokenizer_info"):
        response = httpx.get(live.url + path)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        error = response.json()["error"]
        assert (error["message"], error["type"]) == ("Loading model", "unavailable_error")
    assert httpx.post(live.url + "/v1/completions", json=LONG).status_code == 503
    assert httpx.get(live.url + "/ready").status_code == 503
    assert httpx.get(live.url + "/health").status_code == 200
    assert httpx.get(live.url + "/health").json()["status"] == "starting"
    load.set()
    live.wait_ready().canary()
    assert live.stop() == 0


def test_sigterm_drains() -> None:
    live = LiveServer(shutdown_timeout=30).wait_ready()
    with live.gated() as gate:
        gate.open.clear()
        whole = InBackground(live, LONG)
        stream = InBackground(live, {**LONG, "stream": True})
        wait_until(lambda: len(live.front_end.tickets) == 2, "the requests")
        live.signal()
        wait_until(lambda: httpx.get(live.url + "/ready").status_code == 503, "the draining")
        refused = live.post("/v1/completions", LONG)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert live.client.get("/health").json()["status"] == "draining"
        gate.open.set()
        assert whole.join().json()["usage"]["completion_tokens"] == 100
        assert events(stream.join().text)[-1]["choices"][0]["finish_reason"] == "length"
        assert live.wait() == 0


@pytest.mark.parametrize("second_signal", [False, True])
def test_what_does_not_end_in_time_gets_an_error(second_signal: bool) -> None:
    live = LiveServer(shutdown_timeout=30 if second_signal else 0.2).wait_ready()
    with live.gated() as gate:
        stream = InBackground(live, {**LONG, "stream": True})
        bare = RawStream(live, LONG)
        wait_until(lambda: [t.started for t in live.front_end.tickets] == [True, True], "some tokens")
        gate.open.clear()
        whole = InBackground(live, LONG)
        wait_until(lambda: len(live.front_end.tickets) == 3, "the requests")
        live.signal()
        if second_signal:
            live.signal()
        last_words = bare.read()
        assert b"shutting down" in last_words
        assert last_words.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")  # the body is whole, too
        *chunks, last = events(stream.join().text)
        assert chunks
        assert "shutting down" in last["error"]["message"]
        response = whole.join()
        assert response.status_code == 503
        assert response.headers["retry-after"]
        gate.open.set()
        assert live.wait() == 0


def test_the_engine_dies() -> None:
    live = LiveServer().wait_ready()
    with live.gated() as gate:
        stream = InBackground(live, {**LONG, "stream": True})
        wait_until(lambda: gate.passed > 3, "some tokens")
        gate.open.clear()
        whole = InBackground(live, LONG)
        wait_until(lambda: len(live.front_end.tickets) == 2, "the requests")
        gate.error = RuntimeError("the device is gone")
        gate.open.set()
        last = events(stream.join().text)[-1]
        assert "the device is gone" in last["error"]["message"]
        assert last["error"]["type"] == "InternalServerError"
        assert whole.join().status_code == 500
        assert live.wait() == 1


def test_a_hung_engine_is_noticed() -> None:
    live = LiveServer(hang_timeout=0.3).wait_ready()
    health = lambda: live.client.get("/health")  # noqa: E731
    assert health().status_code == 200
    with live.gated() as gate:
        gate.open.clear()
        whole = InBackground(live, LONG)
        wait_until(lambda: health().status_code == 503, "the health check")
        assert "no step" in health().json()["reason"]
        assert live.client.get("/ready").status_code == 503
        gate.open.set()
        assert whole.join().status_code == 200
        wait_until(lambda: health().status_code == 200, "the recovery")
    assert live.stop() == 0


def test_queue_limits() -> None:
    live = LiveServer(engine={"max_num_seqs": 2}, max_queued_requests=1, max_queued_tokens=8).wait_ready()
    with live.gated() as gate:
        gate.open.clear()
        running = InBackground(live, {**LONG, "n": 2})
        wait_until(lambda: live.front_end.sequences == 2, "the first")
        full = live.post("/v1/completions", {**LONG, "prompt": [5] * 20})
        assert full.status_code == 503
        assert "tokens wait" in full.json()["error"]["message"]
        waiting = InBackground(live, LONG)
        wait_until(lambda: live.front_end.sequences == 3, "the second")
        full = live.post("/v1/completions", LONG)
        assert (full.status_code, full.headers["retry-after"]) == (503, "1")
        assert full.json()["error"]["code"] == "overloaded"
        never = live.post("/v1/completions", {**LONG, "n": 4})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        gate.open.set()
        assert running.join().status_code == waiting.join().status_code == 200
    text = live.client.get("/metrics").text
    assert 'admission_rejections_total{engine="0",model_name="tiny",reason="max_num_queued_reqs"} 1.0' in text
    live.check_idle()
    assert live.stop() == 0


# ---- keys ---------------------------------------------------------------------------------------------------------


def test_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nfrom-the-file\n")
    monkeypatch.setenv("GAPLESS_API_KEY", "one,two")
    live = LiveServer(api_key_file=str(file))
    wait_until(lambda: httpx.get(live.url + "/ready").status_code == 200, "the engine")
    wrong = ("", "Bearer", "Bearer ", "Bearer  one", "Bearer three", "Bearer one two", "one", "Basic one")
    for header in wrong:
        line = f"Authorization: {header}\r\n" if header else ""
        answer = raw(
            live.port, f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{line}Connection: close\r\n\r\n".encode()
        )
        head = answer.split(b"\r\n\r\n")[0].lower()
        assert head.startswith(b"http/1.1 401"), header
        assert b"www-authenticate: bearer" in head
    for path in ("/v1/models", "/metrics", "/docs", "/nothing", "/v1/completions", "/openapi.json", "/version"):
        assert httpx.get(live.url + path + "?api_key=one").status_code == 401, path
    for path in ("/health", "/ready", "/ping"):
        assert httpx.get(live.url + path).status_code == 200
    for right in ("Bearer one", "Bearer two", "Bearer from-the-file", "bearer one"):  # a scheme has no case
        assert httpx.get(live.url + "/v1/models", headers={"authorization": right}).status_code == 200, right
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="nope", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert live.stop() == 0


def test_keys_are_checked_at_start(tmp_path: Path) -> None:
    assert not read_keys(None, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "none"), {})
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(str(tmp_path / "empty"), {})
    with pytest.raises(ConfigError, match="character"):
        read_keys(None, {"GAPLESS_API_KEY": "two words"})
    assert Keys(["a"]).allow(b"Bearer a")
    assert not Keys([]).allow(b"Bearer a")


# ---- clients that misbehave -----------------------------------------------------------------------------------------


class RawStream:
    """A client of one stream on a bare socket, which reads when it is told to."""

    def __init__(self, live: LiveServer, body: dict[str, Any]) -> None:
        self.socket = socket.socket()
        assert live.bound is not None
        live.bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(30)
        self.socket.connect(("127.0.0.1", live.port))
        data = json.dumps({**body, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def read(self) -> bytes:
        """All until the server closes, or ends the body."""
        out = b""
        while not out.endswith(b"\r\n0\r\n\r\n"):
            try:
                part = self.socket.recv(65536)
            except ConnectionResetError:
                break
            if not part:
                break
            out += part
        self.socket.close()
        return out


@pytest.mark.parametrize("limit", ["time", "tokens"])
def test_a_client_that_does_not_read_is_cut_off(limit: str) -> None:
    """It fills the sockets' buffers and the connection's; the others go on meanwhile."""
    bounds = {"write_timeout": 0.3} if limit == "time" else {"stream_buffer_tokens": 4}
    live = LiveServer(**bounds).wait_ready()
    closed = list[Any]()
    on_closed, front_end = live.front_end._on_closed, live.front_end
    front_end._on_closed = lambda ticket: (closed.append(ticket), on_closed(ticket))
    stream = RawStream(live, {**LONG, "n": 8, "logprobs": 20})
    wait_until(lambda: bool(closed), "the end of the request")
    assert closed[0].end_reason == "slow reader"
    assert b"[DONE]" not in stream.read()
    live.check_idle()
    live.canary()
    assert live.stop() == 0


def test_a_client_that_reads_slowly_gets_everything() -> None:
    """In order, though some of it is written at once and some waits for room."""
    live = LiveServer().wait_ready()
    body = {**LONG, "n": 4, "logprobs": 20}
    whole = live.post("/v1/completions", body).json()["choices"]
    stream = RawStream(live, body)
    wait_until(lambda: live.front_end.client.pending == 0 and not live.engine.scheduler.has_requests, "the engine")
    text = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", stream.read().partition(b"\r\n\r\n")[2])
    found = dict.fromkeys(range(4), "")
    for event in re.findall(rb"data: ({.*?})\n\n", text):
        (choice,) = json.loads(event)["choices"]
        found[choice["index"]] += choice["text"]
    assert found == {c["index"]: c["text"] for c in whole}
    live.check_idle()
    assert live.stop() == 0


def test_a_client_that_closes_its_half_is_gone() -> None:
    """As for most servers: who says that nothing more comes is taken for one who has left."""
    live = LiveServer().wait_ready()
    with live.gated() as gate:
        gate.open.clear()
        stream = RawStream(live, LONG)
        wait_until(lambda: len(live.front_end.tickets) == 1, "the request")
        stream.socket.shutdown(socket.SHUT_WR)
        wait_until(lambda: not live.front_end.tickets, "its end")
        gate.open.set()
    assert stream.read() == b""
    live.check_idle()
    assert live.stop() == 0


def test_keep_alive_comments() -> None:
    live = LiveServer(sse_keep_alive_interval=0.05).wait_ready()
    with live.gated() as gate:
        gate.open.clear()
        stream = InBackground(live, {**LONG, "max_tokens": 2, "stream": True})
        wait_until(lambda: len(live.front_end.tickets) == 1, "the request")
        time.sleep(0.3)
        gate.open.set()
        text = stream.join().text
    assert text.startswith(": keep-alive\n\n")
    assert events(text)[-1]["choices"][0]["finish_reason"] == "length"
    assert live.stop() == 0


def test_http_guard() -> None:
    live = LiveServer(header_timeout=1.0, body_timeout=1.0, max_connections=3, max_body_bytes=2000).wait_ready()

    def status(data: bytes) -> int:
        answer = raw(live.port, data)
        return int(answer.split(b" ", 2)[1]) if answer else 0

    host = b"Host: localhost\r\n"
    post = b"POST /v1/completions HTTP/1.1\r\n" + host + b"Content-Type: application/json\r\n"
    cases = {
        "long header": (b"GET /health HTTP/1.1\r\n" + host + b"X: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        "endless header": (b"GET /health HTTP/1.1\r\n" + host + b"X: " + b"a" * 200_000, 431),
        "many headers": (b"GET /health HTTP/1.1\r\n" + host + b"X: a\r\n" * 101 + b"\r\n", 431),
        "long path": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + host + b"\r\n", 414),
        "no http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", 400),
        "half a head": (b"GET /health HTTP/1.1\r\nHost: loc", 408),
        "nothing": (b"", 0),
        "half a body": (post + b"Content-Length: 100\r\n\r\n{", 408),
        "endless chunks": (post + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\"a\":\r\n", 408),
        "large body": (post + b"Content-Length: 5000\r\n\r\n" + b" " * 5000, 413),
        "large chunks": (post + b"Transfer-Encoding: chunked\r\n\r\nBB8\r\n" + b" " * 3000 + b"\r\n0\r\n\r\n", 413),
        "two lengths": (post + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        "trace": (b"TRACE /health HTTP/1.1\r\n" + host + b"Connection: close\r\n\r\n", 405),
        "http 1.0": (b"GET /health HTTP/1.0\r\n" + host + b"\r\n", 200),
        "upgrade": (
            b"GET /health HTTP/1.1\r\n" + host + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n", 200),  # an offer, passed over
    }  # fmt: skip
    for name, (data, wanted) in cases.items():
        assert status(data) == wanted, name
        live.canary()
    expect = (
        post
        + b'Expect: 100-continue\r\nConnection: close\r\nContent-Length: 33\r\n\r\n{"prompt": "hello", "max_tokens":1'
    )
    assert raw(live.port, expect).startswith(b"HTTP/1.1 100 Continue")
    pipelined = (
        (b"GET /version HTTP/1.1\r\n" + host + b"\r\n") * 2
        + b"GET /version HTTP/1.1\r\nConnection: close\r\n"
        + host
        + b"\r\n"
    )
    assert raw(live.port, pipelined).count(b"200 OK") == 3
    live.client.close()
    idle = list[socket.socket]()

    def full() -> bool:
        idle.extend(socket.create_connection(("127.0.0.1", live.port)) for _ in range(3))  # they do not stay for long
        return status(b"GET /health HTTP/1.1\r\n" + host + b"Connection: close\r\n\r\n") == 503

    wait_until(full, "the limit")
    for connection in idle:
        connection.close()
    wait_until(lambda: status(b"GET /health HTTP/1.1\r\n" + host + b"Connection: close\r\n\r\n") == 200, "room again")
    assert live.stop() == 0


# ---- options ------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    """The engine's side says so, and the exit code is that of a wrong option."""

    class Missing(LiveServer):
        def _start(self, end: socket.socket) -> Any:
            self.process = ThreadProcess(end, str(tmp_path))
            return self.process

    live = Missing()
    assert live.wait() == 2
    assert "no config.json" in (live.lifecycle.serving.reason or "")


def test_skip_tokenizer() -> None:
    live = LiveServer(skip_tokenizer=True).wait_ready()
    ids = tokenizer()("hello")["input_ids"]
    body = {
        "prompt": ids,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 1,
    }
    (choice,) = live.post("/v1/completions", body).json()["choices"]
    assert choice["text"] == ""
    assert len(choice["token_ids"]) == 4
    assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in choice["token_ids"]]
    streamed = live.stream("/v1/completions", body)
    assert [t for c in streamed for t in c["choices"][0]["token_ids"]] == choice["token_ids"]
    for path, bad in (
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": ids, "stop": ["x"]}),
        ("/tokenize", {"prompt": "hello"}),
    ):
        assert live.post(path, bad).status_code == 400
    assert live.client.get("/tokenizer_info").status_code == 404
    assert live.stop() == 0


def test_adapters(tmp_path: Path) -> None:
    """An adapter is a model of its own name; the same prompt through both does not share blocks."""
    peft_adapters = pytest.importorskip("peft_adapters", reason="peft is not installed")
    folder = peft_adapters.save(model(), peft_adapters.A, tmp_path / "a")
    with LLM(**options(enable_lora=True)) as llm:
        llm.load_lora("a", folder)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        want = {n: llm.generate("hello", params, use_tqdm=False, lora=n)[0].outputs[0].text for n in ("a", None)}
    live = LiveServer(engine={"enable_lora": True}, adapters={"a": str(folder)}).wait_ready()
    cards = live.client.get("/v1/models").json()["data"]
    assert [(c["id"], c["parent"]) for c in cards] == [("tiny", None), ("a", "tiny")]
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    for name, own in (("a", "a"), ("tiny", None), ("a", "a")):
        (choice,) = live.post("/v1/completions", {**body, "model": name}).json()["choices"]
        assert choice["text"] == want[own]
    assert want["a"] != want[None]
    assert live.post("/v1/completions", {**body, "model": "b"}).json()["error"]["code"] == "model_not_found"
    assert live.stop() == 0
    with pytest.raises(ConfigError, match="tiny"):
        Lifecycle("x", ServerOptions(served_model_name="tiny"), {}, {"tiny": str(folder)})


def test_drafts_over_http() -> None:
    """The option reaches the engine's process, a request may opt out, and the counters come back."""
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


def test_no_prompt_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    live = LiveServer(log_level="debug", log_format="json").wait_ready()
    live.post("/v1/completions", {"prompt": "hello secret words", "max_tokens": 2}, **{"x-request-id": "label-7"})
    live.post("/v1/completions", {"prompt": "hello secret words", "max_tokens": "x"})
    live.client.get("/a%0Aforged%1b[0m")
    assert live.stop() == 0
    log = capfd.readouterr().err
    assert "secret" not in log
    assert '"request_id":"label-7"' in log
    assert "\x1b" not in log
    live = LiveServer(log_level="info").wait_ready()
    live.client.get("/a%0Aforged%1b[0m")
    assert live.stop() == 0
    assert "\nforged" not in (log := capfd.readouterr().err)
    assert "forged" in log


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"port": 70000}, "port"),
        ({"max_n": 0}, "max_n"),
        ({"log_format": "xml"}, "plain, json"),
        ({"hang_timeout": 0.0}, "hang_timeout"),
        ({"served_model_name": "a,,b"}, "served_model_name"),
        ({"tool_call_parser": "x"}, "hermes"),
    ],
)
def test_bad_options(bad: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ServerOptions(**bad)


def test_a_port_in_use_and_hosts(tmp_path: Path) -> None:
    with bind(ServerOptions(port=0)) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            bind(ServerOptions(port=port))
    path = str(tmp_path / "socket")
    with bind(ServerOptions(uds=path)), pytest.raises(ConfigError, match="socket"):
        bind(ServerOptions(uds=path))
    bind(ServerOptions(uds=path)).close()  # what a process left that is gone
    assert "localhost" in (allowed_hosts(ServerOptions()) or ())
    assert allowed_hosts(ServerOptions(host="0.0.0.0")) is None
    assert allowed_hosts(ServerOptions(allowed_hosts="*")) is None
    with pytest.raises(ConfigError):
        Lifecycle("x", ServerOptions(), {"dtype": "float7"})


def test_long_prompts_wait_in_a_bounded_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones pass them by, and what is too many is told to come again."""
    from gapless.server import prompts

    monkeypatch.setattr(prompts, "SLOW_CHARACTERS", 200)
    monkeypatch.setattr(prompts, "MAX_SLOW", 1)
    live = LiveServer().wait_ready()
    held = threading.Event()
    lane = live.lifecycle.serving.prompts._lanes[1]
    lane.submit(held.wait, 30)
    long = {**LONG, "max_tokens": 2, "user": "x" * 200}
    first = InBackground(live, long)
    wait_until(lambda: live.lifecycle.serving.prompts._slow == 1, "the first")
    refused = live.post("/v1/completions", long)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    live.canary()
    held.set()
    assert first.join().status_code == 200
    assert live.stop() == 0


def test_a_request_that_the_engine_cannot_read_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from gapless.server import wire

    real = wire._request

    def picky(plain: Any) -> Any:
        if plain.params["seed"] == 13:
            raise RequestError("seed=13 is not allowed: it is unlucky")
        return real(plain)

    monkeypatch.setattr(wire, "_request", picky)
    live = LiveServer().wait_ready()
    refused = live.post("/v1/completions", {**LONG, "seed": 13, "n": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")
    live.canary()
    live.check_idle()
    assert live.stop() == 0


def test_dev_routes() -> None:
    live = LiveServer(dev_routes=True, hang_timeout=0.3).wait_ready()
    post, get = live.client.post, live.client.get
    assert post("/reset_prefix_cache").status_code == 200
    live.canary()
    assert post("/pause", params={"mode": "keep"}).status_code == 200
    assert get("/is_paused").json() == {"is_paused": True}
    held = InBackground(live, {**LONG, "max_tokens": 3})
    wait_until(lambda: live.front_end.sequences == 1, "the request")
    time.sleep(0.5)
    assert get("/health").status_code == 200  # held is not hung
    assert post("/resume").status_code == 200
    assert held.join().json()["usage"]["completion_tokens"] == 3
    assert get("/is_paused").json() == {"is_paused": False}
    assert post("/sleep", params={"level": "1"}).status_code == 200
    assert get("/is_sleeping").json() == {"is_sleeping": True}
    assert 'sleep_state="cache_released"} 1.0' in get("/metrics").text
    held = InBackground(live, {**LONG, "max_tokens": 3})
    wait_until(lambda: live.front_end.sequences == 1, "the request")
    assert post("/wake_up").status_code == 200
    assert held.join().status_code == 200
    for path, bad in (("/sleep", {"level": "3"}), ("/pause", {"mode": "x"})):
        refused = post(path, params=bad)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    paths = get("/openapi.json").json()["paths"]
    assert {"/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping"} <= set(paths)
    with live.gated() as gate:  # one that waits for a request, and one that is the way out
        gate.open.clear()
        running = InBackground(live, LONG)
        wait_until(lambda: live.engine.stats.in_flight > 0, "a step")
        waits = threading.Thread(target=lambda: post("/pause", params={"mode": "finish"}))
        waits.start()
        gate.open.set()
        waits.join(20)
        assert running.join().status_code == 200
    assert get("/is_paused").json() == {"is_paused": True}
    assert live.stop() == 0
