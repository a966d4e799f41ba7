"""The whole engine over a runner in another process: equal tokens, and one clear error when that process dies."""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import peft_adapters
import remote_runner
from engines import check_idle, model, options, tokenizer, wait_until
from gapless import LLM, EngineDeadError, SamplingParams, StructuredOutputsParams, WeightError
from gapless.engine.client import Submission
from gapless.runner.base import StepRunner
from gapless.runner.runner import Runner
from models import tiny

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 5, 6, 7, 8, 5]}, {"prompt_token_ids": [3]}, "one two one two one"]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.8, top_p=0.9, seed=3, max_tokens=11, logprobs=2, ignore_eos=True, repetition_penalty=1.1
)
CHOICE = SamplingParams(max_tokens=8, seed=1, structured_outputs=StructuredOutputsParams(choice=["one two", "one, no"]))
LONG = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 4}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peft_adapters.save(model(), peft_adapters.A, tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.engine.build.build", remote_runner.build)


@pytest.fixture
def llm(remote: None) -> Iterator[LLM]:
    with LLM(**options(model=None, tokenizer=tokenizer(), **LORA)) as made:
        yield made


def used(llm: LLM, adapter: Path) -> list[Any]:
    """Everything that goes over to a runner, and the tokens after it."""
    found: list[Any] = []

    def generate(**more: Any) -> None:
        for output in llm.generate(PROMPTS * 3, [GREEDY, DRAWN, CHOICE] * 3, use_tqdm=False, **more):
            (completion,) = output.outputs
            found.append((completion.token_ids, completion.text, completion.logprobs, output.weight_version))

    generate()
    llm.load_lora("a", adapter)
    generate(lora=["a", None, "a"] * 3)
    with pytest.raises(WeightError, match="no tensor 'nobody'"):
        llm.update_weights({"nobody": next(iter(model().parameters()))})
    other = tiny("llama", seed=9, vocab_size=len(tokenizer()), num_hidden_layers=2)
    assert llm.update_weights({name: t.clone() for name, t in other.state_dict().items()}) == 1
    generate()
    llm.sleep()
    llm.wake()
    generate(lora="a")
    check_idle(llm)
    return found


@pytest.mark.parametrize(("depth", "drafts"), [(1, None), (2, None), (3, None), (2, "ngram")])
def test_a_runner_in_another_process_gives_equal_tokens(
    depth: int, drafts: str | None, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {**options(pipeline_depth=depth, speculative=drafts), **LORA}
    with LLM(**{**made, "model": copy.deepcopy(model())}) as here:
        want = used(here, adapter)
        stats = here.stats()[0]
    monkeypatch.setattr("gapless.engine.build.build", remote_runner.build)
    with LLM(**{**made, "model": None}) as there:
        assert used(there, adapter) == want
        counts = there.stats()[0].copies
    assert stats.steps > 40
    assert counts.h2d > 40


def test_a_death_in_the_middle_of_steps_ends_every_request_with_one_error(llm: LLM) -> None:
    client, started = llm._client, threading.Event()
    ends: list[list[Any]] = [[] for _ in range(12)]  # more than run at once

    def submission(i: int) -> Submission:
        def take(output: Any) -> None:
            started.set()
            if output.finished:
                ends[i].append(output)

        return Submission(client.encode(PROMPTS[i % 2]), LONG, take, ends[i].append, mode="stream")

    client.submit([submission(i) for i in range(len(ends))])
    assert started.wait(30)
    client._built.runner.process.kill()  # type: ignore[attr-defined]
    start = time.monotonic()
    wait_until(lambda: all(ends), "the ends")
    assert time.monotonic() - start < 5
    assert all(len(end) == 1 and "the runner's process is gone" in repr(end[0]) for end in ends)
    with pytest.raises(EngineDeadError, match="the runner's process is gone"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)


def test_a_death_between_requests_is_told_at_each_later_call(llm: LLM, adapter: Path) -> None:
    llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    process = llm._client._built.runner.process  # type: ignore[attr-defined]
    process.kill()
    process.join(10)
    start = time.monotonic()
    for call in (
        lambda: llm.load_lora("a", adapter),
        llm.update_weights,
        llm.sleep,
        lambda: llm.generate(PROMPTS[0], GREEDY, use_tqdm=False),
        llm.wake,
    ):
        with pytest.raises(Exception, match="the runner's process is gone"):
            call()
    llm.close()
    assert time.monotonic() - start < 10


def test_a_forgotten_engine_ends_its_runners_process(remote: None) -> None:
    llm = LLM(**options(model=None, tokenizer=tokenizer()))
    process = llm._client._built.runner.process  # type: ignore[attr-defined]
    del llm
    assert not process.is_alive()


def test_a_runner_has_all_that_the_protocol_asks() -> None:
    asked = {name for name in vars(StepRunner) if not name.startswith("_")}
    for kind in (Runner, remote_runner.Proxy):
        missing = asked - set(dir(kind)) - {"copies", "lora_slots", "owns_weights"}
        assert not missing, kind
    assert {field.name for field in dataclasses.fields(remote_runner.Result)} >= {"plan", "tokens", "records"}
