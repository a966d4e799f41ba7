"""Requests that are served, put together from many features at once, and then broken in places.

Whatever comes of it: 200 or 400 with the right body, never an error of the server, nothing left behind, and the next
good request is served. ``GAPLESS_MUTATIONS`` sets how many.
"""

from __future__ import annotations

import copy
import json
import os
import random
import secrets
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from gapless.server.openapi import document
from live_server import LiveServer, events

COUNT = int(os.environ.get("GAPLESS_MUTATIONS", "40"))
SEED = int(os.environ.get("GAPLESS_SEED", str(secrets.randbelow(10**6))))
DOCUMENT = document("gapless")

SAMPLING: dict[str, list[Any]] = {
    "max_tokens": [1, 2, 3, 5, None],
    "n": [1, 2, 3, 8],
    "temperature": [0, 0.5, 1, 2],
    "top_p": [1, 0.5, 0.01],
    "top_k": [-1, 0, 1, 3, 10**6],
    "min_p": [0, 0.2, 1],
    "seed": [0, 7, -1, 2**63],
    "min_tokens": [0, 1],
    "stop": ["a", ["e", " "], []],
    "stop_token_ids": [[], [5, 6]],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "include_stop_str_in_output": [True, False],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2, 0.1, 2],
    "repetition_penalty": [0.5, 1, 2],
    "logit_bias": [{}, {"5": 100}, {"5": -100, "6": 3.5}],
    "allowed_token_ids": [[5, 6, 7], list(range(331))],
    "bad_words": [[], ["a"], ["the quick"]],
    "prompt_logprobs": [0, 3],
    "stream": [True, False],
    "stream_interval": [1, 3],
    "return_tokens_as_token_ids": [True],
    "return_token_ids": [True],
    "truncate_prompt_tokens": [-1, 2, 5],
    "priority": [0, -5, 5],
    "cache_salt": ["x"],
    "user": ["u"],
    "structured_outputs": [{"choice": ["yes", "no"]}, {"regex": "[ab]{1,3}"}],
    "response_format": [{"type": "text"}, {"type": "json_object"}],
}
COMPLETIONS: dict[str, list[Any]] = {
    **SAMPLING,
    "prompt": ["hello", ["a", "b"], [5, 6, 7], [[5], [6, 7]], "你好"],
    "echo": [True, False],
    "logprobs": [0, 1, 5],
    "best_of": [1],
    "add_special_tokens": [False],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT: dict[str, list[Any]] = {
    **SAMPLING,
    "messages": [
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "x", "tool_call_id": "c"},
        ],
    ],
    "max_completion_tokens": [1, 3],
    "logprobs": [True, False],
    "top_logprobs": [0, 2],
    "tools": [[TOOL], []],
    "tool_choice": ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}],
    "continue_final_message": [True, False],
    "reasoning_effort": ["low"],
    "chat_template_kwargs": [{}, {"enable_thinking": False}],
}
RESPONSES: dict[str, list[Any]] = {
    "input": [
        "hello",
        [{"role": "user", "content": "a"}, {"type": "reasoning", "summary": []}, {"role": "assistant", "content": "b"}],
        [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
    ],
    "instructions": ["be brief"],
    "max_output_tokens": [1, 2, 5],
    "temperature": [0, 1],
    "top_logprobs": [0, 2],
    "stream": [True, False],
    "tools": [[{"type": "function", "name": "f", "parameters": {"type": "object"}}]],
    "tool_choice": ["auto", "required", {"type": "function", "name": "f"}],
    "include": [["message.output_text.logprobs"]],
    "text": [{"format": {"type": "text"}}],
    "metadata": [{"a": "b"}],
}
ROUTES = (
    ("/v1/completions", COMPLETIONS, {"prompt": "hello", "max_tokens": 3}),
    ("/v1/chat/completions", CHAT, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}),
    ("/v1/responses", RESPONSES, {"input": "hello", "max_output_tokens": 3}),
)
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 5e-324, 2**31, -(2**31) - 1, 2**63, -(2**63), 2**64, 10**30, "",
    "x", " ", "\x00", "\ufffd", "a" * 3000, "1", "null", "true", [], [0], [-1], [None], [[]], [{}], ["x"] * 20,
    list(range(500)), {}, {"": None}, {"type": "text"}, {"x": {"y": [1]}}, {"$ref": "#"}, [[[[]]]],
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything within a body."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def body_of(rng: random.Random, features: dict[str, list[Any]], base: dict[str, Any]) -> dict[str, Any]:
    """A request with some features."""
    chosen = rng.sample(sorted(features), rng.randint(0, 8))
    return copy.deepcopy({**base, **{name: rng.choice(features[name]) for name in chosen}})


def break_it(rng: random.Random, body: dict[str, Any], features: dict[str, list[Any]]) -> None:
    """One place of a body becomes something else."""
    path = rng.choice([*places(body), *((name,) for name in features)])
    at: Any = body
    for key in path[:-1]:
        at = at[key]
    if isinstance(at, dict) and path[-1] in at and rng.random() < 0.15:
        del at[path[-1]]
    else:
        at[path[-1]] = copy.deepcopy(rng.choice(JUNK))


def excludes_itself(body: dict[str, Any]) -> bool:
    """Its own fields may leave no token that can be chosen, which shows when it runs."""
    masks = {"allowed_token_ids", "bad_words", "structured_outputs", "response_format", "min_tokens", "tool_choice"}
    return sum(body.get(name) is not None for name in masks) > 1


def check(schema: dict[str, Any], value: Any) -> None:
    jsonschema.validate(value, {**schema, "components": DOCUMENT["components"]})


@pytest.mark.parametrize("broken", [0, 1, 2], ids=["good", "broken", "broken twice"])
def test_mutations(server: LiveServer, broken: int) -> None:
    seed = SEED + broken
    print(f"seed {seed}")
    rng = random.Random(seed)
    served = 0
    for _ in range(COUNT):
        path, features, base = rng.choice(ROUTES)
        body = body_of(rng, features, base)
        for _ in range(broken):
            break_it(rng, body, features)
        said = json.dumps(body)
        response = server.client.post(path, content=said, headers={"content-type": "application/json"})
        if response.status_code == 500 or '"message":"The engine could' in response.text:
            assert excludes_itself(body), (seed, said, response.text)
            assert response.headers.get("x-should-retry", "false") == "false"
            continue
        assert response.status_code in (200, 400, 404), (seed, said, response.text)
        content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
        if response.status_code != 200:
            assert response.json()["error"]["type"] == "invalid_request_error", (seed, said, response.text)
        elif path == "/v1/responses" and body.get("stream"):
            assert "event: response.completed" in response.text or "event: response.incomplete" in response.text
            served += 1
        elif body.get("stream"):
            chunks = events(response.text)
            assert all("error" not in chunk for chunk in chunks), (seed, said, response.text)
            for chunk in chunks:
                check(content["text/event-stream"]["schema"]["x-event"], chunk)
            served += 1
        else:
            check(content["application/json"]["schema"], response.json())
            served += 1
    server.check_idle()
    server.canary()
    assert broken or COUNT < 20 or served > COUNT / 4, f"seed {seed}: only {served} of {COUNT} were served"
