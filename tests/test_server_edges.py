"""What clients offer, forget and leave behind: HTTP's options, pages of other sites, sizes, fields without effect."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import tokenizer
from gapless.errors import ConfigError
from gapless.server.answer import Answer, AnswerForm
from gapless.server.keys import Keys
from gapless.server.limits import MAX_VALUES
from gapless.server.listening import bind, tls
from gapless.server.options import ServerOptions
from gapless.server.prompts import read_template
from gapless.server.reasoning import starts_inside
from gapless.server.tool_prompt import with_tools
from gapless.server.tools import ForcedParser, HermesParser
from live_server import LiveServer, raw, serving

TALK = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(allowed_origins="https://chat.example") as live:
        yield live


def head(path: str, body: bytes, *fields: str, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", *fields, "", ""]).encode() + body


BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.2", "foo"])
@pytest.mark.parametrize("split", [0, 60, 5])
def test_an_upgrade_is_an_offer(server: LiveServer, protocol: str, split: int) -> None:
    fields = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AAMAAABkAAQAAP__")
    data = head("/v1/completions", BODY, *fields) + head("/v1/completions", BODY, "Connection: close")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as s:
        for at in range(0, len(data), split or len(data)):
            s.sendall(data[at : at + (split or len(data))])
        out = b""
        while part := s.recv(65536):
            out += part
    assert out.count(b"HTTP/1.1 200") == 2, out


def test_http_1_0_gets_a_body_without_chunks(server: LiveServer) -> None:
    stream = json.dumps({"prompt": "a", "max_tokens": 3, "stream": True}).encode()
    out = raw(server.port, head("/v1/completions", stream, version="1.0"))
    top, _, text = out.partition(b"\r\n\r\n")
    assert b" 200 " in top
    assert b"chunked" not in top
    assert text.startswith(b"data: ")
    assert text.endswith(b"data: [DONE]\n\n")
    assert b'"choices"' in raw(server.port, head("/v1/completions", BODY, version="1.0"))


def test_expect(server: LiveServer) -> None:
    out = raw(server.port, head("/v1/completions", BODY, "Expect: 100-continue", "Connection: close"))
    assert b" 200 OK" in out


def test_the_scheme_of_a_key_has_no_case() -> None:
    keys = Keys(["abc"])
    assert all(keys.allow(f"{scheme} abc".encode()) for scheme in ("Bearer", "bearer", "BEARER"))
    assert not keys.allow(b"Basic abc")
    assert not keys.allow(b"bearer abcd")
    assert not keys.allow(None)


def test_all_pipelined_requests_end_with_their_client(server: LiveServer) -> None:
    long = json.dumps({"prompt": "a", "max_tokens": 100, "n": 2, "ignore_eos": True}).encode()
    with server.gated() as gate:
        gate.open.clear()
        with socket.create_connection(("127.0.0.1", server.port)) as s:
            s.sendall(head("/v1/completions", long))
            while not server.front_end.tickets:
                time.sleep(0.01)
            s.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" + head("/v1/completions", long))
            time.sleep(0.1)
        end = time.monotonic() + 5
        while server.front_end.tickets and time.monotonic() < end:
            time.sleep(0.01)
        assert not server.front_end.tickets
        gate.open.set()
    server.check_idle()


# ---- pages of other sites -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/ping", "/pause"])
def test_other_sites_cannot_post(server: LiveServer, path: str) -> None:
    for fields in (
        {"origin": "https://page.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"origin": "http://localhost:1"},
    ):
        answer = server.client.post(path, content=BODY, headers={**fields, **JSON})
        assert answer.status_code == 403, (fields, answer.text)
        assert "access-control-allow-origin" not in answer.headers


def test_a_body_must_be_said_to_be_json(server: LiveServer) -> None:
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        fields = {} if kind is None else {"content-type": kind}
        answer = server.client.post("/v1/completions", content=BODY, headers=fields)
        assert answer.status_code == 415


def test_own_and_allowed_pages(server: LiveServer) -> None:
    own = server.client.post("/v1/completions", content=BODY, headers={"origin": server.url, **JSON})
    assert own.status_code == 200
    assert "access-control-allow-origin" not in own.headers
    page = {"origin": "https://chat.example"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-a"}
    preflight = server.client.options("/v1/completions", headers={**page, **asked})
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == page["origin"]
    assert preflight.headers["access-control-allow-headers"] == "authorization,x-a"
    answer = server.client.post("/v1/completions", content=BODY, headers={**page, **JSON})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == page["origin"]
    refused = server.client.options("/v1/completions", headers={"origin": "https://page.example", **asked})
    assert refused.status_code == 405
    assert "access-control-allow-origin" not in refused.headers


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_every_list_has_a_bound(server: LiveServer) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"stop_token_ids": [1] * 1000}, "stop_token_ids"),
        ("/v1/completions", {"bad_words": ["a"] * 1000}, "bad_words"),
        ("/v1/completions", {"bad_words": ["a " * 100_000]}, "bad_words"),
        ("/v1/completions", {"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 9000}]},
         "messages[0].content"),
        ("/v1/chat/completions", {"messages": TALK, "tools": [{"type": "function", "function": {
            "name": "f", "description": "word " * 100_000}}]}, "tools"),
    ]  # fmt: skip
    for path, fields, param in cases:
        answer = server.post(path, {"prompt": "a", "max_tokens": 1, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


def test_large_bodies_hold_nobody_up(server: LiveServer) -> None:
    ids = b'{"prompt": "a", "allowed_token_ids": [' + b"1," * (MAX_VALUES - 10) + b"1]}"
    many = b'{"prompt": "a", "stop_token_ids": [' + b"1," * (2 * MAX_VALUES) + b"1]}"
    text = json.dumps({"messages": [{"role": "user", "content": "word " * 5_000_000}]}).encode()
    slowest, done = 0.0, threading.Event()

    def probe() -> None:
        nonlocal slowest
        while not done.wait(0.01):
            begin = time.perf_counter()
            assert server.client.get("/health").status_code == 200
            slowest = max(slowest, time.perf_counter() - begin)

    thread = threading.Thread(target=probe)
    thread.start()
    for path, body in (("completions", ids), ("completions", many), ("chat/completions", text)):
        answer = server.client.post(f"/v1/{path}", content=body, headers=JSON)
        assert answer.status_code == 400, answer.text
    done.set()
    thread.join()
    assert slowest < 1.0  # a loose bound: this machine may be busy with other tests


def test_a_bound_is_no_count(server: LiveServer) -> None:
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 100_000}]})
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "at least " in error["message"]


# ---- accepted means done ---------------------------------------------------------------------------------------------


def test_fields_without_effect_are_named(server: LiveServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "user": "u", "tempurature": 1, "seed": 1})
    assert answer.headers["gapless-warning"] == "without effect: user, tempurature"
    quiet = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "new": None, "metadata": {}})
    assert "gapless-warning" not in quiet.headers


def test_older_names_of_forms(server: LiveServer) -> None:
    for fields, good in (
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_regex": "aa|bb"}, ("aa", "bb")),
        ({"guided_json": {"enum": [17]}}, ("17",)),
        ({"guided_json": '{"enum": [17]}'}, ("17",)),
        ({"guided_grammar": 'start: "x" "y"'}, ("xy",)),
    ):
        answer = server.post("/v1/chat/completions", {"messages": TALK, "max_tokens": 16, **fields}).json()
        assert answer["choices"][0]["message"]["content"].strip() in good, fields
    both = {"guided_regex": "a", "guided_choice": ["a"]}
    assert server.post("/v1/completions", {"prompt": "a", **both}).status_code == 400


def test_a_stream_says_what_was_asked_of_the_prompt(server: LiveServer) -> None:
    body = {"messages": TALK, "max_tokens": 3, "prompt_logprobs": 1, "return_token_ids": True, "temperature": 0}
    whole = server.post("/v1/chat/completions", body).json()
    first, *others = server.stream("/v1/chat/completions", body)
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in others)


def test_a_format_is_for_texts_and_a_forced_call_is_none(server: LiveServer) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
                                        "additionalProperties": False}}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": 2}}}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        body = {"messages": TALK, "tools": [{"type": "function", "function": tool}], "tool_choice": choice,
                "parallel_tool_calls": False, "response_format": form, "max_tokens": 90, "temperature": 0,
                "logit_bias": {str(i): -100 for t, i in tokenizer().vocab.items() if t in "ĠĉĊč"}}  # fmt: skip
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["tool_calls"]


def test_thoughts() -> None:
    text = "I think</think>so"
    for show, want in ((True, "I think"), (False, "")):
        pieces = Answer(AnswerForm(reasoning=True, inside=True, show_reasoning=show)).push(text, last=True)
        assert (pieces.reasoning, pieces.content) == (want, "so")
    assert starts_inside("x<think>\n")
    assert starts_inside("a<think>and then", "<think>and then")
    assert not starts_inside("a<think>and</think>then", "<think>and</think>then")


ONE = '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>'


def test_one_call_where_only_one_is_wanted() -> None:
    form = AnswerForm(tools=frozenset("f"), tool_form="hermes", max_calls=1)
    answer = Answer(form)
    calls = [c for text in (ONE % 1, ONE % 2, "") for c in answer.push(text, last=not text).calls]
    assert [c.function.arguments for c in calls] == ['{"a":1}']


def test_half_a_surrogate_costs_no_answer() -> None:
    parser = HermesParser()
    _, (call,) = parser.push(ONE % '"\\ud83d"')
    assert json.loads(str(call.function.arguments)) == {"a": "\ud83d"}
    str(call.function.arguments).encode()
    named = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
    text, calls = parser.push(named)
    assert text == named
    assert not calls


def test_tools_without_a_place_in_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    talk = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    found = with_tools(talk, [{"type": "function", "function": {"name": "f"}}])
    assert found[0]["content"].startswith("Be kind.")
    assert '"name": "f"' in found[0]["content"]
    assert found[2]["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert found[3] == {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}
    assert with_tools(talk[1:2], [])[0]["role"] == "system"


# ---- files, and routes that are not there ----------------------------------------------------------------------------


def test_a_unix_socket_takes_no_other_file_away(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        bind(ServerOptions(uds=str(path)))
    assert path.read_text() == "mine"
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="no socket"):
        bind(ServerOptions(uds=str(link)))
    left = tmp_path / "left"
    bind(ServerOptions(uds=str(left))).close()
    again = bind(ServerOptions(uds=str(left)))  # of a process that is gone
    with pytest.raises(ConfigError):
        bind(ServerOptions(uds=str(left)))
    again.close()


def test_certificates(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key)]
    command += ["-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(command, check=True, capture_output=True)
    assert isinstance(tls(ServerOptions(ssl_certfile=str(certificate), ssl_keyfile=str(key))), ssl.SSLContext)
    for wrong in (tmp_path / "none", certificate, key):
        with pytest.raises(ConfigError, match="ssl_certfile"):
            tls(ServerOptions(ssl_certfile=str(wrong)))
    with pytest.raises(ConfigError, match="ssl_keyfile"):
        ServerOptions(ssl_keyfile=str(key))
    locked = tmp_path / "locked"
    subprocess.run(["openssl", "rsa", "-aes256", "-passout", "pass:abcd", "-in", str(key), "-out", str(locked)],
                   check=True, capture_output=True)  # fmt: skip
    with pytest.raises(ConfigError, match="password"):
        tls(ServerOptions(ssl_certfile=str(certificate), ssl_keyfile=str(locked)))


def test_chat_templates(tmp_path: Path) -> None:
    path = tmp_path / "template"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert read_template(str(path)) == path.read_text()
    path.write_text("{% for m in messages %}")
    for wrong in (str(path), str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(ConfigError, match="chat_template"):
            read_template(wrong)
    assert read_template(None) is None


def test_routes_of_other_servers(server: LiveServer) -> None:
    for path, word in (("/v1/embeddings", "embeddings"), ("/score", "scores"), ("/v1/load_lora_adapter", "--lora"),
                       ("/v1/nothing", "There is no")):  # fmt: skip
        answer = server.post(path, {})
        assert answer.status_code == 404
        assert word in answer.json()["error"]["message"]


def test_a_request_has_a_limit_of_time(server: LiveServer) -> None:
    with server.gated() as gate:
        gate.open.clear()
        threading.Timer(0.3, lambda: server.loop.call_soon_threadsafe(server.front_end.end_old, 0.1)).start()  # type: ignore[union-attr]
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 8})
        gate.open.set()
    assert answer.status_code == 408
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("end", range(75))
def test_a_cut_list_of_calls_is_no_text(end: int) -> None:
    whole = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "]"}}]'
    parser = ForcedParser(None)
    parser.push(" " + whole[: end + 1])
    text, calls = parser.finish()
    assert not text
    assert [c.function.name for c in calls] == ["f", "g"][: whole[: end + 1].count('arguments":')]
    assert all(str(c.function.arguments) in whole.replace(" ", "") + whole for c in calls)


def test_usage_says_what_was_cached(server: LiveServer) -> None:
    text = "seven " * 12
    talk = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    bodies = {
        "completions": {"prompt": text, "max_tokens": 2},
        "chat/completions": talk,
        "responses": {"input": text, "max_output_tokens": 2},
    }
    for name, body in bodies.items():
        server.post(f"/v1/{name}", body)
        before = server.engine.scheduler.snapshot().prefix_hit_tokens
        usage = server.post(f"/v1/{name}", body).json()["usage"]
        true = server.engine.scheduler.snapshot().prefix_hit_tokens - before
        assert true > 0
        kind = "input_tokens_details" if name == "responses" else "prompt_tokens_details"
        assert usage[kind]["cached_tokens"] == true
        if name != "responses":
            last = server.stream(f"/v1/{name}", {**body, "stream_options": {"include_usage": True}})[-1]
            assert last["usage"][kind]["cached_tokens"] == true
