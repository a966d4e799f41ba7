"""The server from the outside: what clients of OpenAI's interface send, and what they must get."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import time
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from engines import model, options, tokenizer, wait_until
from gapless import LLM, SamplingParams
from live_server import LiveServer, serving

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
TALK = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What the library itself answers."""
    with LLM(**options()) as llm:
        texts = ["hello", "the quick", "你好"]
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        outputs = llm.generate(texts, params, use_tqdm=False)
        chat = llm.chat(TALK, params, use_tqdm=False)
    return {**{t: o.outputs[0] for t, o in zip(texts, outputs, strict=True)}, "chat": chat[0].outputs[0]}


# ---- completions ------------------------------------------------------------------------------------------------


def test_completion(server: LiveServer, expected: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 9, **GREEDY}).json()
    assert answer["id"].startswith("cmpl-")
    assert len(answer["id"]) == 37
    assert answer["object"] == "text_completion"
    assert abs(answer["created"] - time.time()) < 60
    (choice,) = answer["choices"]
    assert choice["text"] == expected["hello"].text
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    prompt = len(tokenizer()("hello")["input_ids"])
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (prompt, 9, prompt + 9)


def test_prompt_forms(server: LiveServer, expected: dict[str, Any]) -> None:
    texts = ["hello", "the quick", "你好"]
    ids = [tokenizer()(text)["input_ids"] for text in texts]
    want = [expected[text].text for text in texts]
    for prompt, count in ((texts[0], 1), (texts, 3), (ids[0], 1), (ids, 3)):
        answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 9, **GREEDY}).json()
        assert [c["text"] for c in answer["choices"]] == want[:count]
        assert [c["index"] for c in answer["choices"]] == list(range(count))


@pytest.mark.parametrize("interval", [1, 4])
def test_stream_of_completions(server: LiveServer, expected: dict[str, Any], interval: int) -> None:
    body = {"prompt": ["hello", "你好"], "max_tokens": 9, "stream_interval": interval, **GREEDY}
    chunks = server.stream("/v1/completions", body)
    for index, text in enumerate(("hello", "你好")):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in own) == expected[text].text
        assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == "length"
    assert all("usage" not in c and len(c["choices"]) == 1 for c in chunks)
    assert len({c["id"] for c in chunks}) == 1


def test_usage_as_asked(server: LiveServer) -> None:
    body = {"prompt": "hello", "max_tokens": 3, **GREEDY}
    assert all("usage" not in c for c in server.stream("/v1/completions", {**body, "stream_options": {}}))
    chunks = server.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert all("usage" not in c for c in chunks[:-1])
    both = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.stream("/v1/completions", {**body, "stream_options": both})
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    refused = server.post("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert refused.status_code == 400
    assert "Stream options can only be defined when `stream=True`" in refused.json()["error"]["message"]


def test_n_and_seed(server: LiveServer) -> None:
    body = {"prompt": ["hello", "the"], "n": 3, "seed": 4, "max_tokens": 8, "temperature": 1, "ignore_eos": True}
    choices = server.post("/v1/completions", body).json()["choices"]
    assert [c["index"] for c in choices] == list(range(6))
    assert len({c["text"] for c in choices[:3]}) == 3
    streamed = dict.fromkeys(range(6), "")
    for chunk in server.stream("/v1/completions", body):
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == {c["index"]: c["text"] for c in choices}


def test_stop(server: LiveServer, expected: dict[str, Any]) -> None:
    text = expected["hello"].text
    stop = text[3:5]
    body = {"prompt": "hello", "max_tokens": 9, "stop": [stop], **GREEDY}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[: text.index(stop)], "stop", stop)
    chunks = [c["choices"][0] for c in server.stream("/v1/completions", body)]
    assert "".join(c["text"] for c in chunks) == choice["text"]
    assert chunks[-1]["stop_reason"] == stop


def test_nulls_are_defaults(server: LiveServer) -> None:
    body = {
        "model": "tiny", "prompt": ["hi"], "frequency_penalty": 0, "logprobs": None, "max_tokens": 5, "n": 1,
        "presence_penalty": 0, "seed": None, "temperature": 0.7, "top_p": 1, "stop": None, "stream": None,
        "logit_bias": None, "user": None, "an_unknown_field": {"x": [1]},
    }  # fmt: skip
    assert server.post("/v1/completions", body).status_code == 200


