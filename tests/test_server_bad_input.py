"""Bad input: each case gets the right code and a message that names the field, and the next request is served.

One server takes all of it, one after the other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from live_server import LiveServer, serving

TALK = [{"role": "user", "content": "hello"}]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
NOTHING = object()


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(max_body_bytes=4 * 2**20) as live:
        yield live


def completion(**fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": "hello", "max_tokens": 2, **fields}
    return {name: value for name, value in body.items() if value is not NOTHING}


def chat(**fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": TALK, "max_tokens": 2, **fields}
    return {name: value for name, value in body.items() if value is not NOTHING}


def tools(**function: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **function}}]


CASES: dict[str, tuple[str, Any, int, str]] = {
    # 1: longer than the model's context, and 2: far longer
    "prompt too long": (COMPLETIONS, completion(prompt=[5] * 128), 400, "prompt"),
    "prompt and max_tokens too long": (COMPLETIONS, completion(prompt=[5] * 100, max_tokens=50), 400, "prompt"),
    "chat too long": (CHAT, chat(messages=[{"role": "user", "content": "h " * 300}]), 400, "prompt"),
    "a megabyte of text": (COMPLETIONS, completion(prompt="a" * 2**20), 400, "prompt"),
    "keep nothing": (COMPLETIONS, completion(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens"),
    # 3, 4, 5: prompts
    "empty prompt": (COMPLETIONS, completion(prompt=""), 400, "prompt"),
    "empty list": (COMPLETIONS, completion(prompt=[]), 400, "prompt"),
    "empty ids": (COMPLETIONS, completion(prompt=[[]]), 400, "prompt"),
    "no prompt": (COMPLETIONS, completion(prompt=NOTHING), 400, "prompt"),
    "null prompt": (COMPLETIONS, completion(prompt=None), 400, "prompt"),
    "a number": (COMPLETIONS, completion(prompt=5), 400, "prompt"),
    "mixed": (COMPLETIONS, completion(prompt=["a", 5]), 400, "prompt"),
    "nested": (COMPLETIONS, completion(prompt=[[[1]]]), 400, "prompt"),
    "too many prompts": (COMPLETIONS, completion(prompt=["a"] * 1025), 400, "prompt"),
    "negative id": (COMPLETIONS, completion(prompt=[-1]), 400, "prompt"),
    "large id": (COMPLETIONS, completion(prompt=[331]), 400, "prompt"),
    "huge id": (COMPLETIONS, completion(prompt=[2**63]), 400, "prompt"),
    "float id": (COMPLETIONS, completion(prompt=[1.0]), 400, "prompt"),
    "bool id": (COMPLETIONS, completion(prompt=[True]), 400, "prompt"),
    "bool among ids": (COMPLETIONS, completion(prompt=[5, True]), 400, "prompt"),
    "no messages": (CHAT, chat(messages=[]), 400, "messages"),
    "messages missing": (CHAT, chat(messages=NOTHING), 400, "messages"),
    # 6: max_tokens
    **{f"max_tokens {v!r}": (COMPLETIONS, completion(max_tokens=v), 400, "max_tokens")
       for v in (-1, 0, 1.5, "5", True)},
    "max_tokens 2**62": (COMPLETIONS, completion(max_tokens=2**62), 400, "prompt"),
    "chat max_tokens 0": (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    "min over max": (COMPLETIONS, completion(min_tokens=3), 400, "min_tokens"),
    # 7, 8: sampling
    **{f"temperature {v!r}": (COMPLETIONS, completion(temperature=v), 400, "temperature") for v in (-0.1, 2.1, "hot")},
    "temperature NaN": (COMPLETIONS, b'{"prompt": "hello", "temperature": NaN}', 400, ""),
    "temperature Infinity": (COMPLETIONS, b'{"prompt": "hello", "temperature": Infinity}', 400, ""),
    "temperature 1e999": (COMPLETIONS, b'{"prompt": "hello", "temperature": 1e999}', 400, "temperature"),
    **{f"top_p {v!r}": (COMPLETIONS, completion(top_p=v), 400, "top_p") for v in (0, 1.1, -1)},
    **{f"top_k {v!r}": (COMPLETIONS, completion(top_k=v), 400, "top_k") for v in (-2, 1.5)},
    "top_k 10**30": (COMPLETIONS, completion(top_k=10**30), 400, "top_k"),
    **{f"min_p {v!r}": (COMPLETIONS, completion(min_p=v), 400, "min_p") for v in (-0.1, 1.1)},
    **{f"{n}": (COMPLETIONS, completion(**{n: 2.1}), 400, n) for n in ("presence_penalty", "frequency_penalty")},
    **{f"repetition {v}": (COMPLETIONS, completion(repetition_penalty=v), 400, "repetition_penalty")
       for v in (0, -1, 1e9)},
    "seed 2**64": (COMPLETIONS, completion(seed=2**64), 400, "seed"),
    # 9: n
    **{f"n {v!r}": (COMPLETIONS, completion(n=v), 400, "n") for v in (0, -1, 10**9, 1.5)},
    "n of many prompts": (COMPLETIONS, completion(n=128, prompt=["a"] * 100), 400, "n"),
    "best_of": (COMPLETIONS, completion(best_of=5), 400, "best_of"),
    # 10: log-probabilities
    **{f"logprobs {v!r}": (COMPLETIONS, completion(logprobs=v), 400, "logprobs") for v in (-1, 21, 10**6, "x")},
    "prompt_logprobs": (COMPLETIONS, completion(prompt_logprobs=21), 400, "prompt_logprobs"),
    "top_logprobs": (CHAT, chat(logprobs=True, top_logprobs=21), 400, "logprobs"),
    "top_logprobs alone": (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    # 11: logit_bias
    "bias id": (COMPLETIONS, completion(logit_bias={"331": 1}), 400, "logit_bias"),
    "bias key": (COMPLETIONS, completion(logit_bias={"a": 1}), 400, "logit_bias"),
    "bias value": (COMPLETIONS, completion(logit_bias={"5": 1e9}), 400, "logit_bias"),
    "bias NaN": (COMPLETIONS, b'{"prompt": "hello", "logit_bias": {"5": NaN}}', 400, ""),
    "bias size": (COMPLETIONS, completion(logit_bias={str(i): 1 for i in range(100_000)}), 400, "logit_bias"),
    "allowed ids": (COMPLETIONS, completion(allowed_token_ids=[400]), 400, "allowed_token_ids"),
    "no allowed ids": (COMPLETIONS, completion(allowed_token_ids=[]), 400, "allowed_token_ids"),
    "bad words": (COMPLETIONS, completion(bad_words=[""]), 400, "bad_words"),
    "many bad words": (COMPLETIONS, completion(bad_words=[str(i) for i in range(2000)]), 400, "bad_words"),
    # 12: stops
    "many stops": (COMPLETIONS, completion(stop=["a"] * 100_000), 400, "stop"),
    "empty stop": (COMPLETIONS, completion(stop=[""]), 400, "stop"),
    "long stop": (COMPLETIONS, completion(stop="a" * 2**20), 400, "stop"),
    "stop of another type": (COMPLETIONS, completion(stop=5), 400, "stop"),
    "stop id": (COMPLETIONS, completion(stop_token_ids=[331]), 400, "stop_token_ids"),
    "negative stop id": (COMPLETIONS, completion(stop_token_ids=[-1]), 400, "stop_token_ids"),
    "many stop ids": (COMPLETIONS, completion(stop_token_ids=list(range(300))), 400, "stop_token_ids"),
    # 15: JSON
    "no body": (COMPLETIONS, b"", 400, ""),
    "no JSON": (COMPLETIONS, b"prompt=hello", 400, ""),
    "a list": (COMPLETIONS, b"[]", 400, ""),
    "half": (COMPLETIONS, b'{"prompt": "hel', 400, ""),
    "more": (COMPLETIONS, b'{"prompt": "hello"} {}', 400, ""),
    "bad UTF-8": (COMPLETIONS, b'{"prompt": "\xff\xfe"}', 400, ""),
    "surrogate": (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, ""),
    "mark": (COMPLETIONS, b'\xef\xbb\xbf{"prompt": "hello"}', 400, ""),
    "deep": (COMPLETIONS, b'{"x": ' + b"[" * 100_000, 400, ""),
    "deep prompt": (COMPLETIONS, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, ""),
    "a long number": (COMPLETIONS, b'{"prompt": "hello", "max_tokens": ' + b"9" * 2**20 + b"}", 400, "max_tokens"),
    "a large body": (COMPLETIONS, b" " * (5 * 2**20), 413, ""),
    # 18: models
    **{f"model {v[:20]!r}": (COMPLETIONS, completion(model=v), 404, "model")
       for v in ("other", "Tiny", "../../etc/passwd", "x" * 2**20)},
    "model of another type": (COMPLETIONS, completion(model=5), 400, "model"),
    # 19: tools and forms
    "a tool that is none": (CHAT, chat(tools=[{"type": "function"}]), 400, "tools[0]"),
    "a tool of another type": (CHAT, chat(tools=[{"type": "code", "function": {"name": "f"}}]), 400, "tools[0].type"),
    "a tool without a name": (CHAT, chat(tools=tools(name="")), 400, "tools"),
    "a tool twice": (CHAT, chat(tools=tools() * 2), 400, "tools"),
    "many tools": (CHAT, chat(tools=[t for i in range(200) for t in tools(name=f"f{i}")]), 400, "tools"),
    "tool_choice of no tool": (CHAT, chat(tool_choice={"type": "function", "function": {"name": "g"}}), 400,
                               "tool_choice"),
    "tool_choice of another": (CHAT, chat(tool_choice="some", tools=tools()), 400, "tool_choice"),
    "functions": (CHAT, chat(functions=[{"name": "f"}]), 400, "functions"),
    "format of no kind": (CHAT, chat(response_format={"type": "xml"}), 400, "response_format"),
    "format without kind": (CHAT, chat(response_format={}), 400, "response_format"),
    "format without schema": (CHAT, chat(response_format={"type": "json_schema"}), 400, "response_format"),
    "format that is deep": (CHAT, chat(response_format={"type": "json_schema", "json_schema": {
        "schema": json.loads('{"items":' * 500 + "{}" + "}" * 500)}}), 400, "response_format"),
    "format that is large": (CHAT, chat(response_format={"type": "json_schema", "json_schema": {
        "schema": {"enum": ["x" * 100] * 20_000}}}), 400, "response_format"),
    "format with a loop": (CHAT, chat(response_format={"type": "json_schema", "json_schema": {
        "schema": {"$ref": "#"}}}), 400, "structured_outputs"),
    "a long regex": (CHAT, chat(structured_outputs={"regex": "a" * 20_000}), 400, "structured_outputs"),
    "regex": (CHAT, chat(structured_outputs={"regex": "(["}), 400, "structured_outputs"),
    "two forms": (CHAT, chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}), 400,
                  "response_format"),
    "form of no kind": (CHAT, chat(structured_outputs={"xml": "a"}), 400, "structured_outputs"),
    "required without tools": (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    "priority": (CHAT, chat(priority=10**9), 400, "priority"),
    "salt": (CHAT, chat(cache_salt=""), 400, "cache_salt"),
    # 20, 21, 23: templates, messages, fetches
    "a template": (CHAT, chat(chat_template="{% for i in range(10**9) %}{% endfor %}"), 400, "chat_template"),
    "template options": (CHAT, chat(chat_template_kwargs={"tokenize": True}), 400, "chat_template_kwargs"),
    "template option": (CHAT, chat(chat_template_kwargs={"enable_thinking": [1]}), 400, "chat_template_kwargs"),
    "template that is": (CHAT, chat(chat_template_kwargs={"chat_template": "x"}), 400, "chat_template_kwargs"),
    "both ends": (CHAT, chat(continue_final_message=True, add_generation_prompt=True), 400, "continue_final_message"),
    "role": (CHAT, chat(messages=[{"role": "wizard", "content": "x"}]), 400, "messages[0].role"),
    "no role": (CHAT, chat(messages=[{"content": "x"}]), 400, "messages[0]"),
    "no content": (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content"),
    "content": (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content"),
    "a picture": (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {
        "url": "http://169.254.169.254/"}}]}]), 400, "messages[0].content[0]"),
    "a file": (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {
        "url": "file:///etc/passwd"}}]}]), 400, "messages[0].content[0]"),
    "a part without text": (CHAT, chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), 400,
                            "messages[0].content[0]"),
    "embeddings": (COMPLETIONS, completion(prompt_embeds="AAAA"), 400, "prompt_embeds"),
    "suffix": (COMPLETIONS, completion(suffix="x"), 400, "suffix"),
    "12,000 faults": (CHAT, chat(messages=[{"role": 1, "content": {}}] * 12_000), 400, "messages[0].role"),
    # responses
    **{f"responses {list(b)}": (RESPONSES, b, 400, param) for b, param in (
        ({}, "input"), ({"input": ""}, "input"), ({"input": []}, "input"),
        ({"input": "x", "previous_response_id": "r"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "max_output_tokens": 0}, "max_tokens"),
        ({"input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}], "store": True}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}], "user": "u"}, "messages[0].content[0]"),
        ({"input": [{"type": "function_call_output"}], "top_p": 1}, "input[0]"),
    )},
    # the rest
    "stream options": (COMPLETIONS, completion(stream_options={"include_usage": True}), 400, "stream_options"),
    "stream interval": (COMPLETIONS, completion(stream=True, stream_interval=0), 400, "stream_interval"),
    "millions of ids": (COMPLETIONS, completion(prompt=[1] * 10**6), 400, "prompt"),
    "many ids to text": ("/detokenize", {"tokens": [5] * (2**17 + 1)}, 400, "tokens"),
    "tokens to text": ("/detokenize", {"tokens": [331]}, 400, "tokens"),
    "negative to text": ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    "tokenize nothing": ("/tokenize", {}, 400, "prompt"),
    "tokenize both": ("/tokenize", {"prompt": "x", "messages": TALK}, 400, "prompt"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input(server: LiveServer, name: str) -> None:
    path, body, status, param = CASES[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    start = time.process_time()  # of the server, too: a busy machine does not count
    response = server.client.post(path, content=content, headers={"content-type": "application/json"})
    assert time.process_time() - start < 5
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert len(response.content) < 1200
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert (error["param"] or "") == param, error
    if "too long" in name:
        assert error["code"] == "context_length_exceeded"
    if status == 404:
        assert error["code"] == "model_not_found"
    server.canary()


def test_other_media_types(server: LiveServer) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        response = server.client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": kind})
        assert response.status_code == 415
    kind = "application/json; charset=utf-8"
    response = server.client.post(COMPLETIONS, content=json.dumps(completion()), headers={"content-type": kind})
    assert response.status_code == 200


def test_odd_but_good(server: LiveServer) -> None:
    """What must not be refused: NUL, U+FFFD, line separators, equal keys, unknown fields, null everywhere."""
    for body in (
        b'{"prompt": "a\\u0000b", "max_tokens": 1}',
        '{"prompt": "\ufffd\u2028\u2029", "max_tokens": 1}'.encode(),
        b'{"prompt": "a", "max_tokens": 9, "max_tokens": 1}',
        b'{"prompt": "a", "max_tokens": 1, "unknown": {"deep": [1, 2, {"x": null}]}, "n": null, "stop": null}',
        b'  {"prompt": "a", "max_tokens": 1}\n',
    ):
        response = server.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 200, response.text


def test_admin_routes_are_not_there(server: LiveServer) -> None:
    for path in (
        "/start_profile",
        "/stop_profile",
        "/flush_cache",
        "/reset_prefix_cache",
        "/update_weights",
        "/v1/load",
    ):
        assert server.post(path, {}).status_code == 404


def test_what_is_clamped_and_cut(server: LiveServer) -> None:
    """A default number of tokens shrinks to what fits; a prompt is cut only for who asks for it."""
    answer = server.post(COMPLETIONS, {"prompt": [5] * 120, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 8
    cut = server.post(COMPLETIONS, completion(prompt=[5] * 300, truncate_prompt_tokens=20))
    assert cut.status_code == 400  # what cannot fit is refused before it is cut
    cut = server.post(COMPLETIONS, completion(prompt=[5] * 100, truncate_prompt_tokens=20)).json()
    assert cut["usage"]["prompt_tokens"] == 20
