"""Finding the steps of an engine in a profile.

By an annotation: a step is what the host launched inside one range of that name. By graph launches: a step is ``n``
launches in a row, where ``n`` is the smallest period in their numbers of nodes; it begins after the host's longest
pause. By repetition, for an engine without graphs: a step is the distance at which some kernel comes every time; it
begins after the device's longest pause. Without any of these a profile has no steps, and figures are of its whole span.

Work belongs to a step by the call that launched it, not by its time: with several steps in flight a launch lies far
before its kernels, and the next launch as well. So a range that misses a launch loses its kernels. `Steps.share` says
how much of the window's kernel time has been given to a step; the engine's own ranges are not believed when it is too
little.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from gapless.trace.chrome import TraceError
from gapless.trace.intervals import F64, I64
from gapless.trace.recording import KERNEL, Recording

OWN_ANNOTATION = "gapless:launch"
LONGEST_PERIOD = 256
FIT = 0.9  # share of launches that must repeat, for a period to be one
COMPLETE = 0.99  # share of kernel time that must belong to steps
CYCLES = 4  # occurrences, for the distance between them to be a step


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps in the order of their launch, and the window of whole periods ``[begin of the first, begin of the last)``.

    Attributes:
        how: in words.
        step_of: for each row of the work, its step; -1 for what belongs to none.
        begin, end: first start and last end of each step's work, kernels if it has any.
        host_begin: when the host began to launch it.
        periods: whole steps in the window. 1 if there is one step only, or none.
        window: us, on the device.
        host_window: us, of the calls that launched it.
        share: of the kernel time that began in the window, what belongs to a step.
    """

    how: str
    step_of: I64
    begin: F64
    end: F64
    host_begin: F64
    periods: int
    window: tuple[float, float]
    host_window: tuple[float, float]
    share: float = 1.0

    def __len__(self) -> int:
        return len(self.begin)


def find_steps(
    recording: Recording, annotation: str | None = None, launches_per_step: int | None = None, count: int | None = None
) -> Steps:
    """See the module.

    Args:
        annotation: the beginning of the name of a range on the host.
        launches_per_step: instead of the period that is found.
        count: the trace is known to hold so many steps, and no way to tell them apart.

    Raises:
        TraceError: there is no work on a device, no range of that name, or fewer than two steps.
    """
    if not len(recording.work):
        raise TraceError("the trace holds no work of a GPU: no kernel, no copy. Was it recorded on the CPU only?")
    if count is not None:
        return _whole(recording, f"{count} steps, as given", count)
    if annotation is not None:
        return _by_annotation(recording, annotation)
    found = None
    if launches_per_step is None and OWN_ANNOTATION in recording.names:
        with contextlib.suppress(TraceError):  # the profile may not tie the launches to the ranges
            found = _by_annotation(recording, OWN_ANNOTATION)
            if found.share >= COMPLETE:
                return found
    try:
        other = _by_launches(recording, launches_per_step)
    except TraceError:
        if found is None:
            raise
        return found
    return found if found is not None and found.share >= other.share else other


def _by_annotation(recording: Recording, name: str) -> Steps:
    numbers = [i for i, text in enumerate(recording.names) if text.startswith(name)]
    ranges = recording.annotations.pick(np.isin(recording.annotations.name, numbers))
    if not len(ranges):
        known = sorted({recording.names[i] for i in recording.annotations.name.tolist()})  # sync-ok: NumPy, of a trace
        raise TraceError(f"no annotation begins with {name!r}; the trace has {', '.join(known[:20]) or 'none'}")
    step_of_link: dict[int, int] = {}
    calls = recording.calls
    for lane in set(ranges.lane.tolist()):  # sync-ok: NumPy, of a trace
        rows = np.flatnonzero(ranges.lane == lane)
        mine = calls.pick(calls.lane == lane)
        at = np.searchsorted(ranges.start[rows], mine.start, side="right") - 1
        inside = (at >= 0) & (mine.start < ranges.end[rows][np.maximum(at, 0)])
        links, found = mine.link[inside], rows[at[inside]]
        for link, row in zip(links.tolist(), found.tolist(), strict=True):  # sync-ok: NumPy, of a trace
            step_of_link[link] = row
    return _steps(recording, step_of_link, ranges.start, f"ranges {name!r}")


