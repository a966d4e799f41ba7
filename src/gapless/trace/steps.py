"""Finding the steps of an engine in a profile.

By an annotation: a step is what the host launched inside one range of that name. By graph launches: a step is ``n``
launches in a row, where ``n`` is the smallest period in their numbers of nodes; it begins after the host's longest
pause. Without either a profile has no steps, and figures are of its whole span.
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
    """

    how: str
    step_of: I64
    begin: F64
    end: F64
    host_begin: F64
    periods: int
    window: tuple[float, float]
    host_window: tuple[float, float]

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
    if launches_per_step is None and OWN_ANNOTATION in recording.names:
        with contextlib.suppress(TraceError):  # the profile may not tie the launches to the ranges
            return _by_annotation(recording, OWN_ANNOTATION)
    return _by_launches(recording, launches_per_step)


def _by_annotation(recording: Recording, name: str) -> Steps:
    numbers = [i for i, text in enumerate(recording.names) if text.startswith(name)]
    ranges = recording.annotations.pick(np.isin(recording.annotations.name, numbers))
    if not len(ranges):
        known = sorted({recording.names[i] for i in recording.annotations.name.tolist()})
        raise TraceError(f"no annotation begins with {name!r}; the trace has {', '.join(known[:20]) or 'none'}")
    step_of_link: dict[int, int] = {}
    calls = recording.calls
    for lane in set(ranges.lane.tolist()):
        rows = np.flatnonzero(ranges.lane == lane)
        mine = calls.pick(calls.lane == lane)
        at = np.searchsorted(ranges.start[rows], mine.start, side="right") - 1
        inside = (at >= 0) & (mine.start < ranges.end[rows][np.maximum(at, 0)])
        for link, row in zip(mine.link[inside].tolist(), rows[at[inside]].tolist(), strict=True):
            step_of_link[link] = row
    return _steps(recording, step_of_link, ranges.start, f"ranges {name!r}")


def _by_launches(recording: Recording, per_step: int | None) -> Steps:
    calls = recording.calls
    graphs = [i for i, text in enumerate(recording.names) if "GraphLaunch" in text]
    launches = calls.pick(np.isin(calls.name, graphs))
    links, counts = np.unique(recording.work.link, return_counts=True)
    nodes = dict(zip(links.tolist(), counts.tolist(), strict=True))
    launches = launches.pick(np.isin(launches.link, links) & (launches.link >= 0))
    if len(launches) < 2:
        return _whole(recording, "no steps found: fewer than two graph launches and no annotation given", 1)
    sizes = np.array([nodes[link] for link in launches.link.tolist()])
    period = per_step or _period(sizes)
    pause = launches.start - np.concatenate(([launches.start[0]], launches.end[:-1]))
    offsets = [float(np.median(pause[k::period])) if len(pause[k::period]) else 0.0 for k in range(period)]
    first = max(range(period), key=lambda k: offsets[k]) if period > 1 else 0
    group = (np.arange(len(launches)) - first) // period
    whole = (group >= 0) & (np.arange(len(launches)) < first + period * ((len(launches) - first) // period))
    step_of_link = dict(zip(launches.link[whole].tolist(), group[whole].tolist(), strict=True))
    starts = launches.start[first::period][: int(group[whole].max()) + 1] if whole.any() else launches.start[:0]
    plural = "" if period == 1 else "es in a row"
    return _steps(recording, step_of_link, starts, f"{period} graph launch{plural} a step")


def _period(sizes: I64) -> int:
    """The smallest period that most numbers of nodes follow; 1 if there is none."""
    for period in range(1, min(len(sizes) // 2, LONGEST_PERIOD) + 1):
        if float(np.mean(sizes[period:] == sizes[:-period])) >= FIT:
            return period
    return 1


def _steps(recording: Recording, step_of_link: dict[int, int], host_begin: F64, how: str) -> Steps:
    work = recording.work
    step_of = np.array([step_of_link.get(link, -1) for link in work.link.tolist()], np.int64)
    count = len(host_begin)
    begin, end = np.full(count, np.inf), np.full(count, -np.inf)
    for rows in ((step_of >= 0) & (work.kind == KERNEL), step_of >= 0):  # a step without kernels counts by its copies
        bare = np.isinf(begin)
        rows = rows & bare[np.maximum(step_of, 0)]
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
    return Steps(how, step_of, begin, end, host_begin, len(kept) - 1, window, host)


def _whole(recording: Recording, how: str, periods: int) -> Steps:
    work, calls = recording.work, recording.calls
    window = (float(work.start[0]), float(work.end.max()))
    host = (min(window[0], float(calls.start[0])), window[1]) if len(calls) else window
    step_of = np.full(len(work), -1, np.int64)
    return Steps(how, step_of, np.zeros(0), np.zeros(0), np.zeros(0), periods, window, host)
