"""The load test of a server: what it sends, when, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("httptools")
pytest.importorskip("msgspec")

from gapless.bench.serve_http import EventReader, HttpClient, HttpError
from gapless.bench.serve_load import Ask, arrivals, prompts_file_asks, random_asks, sharegpt_asks
from gapless.bench.serve_report import goodput, peaks, report, result
from gapless.bench.serve_run import Record, Target, run, send
from gapless.cli import main
from gapless.errors import InputError
from mock_openai import END, HEAD, Handler, MockServer, Write, answer, chunk, event

ASK = Ask([1, 2, 3], 3, 4)
TARGET = Target("/v1/completions", False, "mock", {"temperature": 0})
CHAT = Target("/v1/chat/completions", True, "mock")


@pytest.fixture
def mock() -> Iterator[Callable[[Handler], MockServer]]:
    servers = []

    def start(handler: Handler) -> MockServer:
        servers.append(MockServer(handler))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def text_event(text: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})


def usage_event(prompt: int, new: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": new}})


async def plain(body: dict[str, Any], write: Write) -> None:
    """As many tokens as were asked for, with the usual end."""
    await write(HEAD)
    n = body.get("max_tokens", body.get("max_completion_tokens"))
    for i in range(n):
        await write(chunk(text_event("x", "length" if i == n - 1 else None)))
    await write(chunk(usage_event(3, n)) + chunk(event(b"[DONE]")) + END)


def ask_all(url: str, asks: list[Ask], target: Target = TARGET, **options: Any) -> list[Record]:
    async def whole() -> list[Record]:
        client = HttpClient(url, {}, timeout=options.pop("timeout", 10))
        records, _ = await run(client, target, asks, [0.0] * len(asks), options.get("max_concurrency"), "t")
        await client.close()
        return records

    return asyncio.run(whole())


# ---- events -----------------------------------------------------------------------------------------------------


def test_events_cut_anywhere() -> None:
    text = b": hello\n\ndata: one\n\ndata:two\r\n\r\nevent: x\ndata: 3\ndata: \xe2\x80\xa8 4\n"
    text += b"id: 7\n\n\n\ndata: [DONE]\n\ndata: rest"
    want = [b"one", b"two", b"3\n\xe2\x80\xa8 4", b"[DONE]"]
    assert EventReader().feed(text) == want
    for seed in range(50):
        rng, reader, found, at = random.Random(seed), EventReader(), [], 0
        while at < len(text):
            step = rng.randint(1, 9)
            found += reader.feed(text[at : at + step])
            at += step
        assert found == want, seed


def test_an_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.bench.serve_http.MAX_LINE", 100)
    reader = EventReader()
    for _ in range(10):
        assert reader.feed(b"x" * 10) == []
    with pytest.raises(HttpError, match="more than 100 bytes"):
        reader.feed(b"x")


# ---- requests ---------------------------------------------------------------------------------------------------


def test_a_stream_of_completions(mock: Any) -> None:
    server = mock(plain)
    (record,) = ask_all(server.url, [ASK])
    assert record.error == ""
    assert (record.prompt_len, record.output_len, record.text) == (3, 4, "xxxx")
    assert len(record.itls) == 3
    assert 0 < record.ttft <= record.latency
    assert record.latency == pytest.approx(record.ttft + sum(record.itls))
    assert record.tpot == pytest.approx(sum(record.itls) / 3)
    ((path, headers, body),) = server.requests
    assert path == "/v1/completions"
    assert headers["x-request-id"] == "t-0"
    assert headers["content-type"] == "application/json"
    assert body == {
        "model": "mock", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_a_stream_of_a_chat_counts_tokens_and_not_chunks_around_them(mock: Any) -> None:
    def delta(reason: str | None = None, **fields: Any) -> bytes:
        return chunk(event({"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}))

    async def handler(body: dict[str, Any], write: Write) -> None:
        await write(HEAD + delta(role="assistant", content=""))
        for fields in ({"reasoning_content": "hm"}, {"content": ""}, {"content": "é"}, {"tool_calls": [{}]}):
            await write(delta(**fields))
        await write(delta("stop", content="") + chunk(event(b"[DONE]")) + END)

    server = mock(handler)
    (record,) = ask_all(server.url, [Ask("hi", 1, 9)], CHAT)
    assert record.error == ""
    assert (record.output_len, len(record.itls), record.text) == (4, 3, "hmé")
    body = server.requests[0][2]
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["max_completion_tokens"] == 9


def test_times_are_those_of_the_server(mock: Any) -> None:
    async def handler(body: dict[str, Any], write: Write) -> None:
        await asyncio.sleep(0.1)
        await write(HEAD + chunk(text_event("a")))
        await asyncio.sleep(0.05)
        await write(chunk(text_event("b", "length") + event(b"[DONE]")) + END)

    (record,) = ask_all(mock(handler).url, [ASK])
    assert record.ttft >= 0.1
    assert record.itls[0] == pytest.approx(record.latency - record.ttft)
    assert record.itls[0] >= 0.04


async def _refuse(body: dict[str, Any], write: Write) -> None:
    await write(answer(503, {"error": {"message": "full"}}))


async def _error_event(body: dict[str, Any], write: Write) -> None:
    await write(HEAD + chunk(text_event("a")) + chunk(event({"error": {"message": "engine died"}})))
    await write(chunk(event(b"[DONE]")) + END)


async def _cut(body: dict[str, Any], write: Write) -> None:
    await write(HEAD + chunk(text_event("a")))
    raise EOFError


async def _no_done(body: dict[str, Any], write: Write) -> None:
    await write(HEAD + chunk(text_event("a", "stop")) + END)


async def _empty(body: dict[str, Any], write: Write) -> None:
    await write(HEAD + chunk(event(b"[DONE]")) + END)


async def _not_http(body: dict[str, Any], write: Write) -> None:
    await write(b"hello\r\n\r\n")
    raise EOFError


async def _not_json(body: dict[str, Any], write: Write) -> None:
    await write(HEAD + chunk(event(b"{")) + END)


async def _silent(body: dict[str, Any], write: Write) -> None:
    await write(HEAD + chunk(text_event("a")))
    await asyncio.sleep(30)


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (_refuse, "HTTP 503: .*full"),
        (_error_event, "the server gave up: engine died"),
        (_cut, "closed the connection before"),
        (_no_done, r"without \[DONE\]"),
        (_empty, "sent no token"),
        (_not_http, "not valid HTTP"),
        (_not_json, "not what was expected"),
        (_silent, "timed out"),
    ],
)
def test_what_fails_is_recorded(mock: Any, handler: Handler, error: str) -> None:
    broken = mock(handler)
    record = ask_all(broken.url, [ASK], timeout=0.3)[0]
    assert re.search(error, record.error), record.error
    found = result([record, Record(start=record.start, ttft=0.1, latency=0.1, output_len=1)], 1.0)
    assert (found["completed"], found["failed"]) == (1, 1)


def test_a_server_that_is_not_there() -> None:
    (record,) = ask_all("http://127.0.0.1:1", [ASK])
    assert record.error


def test_connections_are_used_again_and_replaced_when_closed(mock: Any) -> None:
    calls = 0

    async def handler(body: dict[str, Any], write: Write) -> None:
        nonlocal calls
        calls += 1
        await plain(body, write)
        if calls == 2:
            raise EOFError  # closes the connection after a whole answer

    server = mock(handler)

    async def whole() -> list[Record]:
        client = HttpClient(server.url, {})
        records = []
        for _ in range(4):
            records.append(await send(client, TARGET, ASK))
            await asyncio.sleep(0.02)
        await client.close()
        return records

    assert [r.error for r in asyncio.run(whole())] == [""] * 4
    assert server.connections == 2


def test_at_most_so_many_at_once(mock: Any) -> None:
    now = most = 0

    async def handler(body: dict[str, Any], write: Write) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        await plain(body, write)
        now -= 1

    server = mock(handler)
    records = ask_all(server.url, [ASK] * 12, max_concurrency=3)
    assert not any(r.error for r in records)
    assert most == 3
    assert server.connections == 3
    most = 0
    ask_all(server.url, [ASK] * 12)
    assert most == 12


# ---- load -------------------------------------------------------------------------------------------------------


def test_arrivals() -> None:
    assert arrivals(3, math.inf, 1, False, 0) == [0.0] * 3
    assert arrivals(4, 2.0, 1, True, 0) == [0.0, 0.5, 1.0, 1.5]
    for burstiness in (0.2, 1.0, 50.0):
        times = arrivals(4000, 10.0, burstiness, False, 1)
        gaps = np.diff(times)
        assert times[0] == 0.0
        assert (gaps >= 0).all()
        assert 1 / gaps.mean() == pytest.approx(10, rel=0.01)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
    assert arrivals(9, 10.0, 1.0, False, 1) == arrivals(9, 10.0, 1.0, False, 1)
    assert arrivals(0, 10.0, 1.0, False, 1) == []


def test_random_asks() -> None:
    asks = random_asks(20, 10, 8, range_ratio=0.5, prefix_len=4, vocab=50, seed=3)
    assert len({tuple(a.prompt[:4]) for a in asks}) == 1
    assert len({tuple(a.prompt) for a in asks}) == 20
    assert all(len(a.prompt) == a.prompt_len and max(a.prompt) < 50 for a in asks)
    assert {a.prompt_len for a in asks} <= set(range(9, 20))
    assert {a.output_len for a in asks} <= set(range(4, 13))
    (words,) = random_asks(1, 7, 1, texts=True)
    assert len(words.prompt.split()) == words.prompt_len == 7


def test_random_texts_have_about_the_length() -> None:
    class Pairs:
        """Two characters are a token; a character too many is one of its own."""

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [26 * (ord(text[i]) - 97) + (ord(text[i + 1 : i + 2] or "a") - 97) for i in range(0, len(text), 2)]

        def decode(self, ids: list[int]) -> str:
            return "".join(chr(97 + i // 26) + chr(97 + i % 26) for i in ids) + "x"

    for ask in random_asks(8, 30, 1, vocab=676, texts=True, tokenizer=Pairs()):
        assert len(Pairs().encode(ask.prompt, False)) == 31  # the odd character; what was too much is cut
        assert ask.prompt_len == 30


def test_files(tmp_path: Path) -> None:
    share = tmp_path / "share.json"
    talk = [{"value": "one two three four five"}, {"value": "a b c d e"}]
    share.write_text(json.dumps([{"conversations": talk}, {"conversations": talk[:1]}]))
    assert sharegpt_asks(str(share), 3, None, 5, 0) == [Ask("one two three four five", 5, 5)] * 3
    with pytest.raises(InputError, match="--tokenizer"):
        sharegpt_asks(str(share), 3, None, None, 0)
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a b"}\n\n{"prompt": "c", "max_tokens": 3}\n')
    assert prompts_file_asks(str(lines), None, None, 7) == [Ask("a b", 2, 7), Ask("c", 1, 3)]
    lines.write_text('{"text": "a b"}\n')
    with pytest.raises(InputError, match=":1: an object"):
        prompts_file_asks(str(lines), None, None, 7)


# ---- figures ----------------------------------------------------------------------------------------------------


def _records() -> list[Record]:
    return [
        Record(start=10.0, prompt_len=5, output_len=3, ttft=0.1, itls=[0.02, 0.04], latency=0.16, text="a"),
        Record(start=11.5, prompt_len=7, output_len=1, ttft=0.3, latency=0.3, text="b"),
        Record(start=12.0, prompt_len=9, error="HTTP 500: x"),
    ]


def test_result_by_hand() -> None:
    found = result(_records(), 2.0, percentiles=[50, 99.9], limits={"ttft": 200}, request_rate=1.5, texts=True)
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (12, 4)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (1, 2, 8)
    assert found["request_goodput"] == 0.5
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["std_ttft_ms"] == pytest.approx(100)
    assert found["mean_tpot_ms"] == found["p50_tpot_ms"] == pytest.approx(30)
    assert found["mean_itl_ms"] == pytest.approx(30)
    assert found["std_itl_ms"] == pytest.approx(10)
    assert found["p99.9_itl_ms"] == pytest.approx(np.percentile([20, 40], 99.9))
    assert found["mean_e2el_ms"] == pytest.approx(230)
    assert found["itls"] == [[0.02, 0.04], [], []]
    assert found["errors"] == ["", "", "HTTP 500: x"]
    assert found["generated_texts"] == ["a", "b", ""]
    assert json.loads(json.dumps(found)) == found
    assert goodput(_records()[:2], {"e2el": 200, "tpot": 40}) == 1
    assert peaks(_records()[:2]) == (3.0, 1)


def test_the_report_has_the_usual_lines() -> None:
    lines = report(result(_records(), 2.0)).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    named = dict(line.split(":", 1) for line in lines if ":" in line)
    assert float(named["Successful requests"]) == 2
    assert float(named["Mean TTFT (ms)"]) == 200
    assert "Total Token throughput (tok/s)" in named
    assert {"Median ITL (ms)", "P99 TPOT (ms)", "Benchmark duration (s)"} <= set(named)
    assert "-----Time per Output Token (excl. 1st token)------" in lines


def test_no_request_at_all() -> None:
    found = result([Record(error="x")], 1.0)
    assert found["mean_ttft_ms"] == found["p99_itl_ms"] == 0.0
    assert "Successful requests" in report(found)


# ---- the command ------------------------------------------------------------------------------------------------


def test_the_command(mock: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = mock(plain)
    options = ["--num-prompts=6", "--random-input-len=5", "--random-output-len=3", "--request-rate=500"]
    options += ["--save-result", f"--result-dir={tmp_path}", "--result-filename=r.json", "--header=x-a=b"]
    assert main(["bench", "serve", "--base-url", server.url, *options]) == 0
    out = capsys.readouterr().out
    assert "Successful requests:                     6" in out
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["completed"], found["model_id"], found["request_rate"]) == (6, "mock", 500)
    assert found["output_lens"] == [3] * 6
    assert len(server.requests) == 7  # and the first one, which is not counted
    _, headers, body = server.requests[0]
    assert headers["x-a"] == "b"
    assert (body["ignore_eos"], body["temperature"]) == (True, 0)


def test_the_command_with_a_chat_and_a_key(mock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    server = mock(plain)
    options = ["--backend=openai-chat", "--num-prompts=2", "--random-input-len=5", "--random-output-len=3", "--quiet"]
    assert main(["bench", "serve", f"--base-url={server.url}/v1/", *options]) == 0
    path, headers, body = server.requests[-1]
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer k"
    assert len(body["messages"][0]["content"].split()) == 5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--num-prompts=0"], "--num-prompts 0 is not allowed: an integer >= 1"),
        (["--request-rate=-1"], "--request-rate -1.0"),
        (["--burstiness=nan"], "--burstiness nan"),
        (["--dataset-name=sharegpt"], "--dataset-path"),
        (["--extra-body=[]"], "a JSON object"),
        (["--goodput=itl:5"], "--goodput itl:5"),
        (["--metric-percentiles=100"], "--metric-percentiles 100"),
        (["--percentile-metrics=x"], "--percentile-metrics x"),
        (["--header=a"], "NAME=VALUE"),
        (["--random-range-ratio=1"], "from 0 to below 1"),
        (["hello"], "takes options only"),
        (["--base-url=localhost"], "is no address"),
        (["--num-prompt=1"], "Did you mean"),
    ],
)
def test_bad_options(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *options]) == 2
    assert text in capsys.readouterr().err


def test_a_first_request_that_fails_says_why(mock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", mock(_refuse).url, "--num-prompts=2"]) == 1
    assert "the first request failed: HTTP 503" in capsys.readouterr().err
    options = ["--base-url=http://127.0.0.1:1", "--ready-check-timeout-sec=0.01"]
    assert main(["bench", "serve", *options]) == 1
    assert "does not answer" in capsys.readouterr().err
