"""Tying two clocks: the engine's ``perf_counter``, in seconds, to a profiler's, in microseconds.

Two things tie them. *Marks*: empty ranges of the profiler between two readings of ours, at both edges of a window.
The first range of a process takes a fraction of a millisecond to begin, so an edge makes several and the tightest
counts. *Waits*: the loop blocks in exactly one call of the runtime in each of its waits, and the call lies within the
wait. Where the marks say otherwise they are wrong, by as much as must be moved. Launches of one step are some tens of
microseconds apart, so an error of that size would put them outside of the range that made them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gapless.trace.chrome import TraceError

Span = tuple[float, float]
PAIRED = 0.8  # share of the waits that must have a call of their own, for the calls to be theirs


@dataclass(frozen=True, slots=True)
class Clock:
    """From seconds of ours to microseconds of theirs: a line, and corrections that are interpolated between waits.

    Attributes:
        ours, theirs: one instant on both clocks.
        rate: us per s; 1e6 but for drift.
        at, correction: s, us.
    """

    ours: float
    theirs: float
    rate: float
    at: tuple[float, ...] = ()
    correction: tuple[float, ...] = ()

    def __call__(self, time: float) -> float:
        moved = float(np.interp(time, self.at, self.correction)) if self.at else 0.0
        return self.theirs + (time - self.ours) * self.rate + moved

    @property
    def largest_correction(self) -> float:
        """us."""
        return max(map(abs, self.correction), default=0.0)


def by_marks(ours: Sequence[Sequence[Span]], theirs: Sequence[Span]) -> Clock:
    """The line through the middles of the tightest marks of the first and the last edge.

    Args:
        ours: of each edge, its marks: readings before and after, s.
        theirs: begin and end of every mark, in the same order, us.

    Raises:
        TraceError: a mark is missing.
    """
    if len(theirs) != sum(map(len, ours)) or len(ours) < 2:
        raise TraceError("the profiler lost marks that tie its clock to the engine's")
    points = []
    ends = itertools.accumulate(map(len, ours))
    for edge, end in zip(ours, ends, strict=True):
        mine = zip(edge, theirs[end - len(edge) : end], strict=True)
        our, their = min(mine, key=lambda pair: pair[0][1] - pair[0][0])
        points.append((sum(our) / 2, sum(their) / 2))
    (a, x), (b, y) = points[0], points[-1]
    return Clock(a, x, (y - x) / (b - a))


def by_waits(clock: Clock, waits: Sequence[Span], calls: Sequence[Span]) -> Clock:
    """``clock``, moved so that each wait holds its call.

    Args:
        waits: of the loop, s.
        calls: that block, on the loop's thread, us; both in the order of time. If they cannot be told to be those of
            the waits the clock stays as it is.
    """
    if not waits or not calls:
        return clock
    begins = np.array([begin for begin, _ in calls])
    expected = np.array([clock(begin) for begin, _ in waits])
    after = np.searchsorted(begins, expected)
    low, high = np.maximum(after - 1, 0), np.minimum(after, len(begins) - 1)
    nearest = np.where(np.abs(begins[low] - expected) <= np.abs(begins[high] - expected), low, high)
    chosen, count = np.unique(nearest, return_counts=True)
    alone = set(chosen[count == 1].tolist())  # sync-ok: NumPy, of a trace
    at, moved = [], []
    for (begin, end), call in zip(waits, nearest.tolist(), strict=True):  # sync-ok: NumPy, of a trace
        first, last = calls[call][1] - clock(end), calls[call][0] - clock(begin)  # how far it may be moved
        if call in alone and first <= last:
            at.append(begin)
            moved.append(min(max(0.0, first), last))
    if len(at) < PAIRED * len(waits):
        return clock
    return replace(clock, at=tuple(at), correction=tuple(moved))
