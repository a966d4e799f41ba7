"""What a picture of a profile shows, as plain data: lanes of spans, gaps by cause, counters, and the figures.

Times are whole tenths of a microsecond from the picture's begin. A lane is one flat list ``gap before, length, name,
...``, so that 100 steps of an 8B model take some hundred kilobytes. What would not fit is drawn coarser: neighbours
that are closer than some tenths become one span.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from gapless.trace.analyze import PHASES, Report
from gapless.trace.causes import BLOCKING_CALL, CAUSES, PREFIX, Attribution
from gapless.trace.export import purpose_of_copy, stream_name
from gapless.trace.recording import COPY, KERNEL, Recording, Spans
from gapless.trace.steps import Steps

UNIT = 0.1  # us
MOST_BYTES = 1_500_000
NAME_LENGTH = 90
Span = tuple[float, float, str]


def timeline(
    recording: Recording, steps: Steps, report: Report, found: Attribution, title: str, count: int = 100
) -> dict[str, Any]:
    """The first ``count`` steps of the window; all of it if it has no steps."""
    start, end = steps.window
    if len(steps) > count:
        end = float(steps.begin[count])
    margin = min(0.02 * (end - start), 500.0)
    low = start - margin
    view = (low, end + margin)
    lanes = [
        *_streams(recording, view),
        *_phases(recording, view),
        *_calls(recording, view),
    ]
    pieces: list[Span] = []
    for gap in found.gaps:
        if gap.end > low and gap.start < view[1]:
            pieces += [(p.start, p.end, f"{p.cause}\n{p.detail}\n{gap.opened_by}") for p in gap.pieces]
    lanes.insert(0, ("gaps", "gaps by cause", pieces))
    encoded = _fit(lanes, low)
    return {
        **encoded,
        "title": title,
        "unit": UNIT,
        "span": round((view[1] - low) / UNIT),
        "window": [round((start - low) / UNIT), round((end - low) / UNIT)],
        "steps": [round((t - low) / UNIT) for t in steps.begin.tolist() if low <= t <= view[1]],  # sync-ok: NumPy
        "causes": [[cause, report.causes_ms[cause]] for cause in CAUSES],
        "figures": figures(report),
        "counters": _counters(recording, view),
    }


def figures(r: Report) -> list[list[str]]:
    """The report's main figures, as label and value."""
    rows = [
        ["steps", f"{r.steps} ({r.steps_found_by})"],
        ["span per step", f"{r.span_ms_per_step:.3f} ms"],
        ["kernel time per step", f"{r.kernel_ms_per_step:.3f} ms"],
        ["kernels per step", f"{r.nodes_per_step:.1f}"],
        ["kernel-busy, profiled", f"{100 * r.kernel_busy:.2f} %"],
    ]
    if r.undisturbed_busy is not None:
        rows.append(["kernel-busy, undisturbed", f"{100 * r.undisturbed_busy:.2f} %"])
    if r.step_busy is not None:
        rows.append(["step-busy, profiled", f"{100 * r.step_busy:.2f} %"])
    if r.gap_us_per_node is not None:
        rows.append(["gap per node", f"{r.gap_us_per_node:.2f} us"])
    rows.append(["waits of the host per step", f"{sum(c.per_step for c in r.sync_lines):.2f}"])
    return rows


Lane = tuple[str, str, list[Span]]


def _streams(recording: Recording, view: tuple[float, float]) -> Iterable[Lane]:
    work = recording.work
    order = {"h2d": 0, "compute": 1, "d2h": 2}
    lanes = {lane: _purpose(recording, lane) for lane in sorted(set(work.lane.tolist()))}  # sync-ok: NumPy
    for lane, purpose in sorted(lanes.items(), key=lambda item: order.get(item[1], 3)):
        spans = _seen(recording, work.pick(work.lane == lane), view)
        if spans:
            name = recording.lanes[lane]
            yield "stream", name if name == purpose else f"{purpose}: {name}", spans