def _by_launches(recording: Recording, per_step: int | None) -> Steps:
    calls = recording.calls
    graphs = [i for i, text in enumerate(recording.names) if "GraphLaunch" in text]
    launches = calls.pick(np.isin(calls.name, graphs))
    links, counts = np.unique(recording.work.link, return_counts=True)
    nodes = dict(zip(links.tolist(), counts.tolist(), strict=True))  # sync-ok: NumPy, of a trace
    launches = launches.pick(np.isin(launches.link, links) & (launches.link >= 0))
    if len(launches) < 2:
        return _by_repetition(recording) or _whole(
            recording, "no steps found: fewer than two graph launches, nothing that repeats, no annotation given", 1
        )
    sizes = np.array([nodes[link] for link in launches.link.tolist()])  # sync-ok: NumPy, of a trace
    period = per_step or _period(sizes)
    pause = launches.start - np.concatenate(([launches.start[0]], launches.end[:-1]))
    offsets = [float(np.median(pause[k::period])) if len(pause[k::period]) else 0.0 for k in range(period)]
    first = max(range(period), key=lambda k: offsets[k]) if period > 1 else 0
    group = (np.arange(len(launches)) - first) // period
    whole = (group >= 0) & (np.arange(len(launches)) < first + period * ((len(launches) - first) // period))
    whose, steps = launches.link[whole], group[whole]
    step_of_link = dict(zip(whose.tolist(), steps.tolist(), strict=True))  # sync-ok: NumPy, of a trace
    starts = launches.start[first::period][: int(group[whole].max()) + 1] if whole.any() else launches.start[:0]
    how = f"{period} graph launch{'' if period == 1 else 'es in a row'} a step"
    found = _steps(recording, step_of_link, starts, how)
    if found.share >= COMPLETE or not whole.any():
        return found
    lasts = launches.end[first + period - 1 :: period][: len(starts)]
    return _with_single_launches(recording, starts, lasts, int(launches.lane[first]), how + ", and what lies between")


def _with_single_launches(recording: Recording, starts: F64, lasts: F64, lane: int, how: str) -> Steps:
    """Kernels outside of the graphs as well. Between two steps' graphs the host's longest pause divides them.

    Args:
        starts, lasts: begin of each step's first graph launch, end of its last.
        lane: the thread that launches.
    """
    calls = recording.calls
    mine = calls.pick((calls.lane == lane) & np.isin(calls.link, recording.work.link) & (calls.link >= 0))
    begins = starts.copy()
    for step in range(1, len(starts)):
        inside = (mine.start >= lasts[step - 1]) & (mine.start <= starts[step])
        reach = np.concatenate(([lasts[step - 1]], mine.end[inside][:-1]))
        begins[step] = mine.start[inside][int(np.argmax(mine.start[inside] - reach))]
    numbers = np.searchsorted(begins, mine.start, side="right") - 1
    step_of_link = dict(zip(mine.link.tolist(), numbers.tolist(), strict=True))  # sync-ok: NumPy, of a trace
    return _steps(recording, step_of_link, begins, how)


def _period(sizes: I64) -> int:
    """The smallest period that most numbers of nodes follow; 1 if there is none."""
    for period in range(1, min(len(sizes) // 2, LONGEST_PERIOD) + 1):
        if float(np.mean(sizes[period:] == sizes[:-period])) >= FIT:
            return period
    return 1


def _by_repetition(recording: Recording) -> Steps | None:
    """The shortest distance at which a kernel, or a pair of neighbours, comes again every time. None if nothing does.

    What comes once a layer does not: its distance is another one where a step ends. What comes in every second step
    only has a longer distance. Kernels of the busiest stream count.
    """
    work = recording.work
    rows = np.flatnonzero(work.kind == KERNEL)
    if len(rows) < CYCLES:
        return None
    rows = rows[work.lane[rows] == np.bincount(work.lane[rows]).argmax()]
    names = work.name[rows].astype(np.int64)
    pairs = names[:-1] * len(recording.names) + names[1:]
    found = []
    for sequence in (names, pairs):
        order = np.argsort(sequence, kind="stable")
        for places in np.split(order, np.flatnonzero(np.diff(sequence[order])) + 1):
            if len(places) < CYCLES:
                continue
            apart = np.diff(places)
            distance = int(np.median(apart))
            slack = max(min(distance // 8, 1), 0.02 * distance)  # a kernel more now and then, but not of few
            unsteady = np.count_nonzero(np.abs(apart - distance) > slack)
            if distance > 1 and unsteady <= 1 and len(places) * distance >= 0.8 * len(names):
                found.append((distance, places))
    distances = [distance for distance, _ in found]
    shared = [(d, places) for d, places in found if distances.count(d) > 1]  # one alone may be chance
    if not shared:
        return None
    distance, marks = min(shared, key=lambda item: item[0])
    reach = np.maximum.accumulate(work.end[rows])
    pause = np.maximum(work.start[rows][1:] - reach[:-1], 0.0)  # before kernel 1, 2, ...
    at = marks[:, None] + np.arange(distance) - 1
    before = np.where((at >= 0) & (at < len(pause)), pause[np.clip(at, 0, len(pause) - 1)], np.nan)
    firsts = marks + int(np.argmax(np.nanmedian(before, axis=0)))
    firsts = firsts[firsts < len(rows)]
    step_of = np.full(len(work), -1, np.int64)
    step_of[rows] = np.searchsorted(firsts, np.arange(len(rows)), side="right") - 1
    launched = dict(zip(recording.calls.link.tolist(), recording.calls.start.tolist(), strict=True))  # sync-ok: NumPy
    begun = rows[firsts]
    host = [launched.get(k, t) for k, t in zip(work.link[begun].tolist(), work.start[begun].tolist(), strict=True)]
    return _numbered(recording, step_of, np.array(host), f"{distance} kernels that repeat")


def _steps(recording: Recording, step_of_link: dict[int, int], host_begin: F64, how: str) -> Steps:
    links = recording.work.link.tolist()  # sync-ok: NumPy
    step_of = np.array([step_of_link.get(link, -1) for link in links], np.int64)
    return _numbered(recording, step_of, host_begin, how)


def _numbered(recording: Recording, step_of: I64, host_begin: F64, how: str) -> Steps:
    work, count = recording.work, len(host_begin)
    begin, end = np.full(count, np.inf), np.full(count, -np.inf)
    kernels = (step_of >= 0) & (work.kind == KERNEL)
    rows = kernels if kernels.any() else step_of >= 0  # a copy alone is a step where no step has a kernel
    np.minimum.at(begin, step_of[rows], work.start[rows])
    np.maximum.at(end, step_of[rows], work.end[rows])
    kept = np.flatnonzero(np.isfinite(begin))  # a step that launched nothing is none
    kept = kept[np.argsort(begin[kept], kind="stable")]
    number = np.full(count + 1, -1, np.int64)
    number[kept] = np.arange(len(kept))
    step_of, begin, end, host_begin = number[step_of], begin[kept], end[kept], host_begin[kept]
    if len(kept) < 2 or begin[-1] <= begin[0]:
        raise TraceError(f"fewer than two steps, by {how}, started work on the device")
    window, host = (float(begin[0]), float(begin[-1])), (float(host_begin.min()), float(host_begin.max()))
    begun = (work.kind == KERNEL) & (work.start >= begin[0]) & (work.start < begin[-1])
    lengths = work.end - work.start
    total, given = (float(lengths[rows].sum()) for rows in (begun, begun & (step_of >= 0)))
    share = given / total if total else 1.0
    return Steps(how, step_of, begin, end, host_begin, len(kept) - 1, window, host, share)


def _whole(recording: Recording, how: str, periods: int) -> Steps:
    work, calls = recording.work, recording.calls
    window = (float(work.start[0]), float(work.end.max()))
    host = (min(window[0], float(calls.start[0])), window[1]) if len(calls) else window
    step_of = np.full(len(work), -1, np.int64)
    return Steps(how, step_of, np.zeros(0), np.zeros(0), np.zeros(0), periods, window, host, share=0.0)
