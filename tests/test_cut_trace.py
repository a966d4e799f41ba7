"""Cutting steps out of a trace: the same figures, nothing of the machine, and small."""

from __future__ import annotations

import gzip
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from gapless.trace.analyze import analyze
from gapless.trace.chrome import TraceError
from gapless.trace.recording import load
from gapless.trace.steps import find_steps
from traces import LOOP, eager, kineto, synchronous

TOOL = Path(__file__).parent.parent / "tools" / "cut_trace.py"


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("cut_trace", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("make", "count"), [(kineto, 5), (eager, 4), (synchronous, 3)])
def test_a_part_has_the_figures_of_the_whole(make: Any, count: int, tmp_path: Path) -> None:
    whole, part = make(12).write(tmp_path / "t.json"), tmp_path / "part.json.gz"
    tool().cut_file(whole, part, 2, count, 200_000)
    reports = []
    for path in (whole, part):
        recording = load(path)
        reports.append(analyze(recording, find_steps(recording))[0])
    a, b = reports
    assert b.steps == count
    assert b.steps_found_by == a.steps_found_by
    assert b.step_busy == pytest.approx(a.step_busy, abs=0.01)
    assert b.kernel_busy == pytest.approx(a.kernel_busy, abs=0.01)
    assert [c.name for c in b.sync_lines] == [c.name for c in a.sync_lines]
    assert b.phases.keys() == a.phases.keys()


def test_nothing_of_the_machine_remains(tmp_path: Path) -> None:
    t = synchronous(8)
    for frame in (
        "/home/somebody/project/engine.py(7): turn",
        "/opt/v/lib/python3.12/site-packages/transformers/a.py(3): f",
        "<built-in method x of Thing object at 0x7fabcdef1234>",
        "/usr/lib/python3.12/threading.py(9): run",
    ):
        t.frame(frame, 2500, 2600)
    t.events.append({"ph": "M", "name": "process_labels", "pid": 99991, "tid": 0, "args": {"labels": "secret"}})
    name = {"name": "thread 99991 (/home/somebody/x)"}
    t.events.append({"ph": "M", "name": "thread_name", "pid": LOOP[0], "tid": LOOP[1], "args": name})
    part = tmp_path / "part.json.gz"
    tool().cut_file(t.write(tmp_path / "t.json.gz"), part, 1, 3, 200_000)
    text = gzip.decompress(part.read_bytes()).decode()
    for word in ("somebody", "site-packages", "/usr", "/opt", "99991", "secret", "7fabcdef"):
        assert word not in text
    for kept in ('"engine.py(7): turn"', '"transformers/a.py(3): f"', '"threading.py(9): run"', "object at 0x0"):
        assert kept in text


def test_short_functions_go_first(tmp_path: Path) -> None:
    rng = random.Random(1)
    t = synchronous(8)
    for i in range(4000):
        t.frame(f"engine.py({rng.randrange(10**6)}): f{rng.randrange(10**9)}", 2000 + i, 2000 + i + 0.9)
    part = tmp_path / "part.json.gz"
    assert tool().cut_file(t.write(tmp_path / "t.json"), part, 1, 4, 5_000) <= 5_000
    assert len(load(part).work) > 10
    assert {n for n in load(part).names if n.startswith("engine.py(50)")}
    with pytest.raises(TraceError, match="more than 300"):
        tool().cut_file(tmp_path / "t.json", part, 1, 4, 300)
    with pytest.raises(TraceError, match="too few"):
        tool().cut_file(tmp_path / "t.json", part, 1, 40, 300)
