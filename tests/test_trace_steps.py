"""Which step a kernel belongs to: where launches lie far from their kernels, and where the ranges miss the launches."""

from __future__ import annotations

import random

import pytest

from gapless.trace.analyze import Report, analyze
from gapless.trace.chrome import TraceError
from gapless.trace.clock import by_marks, by_waits
from gapless.trace.observe import Seen
from gapless.trace.record import MARK, phase_events, tie
from gapless.trace.recording import collect
from gapless.trace.steps import find_steps
from traces import LOOP, Trace, eager, kineto

approx = pytest.approx


def report_of(trace: Trace, **options: object) -> Report:
    recording = collect(trace.events)
    return analyze(recording, find_steps(recording, **options))[0]  # type: ignore[arg-type]


def test_kernels_of_graphs_with_dependent_launch() -> None:
    r = report_of(kineto(20))
    assert (r.steps, r.steps_found_by, r.nodes_per_step) == (19, "ranges 'gapless:launch'", 8)
    assert r.step_busy == approx(1.0)
    assert r.activity_span_ms_per_step == approx(4.0)
    assert r.kernel_busy == approx(1.0)
    assert r.kernel_ms_per_step == approx(4.0 + 0.2 * 5 * 0.65 + 0.2 * 0.05)  # what overlaps counts twice
    assert not r.notes


def test_ranges_that_miss_their_launches_are_not_believed() -> None:
    """A clock that is off by 250 us puts most forwards outside of the range that launched them."""
    trace = kineto(20, error=250.0)
    wrong = report_of(trace, annotation="gapless:launch")
    assert wrong.step_busy is not None
    assert wrong.step_busy < 0.3
    assert "belongs to no step" in wrong.notes[0]
    r = report_of(trace)
    assert r.steps_found_by == "2 graph launches in a row a step"
    assert (r.steps, r.step_busy, r.activity_span_ms_per_step) == (19, approx(1.0), approx(4.0))
    assert not r.notes


def recorded(cold: float) -> tuple[Trace, list[list[tuple[float, float]]], Seen]:
    """A profile, our readings at its marks, and the phases by our clock, which runs 7 s and a drift of 20 ppm apart.

    The first range of each edge begins ``cold`` us after its reading, and so does every other but one.
    """

    def ours(us: float) -> float:
        return 7.0 + 1e-6 * us * (1 + 20e-6)

    trace, marks, seen = kineto(20, ranges=False), [], Seen()
    for edge in (-500.0, 20 * 4000.0):
        readings = []
        for i in range(3):
            at = edge + 100 * i
            late = 3.0 if i == 1 else cold
            trace.range(MARK, at + late, at + late + 2)
            readings.append((ours(at), ours(at + late + 4)))
        marks.append(readings)
    for i in range(20):
        host = 4000.0 * i
        for phase, a, b in (("schedule", -60, 0), ("launch", 0, 300), ("wait", 310, 3950), ("commit", 3950, 3990)):
            seen.phases.append((phase, ours(host + a), ours(host + b)))
    trace.call("cudaDeviceSynchronize", 20 * 4000.0 + 400, 20 * 4000.0 + 900)
    return trace, marks, seen


@pytest.mark.parametrize("cold", [5.0, 280.0])
def test_phases_lie_around_the_calls_of_their_step(cold: float) -> None:
    trace, marks, seen = recorded(cold)
    clock, thread = tie(trace.events, marks, seen)
    assert thread == LOOP
    trace.events += phase_events(seen, thread, clock)
    launches = [e for e in trace.events if e["name"] == "gapless:launch"]
    assert [e["ts"] for e in launches] == approx([4000.0 * i for i in range(20)], abs=4)
    r = report_of(trace)
    assert r.steps_found_by == "ranges 'gapless:launch'"
    assert r.step_busy == approx(1.0)


def test_waits_mend_marks_that_are_all_late() -> None:
    trace, marks, seen = recorded(5.0)
    late = [[(a - 280e-6, b) for a, b in marks[0]], marks[1]]
    clock, thread = tie(trace.events, late, seen)
    assert clock.largest_correction > 100
    trace.events += phase_events(seen, thread, clock)
    assert report_of(trace).steps_found_by == "ranges 'gapless:launch'"


def test_calls_that_are_not_those_of_the_waits_move_nothing() -> None:
    clock = by_marks([[(0.0, 0.0)], [(1.0, 1.0)]], [(0.0, 0.0), (1e6, 1e6)])
    waits = [(0.1 * i, 0.1 * i + 0.01) for i in range(10)]
    assert by_waits(clock, waits, []) is clock
    assert by_waits(clock, waits, [(5.0, 6.0)]) is clock
    assert by_waits(clock, waits, [(1e5 * i, 1e5 * i + 9e4) for i in range(10)]) is clock  # longer than any wait


def test_marks_that_are_lost() -> None:
    with pytest.raises(TraceError, match="lost marks"):
        by_marks([[(0.0, 0.1)], [(1.0, 1.1)]], [(0.0, 1.0)])


def test_kernels_whose_launches_the_profile_has_not() -> None:
    """No correlation at all: graph launches cannot be told apart, but kernels repeat."""
    trace = kineto(20, ranges=False)
    for event in trace.events:
        event["args"].pop("correlation", None)
    r = report_of(trace)
    assert r.steps_found_by == "8 kernels that repeat"
    assert r.steps >= 18
    assert r.step_busy == approx(1.0, abs=0.01)


def test_steps_of_an_engine_without_graphs() -> None:
    r = report_of(eager())
    assert r.steps_found_by.endswith("kernels that repeat")
    assert r.steps == 11
    assert r.step_busy == approx((15 * 25 - 5 + 4 / 11 * 6) / 1000, abs=0.002)
    assert r.nodes_per_step == approx(15 + 4 / 11)
    assert not r.notes


def test_kernels_beside_the_graphs_belong_to_their_step() -> None:
    """A graph, then a sampler of single kernels; a wait; then the next step's input is built by a kernel."""
    t = Trace()
    for i in range(10):
        at = 1000.0 * i
        t.kernel(at + 10, at + 40, t.call("cudaLaunchKernel", at, at + 5), name="build")
        t.graph(at + 50, at + 60, [(at + 60, at + 300), (at + 302, at + 600)])
        for k in range(2):
            start = at + 610 + 50 * k
            t.kernel(start, start + 45, t.call("cudaLaunchKernel", at + 70 + k, at + 70.5 + k), name="sample")
        t.call("cudaStreamSynchronize", at + 80, at + 710)
    r = report_of(t)
    assert r.steps_found_by == "1 graph launch a step, and what lies between"
    assert r.activity_span_ms_per_step == approx((0.645 + 8 * 0.695) / 9)  # what precedes the first graph is unknown
    assert r.steps == 9
    assert not r.notes


@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_repeats_is_no_step(seed: int) -> None:
    rng = random.Random(seed)
    t = Trace()
    for i in range(150):
        t.kernel(10.0 * i, 10.0 * i + 5, name=rng.choice("abcdefgh"))
    assert report_of(t).step_busy is None