def test_loglikelihood_of_a_harness(server: LiveServer) -> None:
    """Echo, one new token, exact equality of the chosen and the most likely token's value."""
    ids = tokenizer()("hello world, the quick brown fox")["input_ids"]
    body = {"prompt": [ids], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    headers = {"Authorization": "Bearer ", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps({"model": "tiny", **body}), headers)
    logprobs = json.load(connection.getresponse())["choices"][0]["logprobs"]
    connection.close()
    values, top = logprobs["token_logprobs"], logprobs["top_logprobs"]
    assert len(values) == len(top) == len(logprobs["tokens"]) == len(ids) + 1
    assert values[0] is None
    assert top[0] is None
    assert values[-1] == max(top[-1].values())
    import torch

    with torch.no_grad():
        want = model()(torch.tensor([ids])).logits.log_softmax(-1)[0]
    for i in range(1, len(ids)):
        assert values[i] == pytest.approx(float(want[i - 1, ids[i]]), abs=1e-3)
        assert (values[i] == max(top[i].values())) == (int(want[i - 1].argmax()) == ids[i])
    assert logprobs["text_offset"][0] == 0
    offsets = np.cumsum([0, *(len(t) for t in logprobs["tokens"][:-1])])
    assert logprobs["text_offset"] == offsets.tolist()


def test_echo(server: LiveServer, expected: dict[str, Any]) -> None:
    body = {"prompt": "hello", "max_tokens": 9, "echo": True, **GREEDY}
    whole = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert whole == "hello" + expected["hello"].text
    chunks = server.stream("/v1/completions", {**body, "logprobs": 1})
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole
    counted = sum(len(c["choices"][0]["logprobs"]["tokens"]) for c in chunks)
    assert counted == len(tokenizer()("hello")["input_ids"]) + 9
    only = server.post("/v1/completions", {**body, "max_tokens": 0, "logprobs": 0}).json()
    assert only["choices"][0]["text"] == "hello"
    assert only["usage"]["completion_tokens"] == 0
    assert len(only["choices"][0]["logprobs"]["tokens"]) == len(tokenizer()("hello")["input_ids"])


def test_offsets_of_a_stream_are_those_of_the_whole(server: LiveServer, expected: dict[str, Any]) -> None:
    """Also while text is held back, because it may begin a stop string, and inside a character."""
    text = expected["hello"].text
    body = {"prompt": "hello", "max_tokens": 9, "logprobs": 0, "stop": [text + "!"], **GREEDY}
    for more in ({}, {"echo": True}, {"return_tokens_as_token_ids": True}):
        whole = server.post("/v1/completions", {**body, **more}).json()["choices"][0]["logprobs"]
        chunks = [c["choices"][0]["logprobs"] for c in server.stream("/v1/completions", {**body, **more})]
        assert len(chunks) > 1
        for name, values in whole.items():
            assert [value for chunk in chunks for value in chunk[name]] == values, name


def test_token_ids(server: LiveServer, expected: dict[str, Any]) -> None:
    body = {"prompt": "hello", "max_tokens": 9, "return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = server.post("/v1/completions", {**body, "logprobs": 1, **GREEDY}).json()["choices"]
    assert choice["token_ids"] == expected["hello"].token_ids
    assert choice["prompt_token_ids"] == tokenizer()("hello")["input_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in choice["token_ids"]]


# ---- chat -------------------------------------------------------------------------------------------------------


def test_chat(server: LiveServer, expected: dict[str, Any]) -> None:
    answer = server.post("/v1/chat/completions", {"messages": TALK, "max_tokens": 9, **GREEDY}).json()
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == expected["chat"].text
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    again = server.post("/v1/chat/completions", {"messages": parts, "max_completion_tokens": 9, **GREEDY}).json()
    assert again["choices"][0]["message"] == choice["message"]


def test_stream_of_chat(server: LiveServer, expected: dict[str, Any]) -> None:
    body = {"messages": TALK, "max_tokens": 9, "n": 2, "stream_options": {"include_usage": True}, **GREEDY}
    *chunks, last = server.stream("/v1/chat/completions", body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 18
    for index in range(2):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in c["delta"] for c in own[1:])
        assert "".join(c["delta"]["content"] for c in own) == expected["chat"].text
        assert own[-1]["finish_reason"] == "length"
        assert 2 <= len(own) <= 10  # a late task sends several tokens at once
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


def test_stream_of_chat_with_drafts() -> None:
    """Several tokens of a step are one event: text, log-probabilities and usage add up to the whole answer's."""
    few = {str(token): 100.0 for token in (40, 41)}  # text that repeats itself, so that drafts are right
    body = {"messages": TALK, "max_tokens": 30, "logit_bias": few, "logprobs": True, "n": 2, "seed": 1, **GREEDY}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "min_ngram": 1}
    with serving(engine={"speculative": drafts}) as live:
        whole = live.post("/v1/chat/completions", body).json()
        *chunks, last = live.stream("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
        accepted = live.process.engine.built.scheduler.stats.drafts.accepted
    assert sum(accepted) > 20
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 60
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    for i, choice in enumerate(whole["choices"]):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == i]
        assert "".join(c["delta"].get("content") or "" for c in own) == choice["message"]["content"]
        scored = [token for c in own if c["logprobs"] for token in c["logprobs"]["content"]]
        alone = choice["logprobs"]["content"]
        assert [token["token"] for token in scored] == [token["token"] for token in alone]
        assert [token["logprob"] for token in scored] == pytest.approx([token["logprob"] for token in alone], abs=1e-4)
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]


@pytest.mark.parametrize("plain", [True, False])
def test_usage_of_a_stream_with_drafts(plain: bool) -> None:
    """Also on the way of events that hold nothing but text, and where usage goes with every event."""
    few = {str(token): 100.0 for token in (40, 41)}
    options = {"include_usage": True, **({} if plain else {"continuous_usage_stats": True})}
    body = {"messages": TALK, "max_tokens": 30, "logit_bias": few, "stream_options": options, **GREEDY}
    with serving(engine={"speculative": {"method": "ngram", "num_speculative_tokens": 3, "min_ngram": 1}}) as live:
        *chunks, last = live.stream("/v1/chat/completions", body)
    assert last["usage"]["completion_tokens"] == 30
    if not plain:
        counted = [c["usage"]["completion_tokens"] for c in chunks]
        assert counted == sorted(counted)
        assert counted[-1] == 30


def test_chat_logprobs(server: LiveServer) -> None:
    body = {"messages": TALK, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert len(whole) == 4
    for token in whole:
        assert len(token["top_logprobs"]) == 2
        assert token["logprob"] == token["top_logprobs"][0]["logprob"]
        assert isinstance(token["bytes"], list)
    chunks = server.stream("/v1/chat/completions", body)
    streamed = [t for c in chunks if c["choices"][0]["logprobs"] for t in c["choices"][0]["logprobs"]["content"]]
    assert streamed == whole


def test_no_character_is_split(server: LiveServer) -> None:
    """Whatever bytes are drawn, the pieces add up to the whole, and every piece is valid by itself."""
    body = {"prompt": "你好", "max_tokens": 60, "temperature": 1.5, "seed": 3, "ignore_eos": True}
    whole = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert "".join(c["choices"][0]["text"] for c in server.stream("/v1/completions", body)) == whole


# ---- forms ------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
CITY = [{"type": "function", "function": {"name": "city", "parameters": SCHEMA}}]


def test_structured_output(server: LiveServer) -> None:
    body = {"prompt": "hello", "max_tokens": 60, "temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert (choice["text"] in ("yes", "no"), choice["finish_reason"]) == (True, "stop")
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    options = {"max_tokens": 100, "temperature": 0, "logit_bias": {str(tokenizer().vocab["Ġ"]): -100}}
    talk = {"messages": TALK, "response_format": form, "n": 2, **options}
    for answer in server.post("/v1/chat/completions", talk).json()["choices"]:
        assert json.loads(answer["message"]["content"])["a"] in ("x", "y")
    flat = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    response = server.post("/v1/responses", {"input": "x", "max_output_tokens": 100, "text": {"format": flat}}).json()
    if response["status"] == "completed":
        assert json.loads(response["output"][0]["content"][0]["text"])["a"] in ("x", "y")


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls(server: LiveServer, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "city"}}
    for choice, reason in ((named, "stop"), ("required", "tool_calls")):
        body = {"messages": TALK, "max_tokens": 110, "seed": 1, "tools": CITY, "tool_choice": choice, "temperature": 0,
                "structured_outputs": None, "parallel_tool_calls": False,
                "logit_bias": {str(i): -100 for t, i in tokenizer().vocab.items() if t in "ĠĉĊč"}}  # fmt: skip
        if stream:
            found = [c["choices"][0] for c in server.stream("/v1/chat/completions", body)]
            calls = [call for c in found for call in c["delta"].get("tool_calls", ())]
            assert found[-1]["finish_reason"] == reason
            assert [c["index"] for c in calls] == [0]
        else:
            (answer,) = server.post("/v1/chat/completions", body).json()["choices"]
            calls = answer["message"]["tool_calls"]
            assert (answer["finish_reason"], answer["message"]["content"]) == (reason, None)
        (call,) = calls
        assert call["function"]["name"] == "city"
        assert json.loads(call["function"]["arguments"])["a"] in ("x", "y")


def test_forms_that_cannot_be_compiled(server: LiveServer) -> None:
    """Found out in the engine's process; a stream gets a status of its own, too. A client that leaves is forgotten."""
    for form in ({"json": {"not": {"type": "string"}}}, {"regex": "(?=a)b"}, {"grammar": "start: nothing"}):
        for stream in (False, True):
            body = {"prompt": "hello", "n": 2, "stream": stream, "structured_outputs": form}
            response = server.post("/v1/completions", body)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == "structured_outputs"
    server.canary()
    slow = {"prompt": "hello", "max_tokens": 2, "structured_outputs": {"regex": "a{1,7}b"}}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(server.url + "/v1/completions", json=slow, timeout=0.001)
    server.check_idle()


# ---- responses --------------------------------------------------------------------------------------------------


def test_responses(server: LiveServer, expected: dict[str, Any]) -> None:
    body = {"input": "hello", "max_output_tokens": 9, **GREEDY}
    answer = server.post("/v1/responses", body).json()
    assert answer["id"].startswith("resp-")
    assert (answer["object"], answer["status"], answer["store"]) == ("response", "incomplete", False)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = answer["output"]
    assert (item["type"], item["role"]) == ("message", "assistant")
    assert item["content"][0]["text"] == expected["chat"].text
    assert answer["usage"]["output_tokens"] == 9
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    again = server.post("/v1/responses", {**body, "input": items}).json()
    assert again["output"][0]["content"] == item["content"]


def test_stream_of_responses(server: LiveServer, expected: dict[str, Any]) -> None:
    body = {"input": "hello", "max_output_tokens": 9, "stream": True, "top_logprobs": 1, **GREEDY}
    text = server.post("/v1/responses", body).text
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    types = [e["type"] for e in found]
    assert types[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert types[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.incomplete"]  # fmt: skip
    deltas = [e for e in found if e["type"] == "response.output_text.delta"]
    assert "".join(e["delta"] for e in deltas) == expected["chat"].text == found[-4]["text"]
    assert sum(len(e["logprobs"]) for e in deltas) == 9
    assert found[-1]["response"]["usage"]["output_tokens"] == 9


def test_stream_of_what_is_held_back(server: LiveServer) -> None:
    """Tokens that make no event for a long time: the stream goes on, ends once, and the connection serves the next."""
    tool = {"type": "function", "name": "city", "parameters": SCHEMA}
    choice = {"type": "function", "name": "city"}
    body = {"input": "hello", "max_output_tokens": 20, "stream": True, "tools": [tool], "tool_choice": choice}
    for _ in range(2):
        text = server.post("/v1/responses", {**body, "temperature": 0}).text
        assert text.count("event: response.incomplete") + text.count("event: response.completed") == 1
        server.canary()


def test_openai_client_of_responses(server: LiveServer, expected: dict[str, Any]) -> None:
    extra = {"ignore_eos": True}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as client:
        talk: Any = [
            {"role": "user", "content": "the weather?"},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ]
        response = client.responses.create(model="tiny", input=talk, max_output_tokens=4, extra_body=extra)
        assert response.output_text is not None
        assert response.usage is not None
        assert response.usage.output_tokens == 4
        stream = client.responses.create(
            model="tiny", input="hello", max_output_tokens=9, temperature=0, stream=True, extra_body=extra
        )
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == expected["chat"].text
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="tiny", input="x", previous_response_id="resp_1")


# ---- clients ----------------------------------------------------------------------------------------------------


def test_openai_client(server: LiveServer, expected: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("meta-llama/other")
        chat = client.chat.completions.create(
            model="tiny", messages=TALK, max_tokens=9, temperature=0, extra_body={"top_k": 5, "ignore_eos": True}
        )  # type: ignore[call-overload]
        assert chat.choices[0].message.content == expected["chat"].text
        stream = client.chat.completions.create(
            model="tiny", messages=TALK, max_completion_tokens=9, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # type: ignore[call-overload]  # fmt: skip
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected["chat"].text
        assert chunks[-1].usage.completion_tokens == 9
        text = client.completions.create(model="tiny", prompt="hello", max_tokens=9, temperature=0,
                                         extra_body={"ignore_eos": True})  # fmt: skip
        assert text.choices[0].text == expected["hello"].text
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=TALK, max_tokens=4000)  # type: ignore[arg-type]
        assert caught.value.code == "context_length_exceeded"


def test_many_at_once(server: LiveServer, expected: dict[str, Any]) -> None:
    """More than the batch holds, streamed and not, all at once; each gets its own."""

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def one(i: int) -> None:
                text = ["hello", "the quick", "你好"][i % 3]
                body = {"prompt": text, "max_tokens": 9, "stream": i % 2 == 0, **GREEDY}
                response = await client.post("/v1/completions", json=body)
                assert response.status_code == 200
                if i % 2:
                    assert response.json()["choices"][0]["text"] == expected[text].text
                else:
                    assert response.text.endswith("data: [DONE]\n\n")

            await asyncio.gather(*(one(i) for i in range(24)))

    asyncio.run(run())


# ---- ends before the end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_ends_its_request(server: LiveServer, stream: bool, path: str) -> None:
    body = {"prompt": "hello", "messages": TALK, "max_tokens": 100, "stream": stream, **GREEDY}
    with server.gated() as gate:

        async def run() -> None:
            async with httpx.AsyncClient(base_url=server.url) as client:
                gate.open.clear()
                task = asyncio.create_task(client.post(path, json=body))
                await asyncio.to_thread(wait_until, lambda: len(server.front_end.tickets) == 1, "the request")
                await asyncio.to_thread(wait_until, lambda: server.engine.stats.in_flight > 0, "its first step")
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        asyncio.run(run())
        wait_until(lambda: not server.front_end.tickets, "the end of the request")
        wait_until(lambda: not server.engine._inbox.empty(), "the news of it")
        gate.open.set()
        server.check_idle()
        assert gate.passed <= 2  # the steps that were in flight
    server.canary()


def test_a_request_that_fails_alone(server: LiveServer) -> None:
    """The engine gives up on one row; the answer is an error, and the others go on."""
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "allowed_token_ids": [5], "bad_words": ["h"]}
    body["bad_words"] = [tokenizer().decode([5])]
    response = server.post("/v1/completions", body)
    if response.status_code == 500:
        assert response.headers["x-should-retry"] == "false"
        with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as streamed:
            streamed.read()
            assert streamed.status_code == 500 or '"error"' in streamed.text
    server.canary()


# ---- the rest of the routes ---------------------------------------------------------------------------------------


def test_tokens(server: LiveServer) -> None:
    found = server.post("/tokenize", {"prompt": "hello", "add_special_tokens": False, "return_token_strs": True}).json()
    ids = tokenizer()("hello", add_special_tokens=False)["input_ids"]
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 128)
    assert found["token_strs"] == tokenizer().convert_ids_to_tokens(ids)
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": "hello"}
    talk = server.post("/tokenize", {"messages": TALK}).json()
    text = "<s>user: hello\nassistant: "
    assert talk["tokens"] == tokenizer()(text, add_special_tokens=False)["input_ids"]
    info = server.client.get("/tokenizer_info").json()
    assert info["eos_token"] == "</s>"
    assert {"bos_token", "pad_token", "chat_template", "tokenizer_class"} <= set(info)


def test_operations(server: LiveServer) -> None:
    get = server.client.get
    card = get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 128)
    assert get("/health").json()["status"] == "ok"
    assert get("/ready").status_code == 200
    assert server.client.post("/ping").status_code == 200
    assert set(get("/version").json()) == {"version"}
    assert get("/load").json() == {"server_load": 0}
    assert get("/nothing").json()["error"]["code"] == "not_found"
    assert get("/v1/completions").status_code == 405
    assert get("/metrics/").status_code == 404
    labelled = get("/version", headers={"x-request-id": "mine-1"})
    assert labelled.headers["x-request-id"] == "mine-1"
    assert len(get("/version").headers["x-request-id"]) == 32
    assert "access-control-allow-origin" not in labelled.headers
    assert get("/health", headers={"host": "evil.example"}).status_code == 403


def test_metrics(server: LiveServer) -> None:
    def value(name: str, **labels: str) -> float:
        wanted = {"model_name": "tiny", "engine": "0", **labels}
        if "path" in labels:
            wanted = {"handler": labels["path"], "method": "POST"}
        for line in server.client.get("/metrics").text.splitlines():
            head, _, number = line.rpartition(" ")
            if head.startswith(name + "{") and all(f'{k}="{v}"' in head for k, v in wanted.items()):
                return float(number)
        raise AssertionError(f"no {name} with {labels}")

    assert server.client.head("/metrics").status_code == 200
    server.canary()  # so that there is a duration
    wait_until(lambda: not server.front_end.tickets and server.engine.stats.in_flight == 0, "its end")
    names = ("gapless:generation_tokens_total", "gapless:steps_total", "gapless:gpu_busy_seconds_total")
    before = [value(names[0]), value(names[1]), value(names[2], phase="decode")]
    ended = value("gapless:request_success_total", finished_reason="length")
    first = value("gapless:time_to_first_token_seconds_count")
    between = value("gapless:inter_token_latency_seconds_count")
    queued = value("gapless:request_queue_time_seconds_count")
    asked = value("http_request_duration_seconds_count", path="/v1/completions")
    server.post("/v1/completions", {"prompt": "hello", "n": 2, "max_tokens": 7, **GREEDY})
    wait_until(lambda: value("gapless:request_queue_time_seconds_count") == queued + 2, "their waits")
    assert 0 <= value("gapless:request_queue_time_seconds_sum") < 600
    assert value("http_request_duration_seconds_count", path="/v1/completions") == asked + 1
    assert value("gapless:engine_sleep_state", sleep_state="awake") == 1
    assert value("gapless:corrupted_requests_total") >= 0
    assert value("gapless:lora_requests_info", running_lora_adapters="") > 0
    wait_until(lambda: value(names[0]) == before[0] + 14, "the tokens")
    assert value(names[1]) > before[1]
    assert value(names[2], phase="decode") > before[2]
    assert value("gapless:request_success_total", finished_reason="length") == ended + 2
    assert value("gapless:time_to_first_token_seconds_count") == first + 1
    assert value("gapless:inter_token_latency_seconds_count") > between
    assert value("gapless:num_requests_running") == 0
    assert value("gapless:kv_cache_usage_perc") == 0
    assert value("gapless:gpu_idle_seconds_total", cause="no_work") > 0
    assert value("gapless:step_host_seconds_total", stage="schedule") > 0


def test_openapi(server: LiveServer) -> None:
    """The document names the routes that there are, and fields as they are decoded."""
    document = server.client.get("/openapi.json").json()
    routes = {r.path.replace(":path", "") for r in _routes(server)}
    assert set(document["paths"]) == routes
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "tools", "max_completion_tokens", "stream"} <= set(chat)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["summary"], path
    page = server.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "ChatRequest" in page.text
    assert "http" not in page.text.replace("http-equiv", "")


def _routes(server: LiveServer) -> list[Any]:
    gate = server.lifecycle._server.config.app  # type: ignore[union-attr]
    routes: list[Any] = gate._app.routes
    return routes


def test_pairs_of_chunks_are_in_order(server: LiveServer) -> None:
    chunks = server.stream("/v1/completions", {"prompt": "hello", "max_tokens": 20, "return_token_ids": True, **GREEDY})
    for one, two in itertools.pairwise(chunks):
        assert one["created"] == two["created"]
    ids = [t for c in chunks for t in c["choices"][0]["token_ids"]]
    whole = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 20, "return_token_ids": True, **GREEDY})
    assert ids == whole.json()["choices"][0]["token_ids"]
