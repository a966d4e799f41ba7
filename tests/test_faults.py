"""A fault in any phase ends the guilty request, or the engine with the cause given to every caller. Nobody hangs.

Each caller must have its answer within `SECONDS`; then threads are back where they were, and no block is left owned.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engines import check_idle, gated, options, wait_until
from gapless import LLM, AsyncLLM, EngineDeadError, SamplingParams
from gapless.device.cpu import CpuDevice
from gapless.engine.client import Submission
from gapless.errors import EngineClosedError

SECONDS = float(os.environ.get("GAPLESS_FAULT_SECONDS", "10"))
"""2 is what is promised on a machine of its own; on a loaded one the generation itself may take longer."""
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5 + i, 17, 30 + i]} for i in range(4)]
BAD = 77
"""A token whose requests get NaN logits in `nan_for`."""


class Boom(RuntimeError):
    """What is thrown in."""


@pytest.fixture(autouse=True)
def threads_come_back() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_until(lambda: not (set(threading.enumerate()) - before), "threads that were left behind", SECONDS)


def raising(error: BaseException, after: int = 3) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps a function so that its call number ``after`` raises."""

    def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
        calls = iter(range(10**9))

        def outer(*arguments: Any, **named: Any) -> Any:
            if next(calls) == after:
                raise error
            return inner(*arguments, **named)

        return outer

    return wrap


def break_attribute(owner: Any, name: str, error: BaseException, after: int = 3) -> None:
    setattr(owner, name, raising(error, after)(getattr(owner, name)))


def kill_a_stream(llm: LLM, name: str) -> None:
    """The worker thread of a stream meets an exception outside of any work."""
    device = llm._client._built.runner.device
    assert isinstance(device, CpuDevice)
    stream = getattr(device, name)

    def broken(inner: Callable[[Any], None] = stream.put) -> Callable[[Any], None]:
        def die() -> None:
            raise Boom("a dead worker")

        calls = iter(range(10**9))
        return lambda work: inner(die if next(calls) == 9 else work)

    stream.put = broken()


PHASES: dict[str, Callable[[LLM], None]] = {
    "receive": lambda llm: llm._client._engine._inbox.put(raising(Boom("x"), 0)(lambda: None)),
    "schedule": lambda llm: break_attribute(llm._client._scheduler, "schedule", Boom("x")),
    "launch": lambda llm: break_attribute(llm._client._built.runner, "launch", Boom("x")),
    "fill": lambda llm: break_attribute(llm._client._built.runner._ring.slots[0], "fill", Boom("x")),
    "forward, on the device": lambda llm: break_attribute(llm._client.model, "forward", Boom("x")),
    "out of memory": lambda llm: break_attribute(llm._client.model, "forward", torch.OutOfMemoryError("x")),
    "not an Exception": lambda llm: break_attribute(llm._client.model, "forward", SystemExit("x")),
    "wait": lambda llm: break_attribute(llm._client._built.runner, "wait", Boom("x")),
    "commit": lambda llm: break_attribute(llm._client._scheduler, "commit", Boom("x")),
    "message": lambda llm: break_attribute(llm._client._scheduler, "message", Boom("x")),
    "publish": lambda llm: break_attribute(llm._client._engine, "_publish_to", Boom("x"), 0),
    "the output side as a whole": lambda llm: break_attribute(llm._client._outputs, "process", Boom("x"), 0),
    "a dead h2d worker": lambda llm: kill_a_stream(llm, "h2d"),
    "a dead compute worker": lambda llm: kill_a_stream(llm, "compute"),
    "a dead d2h worker": lambda llm: kill_a_stream(llm, "d2h"),
}


@contextmanager
def in_time(what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SECONDS, f"{what} took {time.monotonic() - start:.1f} s"


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("phase", list(PHASES))
def test_a_broken_engine_tells_every_caller_why(phase: str, depth: int) -> None:
    llm = LLM(**options(pipeline_depth=depth))
    llm.generate(PROMPTS, SamplingParams(max_tokens=3), use_tqdm=False)
    answers: queue.Queue[BaseException] = queue.Queue()

    def call() -> None:
        try:
            llm.generate(PROMPTS, LONG, use_tqdm=False)
        except BaseException as error:
            answers.put(error)

    callers = [threading.Thread(target=call, daemon=True) for _ in range(3)]
    with gated(llm) as gate:
        gate.open.clear()
        for caller in callers:
            caller.start()
        wait_until(lambda: llm._client.pending == 12, "all requests")
        PHASES[phase](llm)
        gate.open.set()
        with in_time("the answer to the callers"):
            got = [answers.get(timeout=SECONDS) for _ in callers]
    for error in got:
        assert isinstance(error, EngineDeadError)
        chain, causes = error, []
        while chain is not None:
            causes.append(chain)
            chain = chain.__cause__ or chain.__context__  # type: ignore[assignment]
        assert any(isinstance(cause, (Boom, torch.OutOfMemoryError, SystemExit)) for cause in causes), causes
    with in_time("a refusal"), pytest.raises(EngineDeadError):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    with in_time("close"):
        llm.close()
    for caller in callers:
        caller.join(SECONDS)
        assert not caller.is_alive()


@contextmanager
def nan_for(llm: LLM, token: int) -> Iterator[None]:
    """Logits of sequences that compute ``token`` are NaN."""
    inner = llm._client.model.forward

    def forward(input_ids: Any, positions: Any, context: Any, logits_index: Any, out: Any) -> None:
        inner(input_ids, positions, context, logits_index, out)
        loc = context.query_start_loc.tolist()
        for s in range(len(loc) - 1):
            if token in input_ids[loc[s] : loc[s + 1]].tolist():
                out[s] = float("nan")

    llm._client.model.forward = forward
    yield
    del llm._client.model.forward


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nan_logits_end_their_request_only(depth: int) -> None:
    with LLM(**options(pipeline_depth=depth)) as llm:
        truth = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, LONG, use_tqdm=False)]
        assert all(BAD not in tokens for tokens in truth)
        with nan_for(llm, BAD):
            prompts = [PROMPTS[0], {"prompt_token_ids": [5, 17, BAD]}, *PROMPTS[1:]]
            first, bad, *rest = llm.generate(prompts, LONG, use_tqdm=False)
        assert bad.outputs[0].finish_reason == "error"
        assert "NaN" in str(bad.outputs[0].stop_reason)
        assert bad.outputs[0].token_ids == []
        assert [o.outputs[0].token_ids for o in (first, *rest)] == truth
        check_idle(llm)


