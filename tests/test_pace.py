"""What a progress bar says of the engine, and the counters behind it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from engines import options
from gapless import LLM, SamplingParams
from gapless.engine.progress import Pace
from gapless.engine.stats import EngineStats
from gapless.scheduler.stats import SchedulerStats


def test_idle_time_by_cause() -> None:
    stats = EngineStats(busy=9.0, idle_host=1.0, idle_no_work=5.0)
    assert stats.idle["host"] == 1.0
    assert stats.idle["no_work"] == 5.0
    assert stats.busy_share == pytest.approx(9.0 / sum([9.0, *stats.idle.values(), -5.0]))
    assert EngineStats().busy_share == 1.0


def test_a_cause_that_is_added_is_shown() -> None:
    @dataclass(slots=True)
    class More(EngineStats):
        idle_weather: float = 0.0

    engine, scheduler = More(busy=1.0), SchedulerStats()
    pace = Pace(lambda: (engine, scheduler))
    engine.busy, engine.idle_weather, engine.idle_no_work = 1.75, 0.25, 100.0
    assert engine.busy_share == pytest.approx(1.75 / 2)
    assert "busy 75.0 % (waits: weather 25.0 %)" in str(pace)


def test_words_are_of_the_call_and_of_now() -> None:
    engine = EngineStats(steps=100, busy=50.0, idle_host=50.0)
    scheduler = SchedulerStats(generated_tokens=1000)
    now = [engine, scheduler]
    pace = Pace(lambda: (now[0], now[1]))  # type: ignore[arg-type, return-value]
    assert "busy" not in str(pace)  # nothing has run yet
    now[0] = replace(engine, busy=59.995, idle_host=50.005)
    now[1] = SchedulerStats(generated_tokens=3000, running=3, waiting=2, blocks_used=41, blocks_total=100)
    text = str(pace)
    assert re.match(r"\d+\.\d tokens/s, busy 99.9 %, 3 running, 2 waiting, KV 41 %$", text), text


def test_counters_of_an_engine_and_its_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.llm.INTERVAL", 0.001)
    with LLM(**options()) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [2, 3, 4]}] * 3, params)
        engine, scheduler = llm.stats()
        assert (scheduler.running, scheduler.waiting, scheduler.blocks_used) == (0, 0, 0)
        assert scheduler.blocks_total == llm._client._scheduler.pool.capacity
        assert scheduler.kv_use == 0
        assert 0 < engine.busy_share <= 1
        assert engine.busy_share == pytest.approx(engine.busy / (engine.busy + engine.idle_host))
    bar = capsys.readouterr().err
    assert "3 running, KV" in bar
    assert re.search(r"3/3 .*tokens/s, busy \d", bar)
