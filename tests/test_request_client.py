"""A client before an engine that is no more than the protocol: what both sides of a wire rest on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from engines import tokenizer
from gapless import RequestError, SamplingParams
from gapless.config import EngineConfig
from gapless.engine.local_service import LocalService
from gapless.engine.request_client import RequestClient
from gapless.engine.service import EngineService
from gapless.engine.stats import EngineStats
from gapless.engine.submission import Submission
from gapless.request.messages import Finished, StepMessage
from gapless.request.outputs import FinishReason
from gapless.request.request import LoraRef, Request
from gapless.scheduler.stats import SchedulerStats
from gapless.server.remote import RemoteEngine


class Echo:
    """Implements `EngineService`: keeps what it is given."""

    vocab_size, eos_token_ids, longest, embeds_width, dtype = 300, (1,), 64, 0, None

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.finished: list[tuple[int, FinishReason]] = []

    def raise_if_dead(self) -> None:
        pass

    def refuse_what_never_fits(self, prompt_len: int, max_tokens: int) -> None:
        if prompt_len + max_tokens > self.longest:
            raise RequestError("too long")

    def submit(self, requests: list[Request]) -> None:
        self.requests += requests

    def finish(self, request_id: int, reason: FinishReason) -> None:
        self.finished.append((request_id, reason))

    def stats(self) -> tuple[EngineStats, SchedulerStats]:
        return EngineStats(), SchedulerStats()

    @contextlib.contextmanager
    def locked(self, loras: Sequence[str | None]) -> Iterator[list[LoraRef | None]]:
        yield [LoraRef(7, 1, "a") if name == "a" else None for name in loras]

    def refuse_unknown_lora(self, name: object) -> None:
        if name != "a":
            raise RequestError(f"lora={name!r}: unknown")

    def compile(self, params: SamplingParams) -> None:
        pass

    def grammars(self, params: SamplingParams, stop_token_ids: tuple[int, ...], count: int) -> list[str]:
        return ["grammar"] * count


class Client(RequestClient):
    def __init__(self, service: EngineService) -> None:
        super().__init__(tokenizer())
        self._serve(service, EngineConfig.from_dict({"seed": 3}))


def submission(client: Client, outputs: list[Any], **more: Any) -> Submission:
    params = more.pop("params", SamplingParams(max_tokens=5, n=2, stop_token_ids=[9]))
    return Submission(client.encode("one two"), params, outputs.append, outputs.append, **more)


def test_a_prompt_becomes_requests_and_messages_become_outputs() -> None:
    service, outputs = Echo(), list[Any]()
    client = Client(service)
    (group,) = client.submit([submission(client, outputs, request_id="x", lora="a", cache_salt="s")])
    first, second = service.requests
    assert [first.id, second.id] == group.ids
    assert first.seed != second.seed
    assert set(first.stop_token_ids) == {9, 1}
    assert first.lora is not None
    assert first.lora.id == 7
    assert client.pending == 1
    assert "x" in client._groups
    client.abort("x")
    assert service.finished == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]
    tokens = np.array([5, 9], np.int32)
    ended = tuple(Finished(r.id, tokens, FinishReason.STOP, 9) for r in service.requests)
    client._outputs.process(StepMessage(np.zeros(0, np.int64), np.zeros(0, np.int32), ended, 0.0))
    (output,) = outputs
    assert output.finished
    assert [list(c.token_ids) for c in output.outputs] == [[5, 9], [5, 9]]
    assert not client._groups
    assert client.pending == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"lora": "b"}, "lora='b'"),
        ({"params": SamplingParams(max_tokens=63)}, "too long"),
        ({"params": SamplingParams(stop_token_ids=list(range(2, 300)))}, "would end this request"),
        ({"params": SamplingParams(speculative=True)}, "speculative=True"),
        ({"params": {}}, "sampling_params of type dict"),
    ],
)
def test_a_bad_request_reaches_no_engine(more: dict[str, Any], words: str) -> None:
    service, outputs = Echo(), list[Any]()
    client = Client(service)
    good = submission(client, outputs)
    with pytest.raises(RequestError, match=words):
        client.submit([good, submission(client, outputs, **more)])
    assert not service.requests
    assert client.pending == 0
    assert not client._groups


def test_every_engine_has_all_that_the_protocol_asks() -> None:
    asked = {name for name in vars(EngineService) if not name.startswith("_")}
    assert len(asked) > 8
    for kind in (LocalService, RemoteEngine, Echo):
        assert asked <= set(dir(kind)), kind