class Collected:
    """One request through the client, with callbacks of the test's own."""

    def __init__(self, llm: LLM, prompt: dict[str, list[int]], on_output: Callable[[Any], Any] | None = None) -> None:
        self.outputs: list[Any] = []
        self.errors: list[BaseException] = []
        self.end = threading.Event()
        client = llm._client

        def take(output: Any) -> None:
            if on_output is not None:
                on_output(output)
            self.outputs.append(output)
            if output.finished:
                self.end.set()

        def fail(error: BaseException) -> None:
            self.errors.append(error)
            self.end.set()

        client.submit([Submission(client.encode(prompt), LONG, take, fail, "stream")])


def test_a_callback_that_raises_ends_its_request_only(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(**options()) as llm:
        truth = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, LONG, use_tqdm=False)]
        guilty = Collected(llm, PROMPTS[0], raising(Boom("callback"))(lambda output: None))
        others = [Collected(llm, prompt) for prompt in PROMPTS[1:]]
        with in_time("all ends"):
            for one in (guilty, *others):
                assert one.end.wait(SECONDS)
        assert [type(e) for e in guilty.errors] == [Boom]
        assert [o.outputs[-1].outputs[0].token_ids for o in others] == truth[1:]
        check_idle(llm)


def test_a_callback_that_leaves_the_thread_ends_the_engine() -> None:
    """SystemExit and the like are not the request's own fault: nobody may wait for a thread that is gone."""
    llm = LLM(**options())
    guilty = Collected(llm, PROMPTS[0], raising(SystemExit("callback"))(lambda output: None))
    other = Collected(llm, PROMPTS[1])
    with in_time("both ends"):
        assert guilty.end.wait(SECONDS)
        assert other.end.wait(SECONDS)
    assert isinstance(other.errors[0], SystemExit)
    with in_time("a refusal"), pytest.raises(EngineDeadError):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    with in_time("close"):
        llm.close()


def test_a_callback_that_blocks_holds_up_no_step() -> None:
    with LLM(**options()) as llm:
        truth = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, LONG, use_tqdm=False)]
        release = threading.Event()
        blocked = Collected(llm, PROMPTS[0], lambda output: release.wait(20))
        others = [Collected(llm, prompt) for prompt in PROMPTS[1:]]
        scheduler = llm._client._scheduler
        with in_time("the steps"):
            wait_until(lambda: not scheduler.has_requests, "the engine", SECONDS)
        assert not blocked.outputs
        release.set()
        for one in (blocked, *others):
            assert one.end.wait(SECONDS)
        assert [o.outputs[-1].outputs[0].token_ids for o in (blocked, *others)] == truth
        check_idle(llm)


def test_close_does_not_wait_for_a_callback_that_never_returns() -> None:
    llm, release = LLM(**options()), threading.Event()
    Collected(llm, PROMPTS[0], lambda output: release.wait(20))
    other = Collected(llm, PROMPTS[1])
    with in_time("close"):
        llm.close()
    assert isinstance(other.errors[0], EngineClosedError)
    release.set()


class _Broken:
    """A detokenizer that fails."""

    def push(self, token: int) -> str:
        raise Boom("detokenizer")


def test_a_detokenizer_that_raises_ends_its_request_only() -> None:
    with LLM(**options()) as llm:
        truth = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, LONG, use_tqdm=False)]
        guilty, *others = (Collected(llm, prompt) for prompt in PROMPTS)
        open_groups = llm._client._outputs._open
        group = next(g for g in open_groups if g.prompt_token_ids.tolist() == PROMPTS[0]["prompt_token_ids"])
        completion = group.completions[0]
        completion.detokenizer = _Broken()  # type: ignore[assignment]
        for one in (guilty, *others):
            assert one.end.wait(SECONDS)
        assert [type(e) for e in guilty.errors] == [Boom]
        assert [o.outputs[-1].outputs[0].token_ids for o in others] == truth[1:]
        check_idle(llm)


@pytest.mark.parametrize("phase", ["launch", "commit", "the output side as a whole"])
def test_async_callers_are_told_too(phase: str) -> None:
    async def one(llm: AsyncLLM, prompt: dict[str, list[int]]) -> BaseException | None:
        try:
            async for _ in llm.generate(prompt, LONG):
                pass
        except BaseException as error:
            return error
        return None

    async def test() -> None:
        llm = AsyncLLM(**options())
        PHASES[phase](llm)  # type: ignore[arg-type]
        async with asyncio.timeout(SECONDS):
            errors = await asyncio.gather(*(one(llm, prompt) for prompt in PROMPTS))
        assert all(isinstance(error, EngineDeadError) for error in errors)
        await asyncio.to_thread(llm.close)

    asyncio.run(test())
