"""Figures and causes on traces whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gapless.cli import main
from gapless.trace.analyze import Report, analyze
from gapless.trace.causes import COPYING, HOST, LATENCY, NO_WORK, NODES, SYNC, UNKNOWN
from gapless.trace.chrome import TraceError
from gapless.trace.recording import collect
from gapless.trace.report import render
from gapless.trace.steps import find_steps
from traces import PAGEABLE_H2D, Trace, asynchronous, synchronous

approx = pytest.approx


def report_of(trace: Trace, step_ms: float | None = None, **options: object) -> Report:
    recording = collect(trace.events)
    return analyze(recording, find_steps(recording, **options), undisturbed_ms=step_ms)[0]  # type: ignore[arg-type]


def test_a_synchronous_engine() -> None:
    r = report_of(synchronous(6), step_ms=0.9)
    assert (r.steps, r.span_ms) == (5, approx(5.0))
    assert r.kernel_busy == approx(0.678)  # 370 + 298 + 10 of 1000
    assert r.compute_busy == approx(0.668)
    assert r.idle == approx(0.322)
    assert r.step_busy == approx(0.670)
    assert r.undisturbed_busy == approx(0.678 / 0.9)
    assert r.activity_span_ms_per_step == approx(0.670)
    assert r.kernel_ms_per_step == approx(0.668)
    assert r.nodes_per_step == 2
    assert r.gap_us_per_node == approx(2.0)
    assert [c["per_step"] for c in r.copies] == [1.0]
    (sync,) = r.syncs
    assert (sync.name, sync.per_step, sync.ms_per_step) == ("cudaEventSynchronize", 1.0, approx(0.7))
    assert r.sync_lines[0].name == "cudaEventSynchronize at engine.py(50): fetch"
    per_step = {cause: 1e3 * ms / 5 for cause, ms in r.causes_ms.items() if ms}
    assert per_step == approx({NODES: 2, COPYING: 10, SYNC: 20, HOST: 260, LATENCY: 40})
    details = {(d["cause"], d["detail"]): 1e3 * d["ms"] / 5 for d in r.details}
    assert details[HOST, "commit"] == approx(60)
    assert details[HOST, "schedule"] == approx(190)
    assert details[HOST, "engine.py(10): step"] == approx(9)
    assert r.opened_by_ms == {"cudaEventSynchronize at engine.py(50): fetch": approx(5 * 0.310)}


def test_an_asynchronous_engine() -> None:
    r = report_of(asynchronous(8))
    assert r.steps == 7
    assert "gapless:launch" in r.steps_found_by
    assert r.kernel_busy == approx(0.998)
    assert r.step_busy == approx(0.9995)
    assert r.causes_ms[NODES] == approx(7 * 0.002)
    assert sum(r.causes_ms.values()) == approx(r.no_kernel_ms)
    assert r.gap_us_per_node == approx(0.5)
    assert r.phases == approx({"launch": 0.07, "fill": 0.03, "wait": 0.85, "commit": 0.04})
    assert not r.opened_by_ms
    by_launches = report_of(asynchronous(8), launches_per_step=2)
    assert (by_launches.steps, by_launches.nodes_per_step) == (7, 4)


def test_a_period_of_launches_is_found() -> None:
    trace = asynchronous(8)
    trace.events = [e for e in trace.events if e["cat"] != "user_annotation"]
    r = report_of(trace)
    assert r.steps_found_by == "2 graph launches in a row a step"
    assert (r.steps, r.step_busy) == (7, approx(0.9995))


def test_a_pageable_copy_blocks_and_is_named() -> None:
    """The host is in the copy while the device runs dry, and 30 us longer; then it launches a kernel."""
    t = Trace()
    for i in range(4):
        at = 500.0 * i
        t.graph(at, at + 5, [(at + 10, at + 200)])
        link = t.call("cudaMemcpyAsync", at + 20, at + 250)
        t.copy(at + 210, at + 220, link, PAGEABLE_H2D)
        t.frame("model.py(7): build", at + 19, at + 251)
        t.call("cudaStreamSynchronize", at + 250, at + 251)
    r = report_of(t)
    copy = "cudaMemcpyAsync at model.py(7): build"
    assert r.copies[0]["pageable"]
    assert copy in [c.name for c in r.sync_lines]
    # [200, 210) before the copy, whose call had begun: latency. [220, 250) in the copy's call, [250, 251) in the sync.
    per_step = {(d["cause"], d["detail"]): 1e3 * d["ms"] / 3 for d in r.details}
    assert per_step[SYNC, copy] == approx(30)
    assert per_step[HOST, ""] == approx(500 - 251)
    assert per_step[LATENCY, "cudaGraphLaunch"] == approx(10)
    assert per_step[COPYING, PAGEABLE_H2D] == approx(10)
    assert r.opened_by_ms[copy] == approx(3 * 0.290)
    assert "pageable: the host waits" in render(r)


def test_nothing_to_do_and_unknown() -> None:
    t = Trace()
    t.kernel(0, 10, t.call("cudaLaunchKernel", -5, -1))
    t.range("gapless:idle", 12, 60)
    t.frame("<built-in method acquire of _thread.lock object>", 70, 90)
    t.kernel(100, 110, t.call("cudaLaunchKernel", 95, 98))
    t.kernel(150, 160)
    r = report_of(t)
    assert r.steps_found_by.startswith("no steps found")
    causes = {cause: 1e3 * ms for cause, ms in r.causes_ms.items() if ms}
    assert causes == approx({NO_WORK: 48 + 20, HOST: 2 + 10 + 5, LATENCY: 5, UNKNOWN: 40})


@st.composite
def any_trace(draw: st.DrawFn) -> Trace:
    """Nonsense, but for calls that nest: the causes must sum to the time without a kernel whatever happened."""
    t = Trace()
    integers = st.integers(0, 300)
    at = 0
    for _ in range(draw(st.integers(2, 8))):
        at += draw(st.integers(1, 60))
        end = at + draw(st.integers(1, 50))
        name = draw(st.sampled_from(["cudaGraphLaunch", "cudaStreamSynchronize", "cudaMemcpyAsync", "cudaFree"]))
        link = t.call(name, at, end)
        for _ in range(draw(st.integers(0, 3))):
            start = draw(integers)
            stop = start + draw(st.integers(0, 50))
            if draw(st.booleans()):
                t.kernel(start, stop, draw(st.sampled_from([link, link, -1, 999])), stream=draw(st.integers(7, 9)))
            else:
                t.copy(start, stop, link, draw(st.sampled_from([PAGEABLE_H2D, "Memcpy DtoD (Device -> Device)"])))
        if draw(st.booleans()):
            t.range(draw(st.sampled_from(["idle", "gapless:commit"])), at, end)
        at = end
    t.kernel(draw(integers), 301)
    return t


@settings(deadline=None)
@given(any_trace(), st.floats(0, 20))
def test_causes_sum_to_the_time_without_a_kernel(trace: Trace, threshold: float) -> None:
    recording = collect(trace.events)
    try:
        steps = find_steps(recording)
    except TraceError:
        assume(False)
    r, found = analyze(recording, steps, threshold)
    assert sum(r.causes_ms.values()) == approx(r.no_kernel_ms, abs=1e-9)
    assert r.causes_ms[COPYING] == approx((r.kernel_busy - r.compute_busy) * r.span_ms, abs=1e-9)
    for gap in found.gaps:
        edges = [gap.pieces[0].start, *(p.end for p in gap.pieces)]
        assert (edges[0], edges[-1]) == (gap.start, gap.end)
        assert edges == sorted(edges)
    assert render(r)


def test_two_devices() -> None:
    t = synchronous(3)
    t.kernel(0, 50, device=1)
    recording = collect(t.events)
    assert (recording.device, recording.devices) == (0, (0, 1))
    assert collect(t.events, 1).work.intervals.total == 50
    with pytest.raises(TraceError, match="no work of device 4; it has 0, 1"):
        collect(t.events, 4)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = str(synchronous().write(tmp_path / "t.json.gz")), tmp_path / "r.json"
    assert main(["trace", "analyze", file, "--step-ms", "0.9", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "cudaEventSynchronize at engine.py(50): fetch" in text
    assert "75.33 %" in text
    assert json.loads(out.read_text())["kernel_busy"] == approx(0.678)
    assert main(["trace", "analyze", file, "--annotation", "commit"]) == 1  # nothing is launched in it
    assert "fewer than two steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["trace"], 2, "analyze"),
        (["trace", "analyse"], 2, "'analyze'"),
        (["trace", "analyze"], 2, "one trace file"),
        (["trace", "analyze", "no/such/file"], 1, "no/such/file"),
        (["trace", "analyze", "x", "--tresh", "3"], 2, "'--threshold'"),
        (["trace", "analyze", "x", "--steps", "0"], 2, "--steps 0"),
    ],
)
def test_usage(words: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    assert text in capsys.readouterr().err


def test_a_trace_of_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace()
    trace.range("x", 0, 1)
    assert main(["trace", "analyze", str(trace.write(tmp_path / "t.json"))]) == 1
    assert "no work of a GPU" in capsys.readouterr().err
