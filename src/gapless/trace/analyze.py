"""The figures of a profile.

Definitions, over a window of whole steps (from the begin of the first step's work to the begin of the last's):
    span            length of the window
    kernel-busy     union of kernel, copy and memset intervals / span, all streams together
    undisturbed     that union per step / time of a step in a run without a profiler, which slows launches
    step-busy       sum over steps of (end of the last node - begin of the first) / span: what the host costs
    activity span   first to last work of a step, its mean
    kernel time     sum of kernel durations per step; overlapping kernels count twice
    gap per node    idle time between the kernels of a step that were launched together, / (nodes - 1)
    idle            1 - kernel-busy
Host calls are counted over the same steps in the host's time, from one launch to another.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gapless.trace.causes import PREFIX, SYNC_CALL, Attribution, Host, attribute, is_pageable
from gapless.trace.recording import KERNEL, Recording, Spans
from gapless.trace.steps import COMPLETE, Steps

THRESHOLD_US = 5.0
PHASES = ("idle", "receive", "schedule", "launch", "fill", "mask", "wait", "commit", "publish")
LARGEST = 10


@dataclass(frozen=True, slots=True)
class Calls:
    """A host call: how often a step, and how long."""

    name: str
    per_step: float
    ms_per_step: float


@dataclass(slots=True)
class Report:
    """See the module. Milliseconds, shares from 0 to 1; None where the profile cannot say."""

    steps: int
    steps_found_by: str
    device: int
    span_ms: float
    kernel_busy: float
    compute_busy: float
    idle: float
    step_busy: float | None
    undisturbed_step_ms: float | None
    undisturbed_busy: float | None
    span_ms_per_step: float
    activity_span_ms_per_step: float | None
    kernel_ms_per_step: float
    busy_ms_per_step: float
    nodes_per_step: float
    gap_us_per_node: float | None
    no_kernel_ms: float
    threshold_us: float
    copies: list[dict[str, Any]]
    syncs: list[Calls]
    sync_lines: list[Calls]
    launches: list[Calls]
    phases: dict[str, float]
    causes_ms: dict[str, float]
    details: list[dict[str, Any]]
    opened_by_ms: dict[str, float]
    largest_gaps: list[dict[str, Any]]
    top_kernels: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def analyze(
    recording: Recording, steps: Steps, threshold_us: float = THRESHOLD_US, undisturbed_ms: float | None = None
) -> tuple[Report, Attribution]:
    """The figures, and the gaps behind them.

    Args:
        threshold_us: shorter gaps are "between nodes".
        undisturbed_ms: milliseconds of a step without a profiler.
    """
    start, end = steps.window
    work, span, n = recording.work, end - start, steps.periods
    inside = work.pick((work.end > start) & (work.start < end))
    kernels = inside.pick(inside.kind == KERNEL)
    busy, compute = (s.intervals.union().cut(start, end).total for s in (inside, kernels))
    begun = kernels.pick(kernels.start >= start)
    found = attribute(recording, steps.window, threshold_us)
    host = Host(recording)
    calls = recording.calls
    in_window = (calls.start >= steps.host_window[0]) & (calls.start < steps.host_window[1])
    whole = slice(0, n) if len(steps) else slice(0, 0)
    spans = (steps.end - steps.begin)[whole]
    report = Report(
        steps=n,
        steps_found_by=steps.how,
        device=recording.device,
        span_ms=span / 1e3,
        kernel_busy=busy / span,
        compute_busy=compute / span,
        idle=1 - busy / span,
        step_busy=float(np.sum(np.minimum(spans, _periods(steps)))) / span if len(spans) else None,
        undisturbed_step_ms=undisturbed_ms,
        undisturbed_busy=busy / n / 1e3 / undisturbed_ms if undisturbed_ms else None,
        span_ms_per_step=span / n / 1e3,
        activity_span_ms_per_step=float(np.mean(spans)) / 1e3 if len(spans) else None,
        kernel_ms_per_step=begun.intervals.total / n / 1e3,
        busy_ms_per_step=busy / n / 1e3,
        nodes_per_step=len(begun) / n,
        gap_us_per_node=_gap_per_node(begun),
        no_kernel_ms=(span - compute) / 1e3,
        threshold_us=threshold_us,
        copies=_copies(recording, inside.pick((inside.kind != KERNEL) & (inside.start >= start)), n),
        syncs=_count(
            ((recording.names[name], ms) for name, ms in _durations(calls.pick(in_window & _syncs(recording)))), n
        ),
        sync_lines=_count(_sync_lines(recording, host, in_window), n),
        launches=_count(
            (
                (recording.names[name], ms)
                for name, ms in _durations(calls.pick(in_window))
                if "Launch" in recording.names[name]
            ),
            n,
        ),
        phases=_phases(recording, steps),
        causes_ms={cause: us / 1e3 for cause, us in found.by_cause.items()},
        details=[
            {"cause": cause, "detail": detail, "ms": us / 1e3}
            for (cause, detail), us in sorted(found.by_detail.items(), key=lambda item: -item[1])
        ],
        opened_by_ms={name: us / 1e3 for name, us in sorted(found.by_opener.items(), key=lambda item: -item[1])},
        largest_gaps=_largest(found, start),
        top_kernels=_top(recording, begun, n),
    )
    if len(recording.devices) > 1:
        report.notes.append(f"the trace has devices {recording.devices}; this is of device {recording.device}")
    if len(steps) and steps.share < COMPLETE:
        report.notes.append(
            f"{100 * (1 - steps.share):.1f} % of the kernel time belongs to no step ({steps.how}): step-busy and "
            "activity span are too small; name the steps by --annotation or --launches-per-step"
        )
    if report.undisturbed_busy is not None and report.undisturbed_busy > 1:
        report.notes.append("undisturbed is over 100 %: under the profiler the kernels took longer; read it as 100 %")
    return report, found


def _periods(steps: Steps) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(steps.begin[1:] - steps.begin[:-1], np.float64)


def _gap_per_node(kernels: Spans) -> float | None:
    """Over all pairs of kernels that follow each other in one graph launch."""
    linked = kernels.pick(kernels.link >= 0)
    gaps = count = 0.0
    order = np.lexsort((linked.start, linked.link))
    start, end, link = linked.start[order], linked.end[order], linked.link[order]
    same = link[1:] == link[:-1]
    reach = end.copy()
    for a, b in _runs(link):
        reach[a:b] = np.maximum.accumulate(end[a:b])
    gaps = float(np.sum(np.maximum(start[1:] - reach[:-1], 0)[same]))
    count = int(np.count_nonzero(same))
    return gaps / count if count else None


def _runs(values: np.ndarray[Any, Any]) -> Iterable[tuple[int, int]]:
    if not len(values):
        return []
    marks = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1], [True])))
    return itertools.pairwise(marks.tolist())  # sync-ok: NumPy, of a trace


def _copies(recording: Recording, copies: Spans, n: int) -> list[dict[str, Any]]:
    out = []
    for name in sorted(set(copies.name.tolist())):  # sync-ok: NumPy, of a trace
        mine = copies.pick(copies.name == name)
        text = recording.names[name]
        out.append(
            {
                "name": text,
                "pageable": is_pageable(text),
                "per_step": len(mine) / n,
                "bytes_per_step": float(np.sum(mine.size)) / n,
                "us_per_step": mine.intervals.total / n,
            }
        )
    return sorted(out, key=lambda row: -float(row["per_step"]))


def _syncs(recording: Recording) -> np.ndarray[Any, np.dtype[np.bool_]]:
    names = [i for i, text in enumerate(recording.names) if SYNC_CALL.match(text)]
    return np.isin(recording.calls.name, names)


def _durations(calls: Spans) -> Iterable[tuple[int, float]]:
    microseconds = (calls.end - calls.start) / 1e3
    return zip(calls.name.tolist(), microseconds.tolist(), strict=True)  # sync-ok: NumPy, of a trace


def _sync_lines(recording: Recording, host: Host, in_window: np.ndarray[Any, Any]) -> Iterable[tuple[str, float]]:
    """Each blocking call with its Python line; pageable copies are among them."""
    calls = recording.calls.pick(in_window & (_syncs(recording) | host.pageable))
    for row in range(len(calls)):
        lane = int(calls.lane[row])
        yield host.call_text(lane, calls, row), float(calls.end[row] - calls.start[row]) / 1e3


def _count(durations: Iterable[tuple[str, float]], n: int) -> list[Calls]:
    number: Counter[str] = Counter()
    total: dict[str, float] = {}
    for name, ms in durations:
        number[name] += 1
        total[name] = total.get(name, 0.0) + ms
    return sorted((Calls(name, k / n, total[name] / n) for name, k in number.items()), key=lambda c: -c.ms_per_step)


def _phases(recording: Recording, steps: Steps) -> dict[str, float]:
    """Milliseconds per step in each of the engine's own annotations; what lies inside another counts there."""
    spans, (start, end) = recording.annotations, steps.host_window
    own = {i: t.removeprefix(PREFIX) for i, t in enumerate(recording.names) if t.startswith(PREFIX)}
    inside = spans.pick(np.isin(spans.name, list(own)) & (spans.start < end) & (spans.end > start))
    total: dict[str, float] = {}
    for lane in sorted(set(inside.lane.tolist())):  # sync-ok: NumPy, of a trace
        mine = inside.pick(inside.lane == lane)
        for a, b, row in mine.nested().pieces(start, end):
            if row >= 0:
                phase = own[int(mine.name[row])]
                total[phase] = total.get(phase, 0.0) + (b - a) / 1e3 / steps.periods
    return dict(sorted(total.items(), key=lambda item: PHASES.index(item[0]) if item[0] in PHASES else len(PHASES)))


def _largest(found: Attribution, start: float) -> list[dict[str, Any]]:
    gaps = sorted(found.gaps, key=lambda gap: gap.start - gap.end)[:LARGEST]
    return [
        {
            "at_ms": (gap.start - start) / 1e3,
            "ms": (gap.end - gap.start) / 1e3,
            "next": gap.next_work,
            "opened_by": gap.opened_by,
            "pieces": [{"cause": p.cause, "detail": p.detail, "ms": (p.end - p.start) / 1e3} for p in gap.pieces],
        }
        for gap in gaps
    ]


def _top(recording: Recording, kernels: Spans, n: int) -> list[dict[str, Any]]:
    lengths = kernels.end - kernels.start
    total = np.bincount(kernels.name, weights=lengths, minlength=len(recording.names))
    count = np.bincount(kernels.name, minlength=len(recording.names))
    order = [int(i) for i in np.argsort(-total)[:LARGEST] if total[i] > 0]
    return [
        {"name": recording.names[i], "ms_per_step": float(total[i]) / n / 1e3, "per_step": float(count[i]) / n}
        for i in order
    ]
