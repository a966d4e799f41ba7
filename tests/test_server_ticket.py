"""The two ways of a stream's events, straight to the socket and through the task, make one stream in order."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from gapless.config import EngineConfig
from gapless.engine.stats import EngineStats
from gapless.request.messages import Finished, StepMessage
from gapless.request.outputs import FinishReason
from gapless.request.sampling_params import SamplingParams
from gapless.scheduler.stats import SchedulerStats
from gapless.server import chat, completions
from gapless.server.answer import AnswerForm
from gapless.server.frontend import FrontEnd
from gapless.server.protocol import ChatRequest, CompletionRequest
from gapless.server.sse import _MARK, EventStream, PlainEvent, data
from gapless.server.wire import Ready, Step
from gapless.text.chat import EncodedPrompt
from text_tokenizers import byte_level


class NoConnection:
    heard = 0.0

    def send(self, message: Any) -> None:
        """There is no engine."""


class Client:
    """Takes what is written, and is slow now and then."""

    def __init__(self) -> None:
        self.ready = True
        self.direct = 0
        self.events: list[bytes] = []
        self.readable = asyncio.Event()
        self.readable.set()

    def write(self, body: bytes) -> None:
        assert self.ready
        assert body
        self.direct += 1
        self.events.append(body)

    async def send(self, message: Any) -> None:
        await self.readable.wait()
        self.events.append(message.get("body", b""))

    def slow(self, slow: bool) -> None:
        self.ready = not slow
        (self.readable.clear if slow else self.readable.set)()

    async def receive(self) -> Any:
        await asyncio.Event().wait()


def events_of(kind: str, prompts: list[EncodedPrompt], n: int) -> Any:
    if kind == "completions":
        body = CompletionRequest(prompt="x", stream=True)
        return completions._Events(completions._Call("id", "m", 0, body, prompts, [], n, False, False, None))
    form = AnswerForm(reasoning=True, inside=True) if kind == "reasoning" else AnswerForm()
    return chat._Events(chat.Call("id", "m", 0, ChatRequest(messages=[]), prompts[0], form, None))


async def whole(kind: str, seed: int) -> int:
    """One stream of random texts, to the end; how often its client was written to directly."""
    rng, tokenizer, client = random.Random(seed), byte_level(), Client()
    ready = Ready("none", asdict(EngineConfig()), len(tokenizer), (), 1 << 20, "none", "none")
    front_end = FrontEnd(
        NoConnection(), ready, tokenizer, max_queued_requests=99, max_queued_tokens=None, buffer_tokens=10**6
    )  # type: ignore[arg-type]
    n, count = rng.randint(1, 3), rng.randint(1, 2) if kind == "completions" else 1
    prompts = [EncodedPrompt(None, np.array([5], np.int32))] * count
    params = [SamplingParams(n=n, max_tokens=1000)] * count
    ticket = front_end.submit(prompts, params, "delta", "label")
    ids = [id for group in ticket.groups for id in group.ids]
    stream = EventStream(events_of(kind, prompts, n), ticket)
    scope = {"type": "http", "state": {"writer": client}}
    task = asyncio.create_task(stream(scope, client.receive, client.send))
    texts = ["".join(rng.choices("ab€ <", k=rng.randint(1, 60))) for _ in ids]
    if kind == "reasoning":
        texts = [f"{text}</think>{text}" for text in texts]
    tokens = {id: tokenizer.encode(text, add_special_tokens=False) for id, text in zip(ids, texts, strict=True)}
    at, stats, open_ = dict.fromkeys(ids, 0), EngineStats(), list(ids)
    while open_:
        given, finished = list[tuple[int, int]](), list[Finished]()
        for id in rng.sample(open_, rng.randint(1, len(open_))):
            new = tokens[id][at[id] : at[id] + rng.randint(1, 3)]
            at[id] += len(new)
            given += [(id, token) for token in new]
            if at[id] == len(tokens[id]):
                open_.remove(id)
                finished.append(Finished(id, np.array(tokens[id], np.int32), FinishReason.LENGTH))
        stats.steps += 1
        columns = np.array(given).T
        message = StepMessage(columns[0].astype(np.int64), columns[1].astype(np.int32), tuple(finished), 0.0)
        front_end.take(Step(message, stats, SchedulerStats()))
        if rng.random() < 0.2:
            client.slow(client.ready)
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
    client.slow(False)
    await asyncio.wait_for(task, 10)
    body = b"".join(client.events).decode()
    assert body.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in body.split("\n\n")[:-2]]
    for index, text in enumerate(texts):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]
        if kind == "completions":
            assert "".join(c["text"] for c in own) == text
            continue
        assert [c["delta"].get("role") for c in own] == ["assistant"] + [None] * (len(own) - 1)
        said = ["".join(c["delta"].get(name, "") for c in own) for name in ("reasoning_content", "content")]
        thought, _, answer = text.partition("</think>") if kind == "reasoning" else ("", "", text)
        assert said == [thought, answer]
    assert sum(sum(own.values()) for own in ticket.generated.values()) == sum(map(len, tokens.values()))
    assert ticket not in front_end.tickets
    assert front_end.client.pending == 0
    return client.direct


@pytest.mark.parametrize("kind", ["completions", "chat", "reasoning"])
def test_a_stream_is_whole_whatever_way_its_events_take(kind: str) -> None:
    direct = 0
    for seed in range(40):
        try:
            direct += asyncio.run(whole(kind, seed))
        except BaseException:
            print(f"seed {seed}")
            raise
    assert direct > 40


@pytest.mark.parametrize("text", ["", "a", _MARK, '"\u20ac\n'])
def test_a_plain_event_is_that_of_its_example_whatever_the_model_is_called(text: str) -> None:
    def example(text: str) -> Any:
        return {"model": _MARK, "choices": [{"text": text, "finish_reason": None}]}

    assert PlainEvent(example).data(text) == data(example(text))
