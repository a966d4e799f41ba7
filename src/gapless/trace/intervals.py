"""Arithmetic of half-open intervals ``[start, end)``, as two arrays of floats sorted by start."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Intervals:
    """A set of points in time. After `union` its intervals are disjoint, do not touch, and none is empty."""

    start: F64
    end: F64

    @staticmethod
    def of(pairs: list[tuple[float, float]]) -> Intervals:
        """From pairs in any order."""
        table = np.array(sorted(pairs), np.float64).reshape(-1, 2)
        return Intervals(table[:, 0], table[:, 1])

    def __len__(self) -> int:
        return len(self.start)

    def pairs(self) -> list[tuple[float, float]]:
        """As plain numbers."""
        return list(zip(self.start.tolist(), self.end.tolist(), strict=True))  # sync-ok: NumPy, of a trace

    @property
    def total(self) -> float:
        """Sum of the lengths: of a union, the time that it covers."""
        return float(np.sum(self.end - self.start))

    def union(self) -> Intervals:
        """The same points as disjoint intervals."""
        keep = self.end > self.start
        start, end = self.start[keep], self.end[keep]
        if not len(start):
            return Intervals(start, end)
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
        reach = np.maximum.accumulate(end)  # how far everything up to here goes
        first = np.concatenate(([True], start[1:] > reach[:-1]))
        last = np.concatenate((first[1:], [True]))
        return Intervals(start[first], reach[last])

    def cut(self, start: float, end: float) -> Intervals:
        """What lies in ``[start, end)``."""
        low, high = np.clip(self.start, start, end), np.clip(self.end, start, end)
        keep = high > low
        return Intervals(low[keep], high[keep])

    def gaps(self, start: float, end: float) -> Intervals:
        """What of ``[start, end)`` a union does not cover."""
        inner = self.cut(start, end)
        low, high = np.concatenate(([start], inner.end)), np.concatenate((inner.start, [end]))
        keep = high > low
        return Intervals(low[keep], high[keep])

    def minus(self, other: Intervals) -> Intervals:
        """What of this union the union ``other`` does not cover."""
        if not len(self):
            return self
        low, high = float(self.start[0]), float(self.end[-1])
        outside = self.gaps(low, high)
        both = Intervals(np.concatenate((outside.start, other.start)), np.concatenate((outside.end, other.end)))
        return both.union().gaps(low, high)


class Nested:
    """Spans of one thread, each inside or outside of any other, as calls are; finds the innermost at a time.

    Args:
        start, end: sorted by start; of equal starts, the longer first.
    """

    def __init__(self, start: F64, end: F64) -> None:
        self.start, self.end = start, end
        self.parent = np.full(len(start), -1, np.int64)
        stack: list[int] = []
        ends = end.tolist()  # sync-ok: NumPy, of a trace
        for i, begin in enumerate(start.tolist()):  # sync-ok: NumPy, of a trace
            while stack and ends[stack[-1]] <= begin:
                stack.pop()
            if stack:
                self.parent[i] = stack[-1]
            stack.append(i)

    def at(self, time: float) -> int:
        """The innermost span that covers ``time``; -1 for none."""
        i = int(self.start.searchsorted(time, side="right")) - 1
        while i >= 0 and self.end[i] <= time:
            i = int(self.parent[i])
        return i

    def pieces(self, start: float, end: float) -> list[tuple[float, float, int]]:
        """``[start, end)`` cut where the innermost span changes: (start, end, span or -1), in order."""
        low = int(self.start.searchsorted(start, side="right"))
        high = int(self.start.searchsorted(end, side="left"))
        marks = {start, end}
        for i in range(low, high):
            marks.update((float(self.start[i]), float(self.end[i])))
        i = low - 1
        while i >= 0:
            marks.add(float(self.end[i]))
            i = int(self.parent[i])
        times = sorted(t for t in marks if start <= t <= end)
        return [(a, b, self.at(a)) for a, b in itertools.pairwise(times)]
