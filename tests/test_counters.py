"""Counters are copied by the loop's thread; queues without a bound say how long they were."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import Any

import pytest

from engines import gated, options
from gapless import LLM, SamplingParams
from gapless.engine.stats import EngineStats
from gapless.engine.watched_queue import LOUD, WatchedQueue
from gapless.scheduler.scheduler import Scheduler

PROMPT = {"prompt_token_ids": [5, 6, 7]}
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def numbers(value: Any) -> Any:
    """Everything in a dataclass, deep enough to see a change."""
    return dataclasses.asdict(value)


def test_what_a_caller_has_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    copied_by = set()
    snapshot = Scheduler.snapshot

    def noted(self: Scheduler) -> Any:
        copied_by.add(threading.current_thread().name)
        return snapshot(self)

    monkeypatch.setattr(Scheduler, "snapshot", noted)
    with LLM(**options(speculative="ngram")) as llm:
        llm.generate(PROMPT, LONG, use_tqdm=False)
        before = llm.stats()
        kept = [numbers(part) for part in before]
        llm.generate([PROMPT] * 9, LONG, use_tqdm=False)
        assert [numbers(part) for part in before] == kept
        after = llm.stats()
        assert after[0].steps > before[0].steps
        assert after[0].copies.h2d > before[0].copies.h2d
        assert after[1].generated_tokens == 1000
        assert copied_by == {"gapless-loop"}


def test_counts_of_one_copy_are_of_one_moment() -> None:
    """While steps run: each committed step has ended, and each that has ended was planned."""
    with LLM(**options()) as llm:
        stop = threading.Event()
        thread = threading.Thread(
            target=lambda: [llm.generate([PROMPT] * 8, LONG, use_tqdm=False) for _ in iter(stop.is_set, True)]
        )
        thread.start()
        seen = set()
        end = time.monotonic() + 2
        while time.monotonic() < end:
            engine, scheduler = llm.stats()
            assert scheduler.steps == engine.steps + engine.in_flight
            assert engine.copies.waits == engine.steps
            assert scheduler.blocks_total == 128
            seen.add(engine.steps)
        stop.set()
        thread.join()
        assert len(seen) > 5


def test_a_step_that_hangs_is_not_waited_for() -> None:
    with LLM(**options()) as llm, gated(llm) as gate:
        gate.open.clear()
        thread = threading.Thread(target=lambda: llm.generate(PROMPT, LONG, use_tqdm=False))
        thread.start()
        end = time.monotonic() + 20
        while not llm._client._engine.stats.in_flight:
            assert time.monotonic() < end
            time.sleep(0.01)
        start = time.monotonic()
        engine, scheduler = llm.stats()
        assert time.monotonic() - start < 5
        assert engine.in_flight
        assert scheduler.running == 1
        gate.open.set()
        thread.join()


def test_after_the_end_the_last_counts_remain() -> None:
    llm = LLM(**options())
    llm.generate(PROMPT, LONG, use_tqdm=False)
    llm.close()
    assert llm.stats()[1].generated_tokens == 100


def test_a_queue_remembers_its_peak_and_tells_each_doubling(caplog: pytest.LogCaptureFixture) -> None:
    queue: WatchedQueue[int] = WatchedQueue("numbers for a test")
    with caplog.at_level(logging.WARNING, "gapless"):
        for i in range(2 * LOUD + 5):
            queue.put(i)
        assert [queue.get() for _ in range(2 * LOUD + 5)] == list(range(2 * LOUD + 5))
        queue.put(1)
    assert queue.peak == 2 * LOUD + 5
    assert [record.getMessage().split(" wait")[0] for record in caplog.records] == [
        f"{LOUD} numbers for a test",
        f"{2 * LOUD} numbers for a test",
    ]


def test_the_peaks_of_an_engines_queues_are_among_its_counters() -> None:
    assert {"inbox_peak", "messages_peak", "grammars_peak"} <= {f.name for f in dataclasses.fields(EngineStats)}
    with LLM(**options()) as llm:
        llm.generate([PROMPT] * 3, LONG, use_tqdm=False)
        engine, _ = llm.stats()
        assert engine.inbox_peak >= 1
        assert engine.messages_peak >= 1
