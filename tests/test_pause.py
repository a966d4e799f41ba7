"""Pause and sleep: requests lose nothing, others queue, memory comes back, and every wait ends."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engines import Gate, check_idle, gated, options, wait_until
from gapless import LLM, AsyncLLM, ConfigError, EngineClosedError, EngineDeadError, SamplingParams, WeightError
from gapless.device.cpu import CpuDevice
from gapless.request.outputs import FinishReason
from gapless.runner.keys import Key
from gapless.runner.recapture import warm
from models import tiny
from proof.harness import make_parts, make_request
from proof.hash_model import HashModel

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
TEXTS = ["hello", "the quick brown fox", "stop"]


def ids(outputs: list[Any]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def asked_to_pause(llm: LLM) -> bool:
    """Whether a pause of mode "finish" is on its way to the loop, which may wait for a step, or has arrived."""
    return llm._client._scheduler.admission_closed or not llm._client._engine._inbox.empty()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**options()) as llm:
        return ids(llm.generate(TEXTS, LONG, use_tqdm=False))


@contextmanager
def busy(**changes: Any) -> Iterator[tuple[LLM, Gate, Future[Any], ThreadPoolExecutor]]:
    """An engine in the middle of three requests, which another thread waits for."""
    with ThreadPoolExecutor(4) as threads, LLM(**options(**changes)) as llm, gated(llm) as gate:
        inner = gate.inner

        def slow(*arguments: Any) -> Any:
            time.sleep(0.003)  # or on a busy machine all of it is over before the test goes on
            return inner(*arguments)

        gate.inner = slow
        running = threads.submit(llm.generate, TEXTS, LONG, use_tqdm=False)
        wait_until(lambda: gate.passed > 6, "some steps")
        yield llm, gate, running, threads


@pytest.mark.parametrize("depth", [1, 3])
def test_keep_freezes_and_goes_on(depth: int, expected: list[list[int]]) -> None:
    with busy(pipeline_depth=depth) as (llm, gate, running, threads):
        llm.pause()
        llm.pause("keep")
        llm.pause("finish")  # it is paused: there is nothing to wait for
        assert llm.is_paused
        passed, computed = gate.passed, llm.stats()[1].blocks_used
        later = threads.submit(llm.generate, "h", SHORT, use_tqdm=False)
        wait_until(lambda: llm.stats()[1].waiting == 1, "the new request")
        threading.Event().wait(0.05)
        assert gate.passed == passed
        assert computed > 0  # their cache stays
        assert not running.done()
        llm.resume()
        llm.resume()
        assert not llm.is_paused
        assert ids(running.result(30)) == expected
        assert {len(i) for i in ids(later.result(30))} == {5}
        assert llm.stats()[1].preemptions == 0
        check_idle(llm)


def test_abort_ends_what_runs_and_what_waits(expected: list[list[int]]) -> None:
    with busy(max_num_seqs=2) as (llm, _, running, _):
        llm.pause("abort")
        outputs = running.result(30)
        assert {o.outputs[0].finish_reason for o in outputs} == {"abort"}
        for got, whole in zip(ids(outputs), expected, strict=True):
            assert got == whole[: len(got)]
        check_idle(llm)
        llm.resume()
        assert ids(llm.generate(TEXTS, LONG, use_tqdm=False)) == expected


def test_finish_runs_to_the_end_and_queues_what_comes(expected: list[list[int]]) -> None:
    with busy(max_num_seqs=2) as (llm, gate, running, threads):
        pausing = threads.submit(llm.pause, "finish")
        wait_until(lambda: llm._client._scheduler.admission_closed, "the pause")
        later = threads.submit(llm.generate, "h", SHORT, use_tqdm=False)
        assert ids(running.result(30)) == expected  # the third of them had not even started
        pausing.result(30)
        assert llm.is_paused
        passed = gate.passed
        threading.Event().wait(0.05)
        assert not later.done()
        assert gate.passed == passed
        llm.resume()
        assert {len(i) for i in ids(later.result(30))} == {5}
        llm.pause("finish")  # idle: at once
        llm.resume()
        check_idle(llm)


@pytest.mark.parametrize("end", ["resume", "keep", "abort"])
def test_a_wait_for_the_end_can_be_ended(end: str) -> None:
    with busy() as (llm, gate, running, threads):
        gate.open.clear()
        pausing = threads.submit(llm.pause, "finish")
        wait_until(lambda: asked_to_pause(llm), "the pause")
        other = threads.submit(llm.resume) if end == "resume" else threads.submit(llm.pause, end)
        threading.Event().wait(0.05)  # it comes while the steps stand still
        gate.open.set()
        other.result(30)
        pausing.result(30)
        assert llm.is_paused == (end != "resume")
        llm.resume()
        running.result(30)
        check_idle(llm)


def test_an_abort_in_a_pause_is_answered() -> None:
    async def whole() -> None:
        async with AsyncLLM(**options()) as llm:
            stream = llm.generate("hello", LONG, "label")
            await anext(stream)
            await llm.pause()
            assert llm.is_paused
            await llm.abort("label")
            rest = [o async for o in stream]
            assert rest[-1].outputs[0].finish_reason == "abort"
            await llm.sleep()
            assert llm.is_sleeping
            asking = asyncio.ensure_future(anext(llm.generate("h", SHORT, mode="final")))
            await asyncio.sleep(0.05)
            await llm.resume()
            await llm.wake()
            assert len((await asking).outputs[0].token_ids) == 5
            await asyncio.to_thread(check_idle, llm)

    asyncio.run(asyncio.wait_for(whole(), 60))


@pytest.mark.parametrize("depth", [1, 3])
def test_sleep_gives_the_cache_back_and_loses_no_request(depth: int, expected: list[list[int]]) -> None:
    with busy(pipeline_depth=depth) as (llm, _, running, threads):
        runner = llm._client._built.runner
        pool = [weakref.ref(t) for t in runner.state.kv]
        llm.sleep()
        llm.sleep(1)
        assert llm.is_sleeping
        assert [r() for r in pool] == [None] * len(pool)
        assert llm.stats()[1].blocks_used == 0
        later = threads.submit(llm.generate, "h", SHORT, use_tqdm=False)
        llm.reset_prefix_cache()
        llm.wake()
        llm.wake()
        assert not llm.is_sleeping
        assert ids(running.result(30)) == expected
        assert {len(i) for i in ids(later.result(30))} == {5}
        assert llm.stats()[1].preemptions > 0
        check_idle(llm)


def test_sleep_and_pause_are_independent(expected: list[list[int]]) -> None:
    with busy() as (llm, gate, running, _):
        llm.pause()
        llm.sleep()
        llm.resume()
        assert llm.is_sleeping
        llm.pause()
        llm.wake()
        passed = gate.passed
        threading.Event().wait(0.05)
        assert gate.passed == passed
        llm.resume()
        assert ids(running.result(30)) == expected


def test_new_weights_while_asleep(tmp_path: Any) -> None:
    model, other = tiny("llama"), tiny("llama", seed=4)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    with LLM(other, **{k: v for k, v in options().items() if k not in ("model", "tokenizer")}) as llm:
        want = ids(llm.generate(prompt, LONG, use_tqdm=False))
    model.save_pretrained(tmp_path)
    with LLM(**{**options(), "model": str(tmp_path), "tokenizer": None}) as llm:
        llm.generate(prompt, SHORT, use_tqdm=False)
        llm.sleep(2)  # on a CPU as level 1
        llm.update_weights(other.state_dict())
        llm.wake()
        assert ids(llm.generate(prompt, LONG, use_tqdm=False)) == want


def test_a_wake_without_memory_can_be_repeated(monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]) -> None:
    with busy() as (llm, _, running, _):
        device = llm._client._built.runner.device
        llm.sleep()
        real, calls = device.device_buffer, itertools.count()

        def short(*arguments: Any) -> Any:
            if next(calls) == 1:  # one layer's cache is there by then
                raise MemoryError("nothing left")
            return real(*arguments)

        monkeypatch.setattr(device, "device_buffer", short)
        with pytest.raises(ConfigError, match=r"wake\(\) found too little memory.*nothing left.*again"):
            llm.wake()
        assert llm.is_sleeping
        llm.wake()
        assert ids(running.result(30)) == expected


def test_what_is_refused() -> None:
    with LLM(**options()) as llm:
        for mode in ("stop", None, 1):
            with pytest.raises(ConfigError, match=r"mode=.*keep, abort, finish"):
                llm.pause(mode)  # type: ignore[arg-type]
        for level in (0, 3, True, "1"):
            with pytest.raises(ConfigError, match="level="):
                llm.sleep(level)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="the model is yours"):
            llm.sleep(2)
    for action in (llm.pause, llm.resume, llm.sleep, llm.wake, llm.update_weights):
        with pytest.raises(EngineClosedError):
            action()


@pytest.mark.parametrize("state", ["paused", "asleep", "finishing"])
def test_close_ends_every_wait(state: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        llm = LLM(**options())
        with gated(llm) as gate:
            running = threads.submit(llm.generate, TEXTS, LONG, use_tqdm=False)
            wait_until(lambda: gate.passed > 3, "some steps")
            waits = []
            if state == "finishing":
                gate.open.clear()
                waits.append(threads.submit(llm.pause, "finish"))
                wait_until(lambda: asked_to_pause(llm), "the pause")
                waits.append(threads.submit(llm.update_weights, {}))
                threading.Event().wait(0.05)  # it comes while the steps stand still
                closing = threads.submit(llm.close)
                wait_until(lambda: llm._client.closed, "the close")
                gate.open.set()
                closing.result(30)
            else:
                llm.pause() if state == "paused" else llm.sleep()
                llm.close()
            for wait in waits:
                assert isinstance(wait.exception(30), EngineClosedError) or wait.exception(30) is None
            with pytest.raises(EngineClosedError):
                running.result(30)


def test_death_ends_every_wait() -> None:
    with busy() as (llm, gate, running, threads):
        gate.open.clear()
        waits = [threads.submit(llm.pause, "finish")]
        wait_until(lambda: asked_to_pause(llm), "the pause")
        gate.error = ValueError("broken on purpose")
        gate.open.set()
        for wait in (*waits, running):
            with pytest.raises(EngineDeadError, match="broken on purpose"):
                wait.result(30)
        with pytest.raises(EngineDeadError, match="broken on purpose"):
            llm.sleep()


def test_warming_up_writes_to_nobody_s_rows() -> None:
    """A wake runs a step of padding alone, while rows wait for their blocks."""
    model = HashModel()
    scheduler, runner = make_parts(model, CpuDevice(debug=True), depth=2)
    for i in range(3):
        scheduler.add(make_request(i, [2 + i] * 9, 5))
    for _ in range(3):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, runner.wait(runner.launch(plan)).tokens)
    row = runner.layout.null_row
    arena = runner.state.arena
    tables = [t[:row].clone() for t in (arena.token_table, arena.block_tables, arena.params)]
    blocks = [t[:, 1:].clone() for t in runner.state.kv]
    keys = [Key("forward", 16, 4, False), Key("forward", 4, 4, True), Key("sample", 4, 4, False)]
    warm(runner.graphs, keys)
    after = (arena.token_table, arena.block_tables, arena.params)
    assert all(torch.equal(a, b[:row]) for a, b in zip(tables, after, strict=True))
    assert all(torch.equal(a, b[:, 1:]) for a, b in zip(blocks, runner.state.kv, strict=True))
    runner.close()


def test_a_call_that_must_wait_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(1) as threads, LLM(**options()) as llm:
        llm.pause()
        waiting = threads.submit(llm.generate, "h", SHORT, use_tqdm=False)
        wait_until(lambda: "until another thread lets it go on" in caplog.text, "the warning")
        llm.resume()
        waiting.result(30)


def test_weights_cannot_change_under_level_2() -> None:
    """The store's own check; only a GPU really moves them."""
    with LLM(**options()) as llm:
        store = llm._client._built.runner.weights
        assert store is not None
        store._host.append((None, None))  # type: ignore[arg-type]
        with pytest.raises(WeightError, match=r"call wake\(\) first"):
            llm.update_weights()
        store._host.clear()


def test_a_request_that_is_held_can_be_aborted() -> None:
    scheduler, runner = make_parts(HashModel(), CpuDevice(), depth=1)
    scheduler.admission_closed = True
    scheduler.add(make_request(0, [2, 3], 4))
    scheduler.add(make_request(1, [2, 3], 4))
    assert scheduler.schedule() is None
    assert not scheduler.has_requests
    assert scheduler.snapshot().waiting == 2
    scheduler.finish(0, FinishReason.ABORT)
    message = scheduler.message()
    assert message is not None
    assert [(f.id, f.reason) for f in message.finished] == [(0, FinishReason.ABORT)]
    scheduler.release_parked()
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.rows.ids[plan.rows].tolist() == [1]
    runner.close()