def _purpose(recording: Recording, lane: int) -> str:
    mine = recording.work.pick(recording.work.lane == lane)
    purposes: Counter[str] = Counter()
    purposes["compute"] = int(np.count_nonzero(mine.kind == KERNEL))
    for name in mine.name[mine.kind == COPY].tolist():  # sync-ok: NumPy
        purposes[purpose_of_copy(recording.names[name])] += 1
    return stream_name(purposes)


def _phases(recording: Recording, view: tuple[float, float]) -> Iterable[Lane]:
    spans = recording.annotations
    own = [name for name in PHASES if PREFIX + name in recording.names]
    for name in own:
        mine = _seen(recording, spans.pick(spans.name == recording.names.index(PREFIX + name)), view)
        if mine:
            yield "phase", name, [(a, b, name) for a, b, _ in mine]
    if not own and len(spans):
        for lane in sorted(set(spans.lane.tolist())):  # sync-ok: NumPy
            mine = _seen(recording, spans.pick(spans.lane == lane), view)
            if mine:
                yield "phase", f"ranges of {recording.lanes[lane]}", mine


def _calls(recording: Recording, view: tuple[float, float]) -> Iterable[Lane]:
    """Launches and blocking calls of each thread that has any."""
    calls, names = recording.calls, recording.names
    kept = [i for i, t in enumerate(names) if "aunch" in t or "emcpy" in t or BLOCKING_CALL.match(t)]
    shown = calls.pick(np.isin(calls.name, kept))
    for lane in sorted(set(shown.lane.tolist())):  # sync-ok: NumPy
        mine = _seen(recording, shown.pick(shown.lane == lane), view)
        if mine:
            yield "call", f"calls of {recording.lanes[lane]}", mine


def _seen(recording: Recording, spans: Spans, view: tuple[float, float]) -> list[Span]:
    inside = spans.pick((spans.end > view[0]) & (spans.start < view[1]))
    names = recording.names
    rows = zip(inside.start.tolist(), inside.end.tolist(), inside.name.tolist(), strict=True)  # sync-ok: NumPy
    return [(max(a, view[0]), min(b, view[1]), names[n][:NAME_LENGTH]) for a, b, n in rows]


def _counters(recording: Recording, view: tuple[float, float]) -> list[dict[str, Any]]:
    series: dict[str, list[tuple[int, float]]] = {}
    for name, t, values in recording.counters:
        if view[0] <= t <= view[1]:
            for key, value in values.items():
                series.setdefault(f"{name} {key}", []).append((round((t - view[0]) / UNIT), float(value)))
    return [{"name": name, "points": points} for name, points in series.items()]


def _fit(lanes: list[Lane], low: float) -> dict[str, Any]:
    """Names by number and lanes as flat lists, no larger than `MOST_BYTES`."""
    closer = 0.0
    while True:
        numbers: dict[str, int] = {}
        out = []
        for kind, name, spans in lanes:
            merged = spans if kind == "gaps" and not closer else _coarser(spans, closer)
            out.append({"kind": kind, "name": name, "spans": _flat(merged, low, numbers)})
        data = {"names": list(numbers), "lanes": out, "coarse_us": closer}
        if len(json.dumps(data, separators=(",", ":"))) <= MOST_BYTES:
            return data
        closer = max(2 * closer, 0.5)


def _flat(spans: list[Span], low: float, numbers: dict[str, int]) -> list[int]:
    flat: list[int] = []
    last = 0
    for start, end, name in sorted(spans, key=lambda s: (s[0], -s[1])):
        at = round((start - low) / UNIT)
        flat += [at - last, max(round((end - low) / UNIT) - at, 0), numbers.setdefault(name, len(numbers))]
        last = at
    return flat


def _coarser(spans: list[Span], closer: float) -> list[Span]:
    """Neighbours with less than ``closer`` us between them become one."""
    if not closer:
        return spans
    out: list[Span] = []
    counts: list[int] = []
    for start, end, name in sorted(spans):
        if out and start - out[-1][1] < closer:
            out[-1] = (out[-1][0], max(out[-1][1], end), out[-1][2])
            counts[-1] += 1
        else:
            out.append((start, end, name))
            counts.append(1)
    return [(a, b, name if n == 1 else f"{n} in a row") for (a, b, name), n in zip(out, counts, strict=True)]
