"""An engine ends with its last reference, with a construction that fails, and with the interpreter."""

from __future__ import annotations

import asyncio
import copy
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import OPTIONS, model, options, tokenizer, wait_until
from gapless import LLM, AsyncLLM, ConfigError, SamplingParams
from gapless.config import EngineConfig
from gapless.engine.client import EngineClient, Submission

PROMPT = {"prompt_token_ids": [5, 6, 7]}
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)


def threads() -> set[str]:
    return {f"{t.name} {t.ident}" for t in threading.enumerate() if t.name.startswith("gapless-")}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No thread more than before; without the collector, unless a test calls it."""
    before = threads()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    wait_until(lambda: not threads() - before, f"threads of before, {before}, and now {threads()}")


def own_model() -> tuple[Any, weakref.ref[Any]]:
    mine = copy.deepcopy(model())
    return mine, weakref.ref(mine)


def client_of(mine: Any) -> EngineClient:
    return EngineClient(mine, EngineConfig.from_dict(dict(OPTIONS)), tokenizer())


def ignore(value: object) -> None:
    pass


def test_the_last_reference_to_an_llm_ends_it() -> None:
    mine, ref = own_model()
    llm = LLM(mine, tokenizer=tokenizer(), **OPTIONS)
    llm.generate(PROMPT, SHORT, use_tqdm=False)
    del llm, mine
    assert not threads(), "whoever drops the last reference waits: memory is back when the next engine is made"
    gc.collect()  # transformers' own modules hold cycles
    assert ref() is None


def test_an_engine_in_a_cycle_of_garbage_ends_by_collection() -> None:
    llm: Any = LLM(**options())
    llm.me = llm
    del llm
    assert threads()
    gc.collect()
    wait_until(lambda: not threads(), "the collection")


def test_a_forgotten_async_engine_ends_in_the_middle_of_requests() -> None:
    mine, ref = own_model()

    async def begin(mine: Any) -> None:
        llm = AsyncLLM(mine, tokenizer=tokenizer(), **OPTIONS)
        outputs = llm.generate(PROMPT, LONG)
        await anext(outputs)

    asyncio.run(begin(mine))
    del mine
    wait_until(lambda: not threads(), "the loop that ended to end the engine")
    gc.collect()
    assert ref() is None


def test_a_forgotten_client_ends_in_the_middle_of_requests_and_each_fails_once() -> None:
    client = client_of(model())
    started, ended = threading.Event(), []

    def take(output: Any) -> None:
        started.set()
        if output.finished:
            ended.append(output)

    for _ in range(3):
        client.submit([Submission(client.encode(PROMPT), LONG, take, ended.append, mode="stream")])
    assert started.wait(20)
    del client
    wait_until(lambda: not threads(), "the client")
    assert len(ended) == 3


@pytest.mark.parametrize("place", ["output", "compute"])
def test_the_last_reference_may_go_on_a_thread_of_the_engine(place: str) -> None:
    """Which does not wait for itself."""
    box = [client_of(model())]
    gone = threading.Event()

    def forget(value: object = None) -> None:
        box.clear()
        gone.set()

    client = box[0]
    prompt = client.encode(PROMPT)
    if place == "compute":
        client._built.runner.device.compute.put(forget)  # type: ignore[attr-defined]
    else:
        client.submit([Submission(prompt, SHORT, forget, ignore)])
    del client
    start = time.monotonic()
    assert gone.wait(20)
    wait_until(lambda: not threads(), f"the end by the {place} thread")
    assert time.monotonic() - start < 5


def test_a_grammars_process_ends_with_a_forgotten_engine() -> None:
    pytest.importorskip("llguidance")
    from gapless import StructuredOutputsParams

    llm = LLM(**options())
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(choice=["ab", "ac"]))
    llm.generate(PROMPT, params, use_tqdm=False)
    process = llm._client._life.compiler._worker._process  # type: ignore[union-attr]
    assert process is not None
    del llm
    wait_until(lambda: process.poll() is not None, "the compiler's process")


@pytest.mark.parametrize("error", [RuntimeError("half way"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize(
    "where",
    [
        "gapless.engine.assemble.Scheduler",
        "gapless.engine.assemble.Engine",
        "gapless.engine.local_service.LoadedAdapters",
        "gapless.engine.lifetime.weakref.finalize",
        "gapless.runner.runner.State",
        "gapless.runner.runner.Graphs",
        "gapless.engine.engine.Engine.start",
    ],
)
def test_a_construction_that_fails_leaves_no_thread(
    where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(where, fail)
    for make in (LLM, AsyncLLM):
        with pytest.raises((type(error), ConfigError)) as caught:
            make(**options())
        assert caught.value is error or caught.value.__cause__ is error
        del caught
    monkeypatch.undo()
    gc.collect()


ENDS: dict[str, str] = {
    "forgotten": "del llm",
    "idle": "",
    "running": "threading.Thread(target=run, daemon=True).start(); started.wait()",
    "an exception": "raise KeyError",
    "in a cycle": "llm.me = llm; del llm",
    "in a thread that makes one": "threading.Thread(target=make, daemon=True).start(); time.sleep(0.02)",
    "async, in the middle": "asyncio.run(stream())",
}
PROGRAM = """
import asyncio, sys, threading, time
sys.path.insert(0, {tests!r})
from engines import options
from gapless import LLM, AsyncLLM, ConfigError, SamplingParams
started, keep = threading.Event(), []
LONG = SamplingParams(max_tokens=110, ignore_eos=True)
def run():
    started.set()
    while True:
        llm.generate([{{"prompt_token_ids": [5, 6]}}] * 8, LONG, use_tqdm=False)
def make():
    keep.append(LLM(**options()))
async def stream():
    other = AsyncLLM(**options())
    keep.append(other)
    await anext(other.generate({{"prompt_token_ids": [5, 6]}}, LONG))
llm = LLM(**options())
llm.generate({{"prompt_token_ids": [5, 6]}}, SamplingParams(max_tokens=2), use_tqdm=False)
print("made", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ENDS)
def test_the_interpreter_ends(end: str) -> None:
    program = PROGRAM.format(tests=str(Path(__file__).parent), end=ENDS[end])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert "made" in done.stdout, done.stderr
    assert done.returncode == (1 if end == "an exception" else 0), done.stderr
    allowed = ("EngineClosedError", "KeyError")
    assert "Traceback" not in done.stderr or any(name in done.stderr for name in allowed), done.stderr


def test_closing_after_the_end_and_twice_is_nothing() -> None:
    llm = LLM(**options())
    close: Callable[[], None] = llm.close
    close()
    close()
    client = llm._client
    del llm, close
    assert client.closed
