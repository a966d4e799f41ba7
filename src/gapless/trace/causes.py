"""Who caused each gap. Every microsecond without a kernel gets exactly one cause, so that the causes sum to that time.

    between nodes   shorter than the threshold, or inside one graph: what lies between two dependent kernels
    copy            a copy or a memset ran, and no kernel
    sync            the host was inside a call that blocks until the device is done: it could not launch ahead
    host            the host worked on something else, before it began the call that launched the next work
    nothing to do   the host waited for requests: in a range named ``idle``, or in a Python wait, a sleep or a queue
    launch latency  from the begin of that call to the begin of its work
    unknown         the profile does not say which call launched the next work

A gap is cut where the host's state changes: the microseconds in which a call still blocked are ``sync``, those in which
the host then prepared the next launch are ``host``. What opened the gap is kept as well: when the host was inside
a blocking call as the device ran dry, all of the gap follows from that call (``opened_by``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from gapless.trace.intervals import I64, Intervals, Nested
from gapless.trace.recording import COPY, KERNEL, Recording, Spans

NODES, COPYING, SYNC, HOST, NO_WORK, LATENCY, UNKNOWN = CAUSES = (
    "between nodes", "copy", "sync", "host", "nothing to do", "launch latency", "unknown",
)  # fmt: skip
SYNC_CALL = re.compile(r"(cuda|hip)(Stream|Device|Event)Synchronize|cu(Stream|Event|Ctx)Synchronize|synchronize$")
BLOCKING_CALL = re.compile(
    SYNC_CALL.pattern + r"|(cuda|hip)(Memcpy|Memset|Malloc|Free|HostAlloc|FreeHost|MallocHost)(_v\d+)?$"
)
WAITING_FRAME = re.compile(
    r"method (acquire|wait|get|poll|select|sleep|recv|read|accept|join)\b|built-in function (sleep|select|poll)\b"
    r"|\b(threading|queue|selectors|socket)\.py\("
)
LIBRARY_FRAME = re.compile(r"(^|[/\\])(torch|site-packages|dist-packages|threading\.py)|^<|^nn\.Module")
IDLE = "idle"
PREFIX = "gapless:"


class Piece(NamedTuple):
    """A part of a gap: us, and what the host did in it, or what ran."""

    start: float
    end: float
    cause: str
    detail: str


@dataclass(frozen=True, slots=True)
class Gap:
    """Time in which neither a kernel nor a copy ran, longer than the threshold.

    Attributes:
        next_work: name of what ended it.
        opened_by: the blocking call that the host was in when the gap began, with its Python line; else empty.
    """

    start: float
    end: float
    next_work: str
    opened_by: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Attribution:
    """All of a window's time without a kernel, us.

    Attributes:
        by_cause: every cause, with its time.
        by_detail: (cause, detail) with time.
        by_opener: time of the gaps that each blocking call opened.
        gaps: those over the threshold.
    """

    by_cause: dict[str, float]
    by_detail: dict[tuple[str, str], float]
    by_opener: dict[str, float]
    gaps: list[Gap]


@cache
def _of_a_library(frame: str) -> bool:
    return LIBRARY_FRAME.search(frame) is not None


@cache
def _waits(frame: str) -> bool:
    return WAITING_FRAME.search(frame) is not None


def is_pageable(name: str) -> bool:
    """A copy from or to host memory that is not pinned: the host is blocked meanwhile."""
    return "Pageable" in name


class Host:
    """What each host thread did at a time."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        pageable = [i for i, text in enumerate(recording.names) if is_pageable(text)]
        work = recording.work
        slow_links = work.link[(work.kind == COPY) & np.isin(work.name, pageable)]
        blocking = [i for i, text in enumerate(recording.names) if BLOCKING_CALL.match(text)]
        calls = recording.calls
        self.pageable = np.isin(calls.link, slow_links) & (calls.link >= 0)
        self._blocked = calls.pick(np.isin(calls.name, blocking) | self.pageable)
        self._cache: dict[tuple[str, int], tuple[Spans, Nested]] = {}
        order = np.argsort(calls.link, kind="stable")
        self._links, self._rows = calls.link[order], order

    def launch_of(self, link: int) -> int:
        """The row of the call that launched a piece of work; -1 if the profile does not have it."""
        at = int(self._links.searchsorted(link))
        return int(self._rows[at]) if link >= 0 and at < len(self._links) and self._links[at] == link else -1

    def _of(self, what: str, spans: Spans, lane: int) -> tuple[Spans, Nested]:
        if (what, lane) not in self._cache:
            mine = spans.pick(spans.lane == lane)
            self._cache[what, lane] = (mine, mine.nested())
        return self._cache[what, lane]

    def opener(self, lane: int, time: float) -> str:
        """The blocking call in which the thread was; empty for none."""
        spans, nested = self._of("blocked", self._blocked, lane)
        row = nested.at(time)
        return self.call_text(lane, spans, row) if row >= 0 else ""

    def call_text(self, lane: int, spans: Spans, row: int) -> str:
        """``cudaStreamSynchronize at engine.py(12): step``."""
        name = self._recording.names[int(spans.name[row])]
        line = self.python_line(lane, float(spans.start[row]))
        return f"{name} at {line}" if line else name

    def python_line(self, lane: int, time: float) -> str:
        """The innermost Python function outside of the libraries; of the libraries if there is no other."""
        frames, nested = self._of("frames", self._recording.frames, lane)
        row = innermost = nested.at(time)
        while row >= 0 and _of_a_library(self._recording.names[int(frames.name[row])]):
            row = int(nested.parent[row])
        row = row if row >= 0 else innermost
        return self._recording.names[int(frames.name[row])] if row >= 0 else ""

    def pieces(self, lane: int, start: float, end: float) -> list[Piece]:
        """What the thread did in ``[start, end)``."""
        spans, nested = self._of("blocked", self._blocked, lane)
        out: list[Piece] = []
        for a, b, row in nested.pieces(start, end):
            if row >= 0:
                out.append(Piece(a, b, SYNC, self.call_text(lane, spans, row)))
            else:
                out.extend(self._working(lane, a, b))
        return out

    def _working(self, lane: int, start: float, end: float) -> list[Piece]:
        names = self._recording.names
        ranges, nested = self._of("ranges", self._recording.annotations, lane)
        frames, stacks = self._of("frames", self._recording.frames, lane)
        out = []
        for a, b, row in nested.pieces(start, end):
            phase = names[int(ranges.name[row])].removeprefix(PREFIX) if row >= 0 else ""
            if phase == IDLE:
                out.append(Piece(a, b, NO_WORK, ""))
                continue
            for c, d, frame in stacks.pieces(a, b):
                text = names[int(frames.name[frame])] if frame >= 0 else ""
                if _waits(text):
                    out.append(Piece(c, d, NO_WORK, text))
                else:
                    out.append(Piece(c, d, HOST, phase or (self.python_line(lane, c) if text else "")))
        return out


def attribute(recording: Recording, window: tuple[float, float], threshold: float) -> Attribution:
    """Split the window's time without a kernel by cause. ``threshold`` in us."""
    start, end = window
    work = recording.work
    inside = work.pick((work.end > start) & (work.start < end))
    kernels = inside.pick(inside.kind == KERNEL).intervals.union().cut(start, end)
    busy = inside.intervals.union().cut(start, end)
    by_cause = dict.fromkeys(CAUSES, 0.0)
    by_detail: dict[tuple[str, str], float] = {}
    by_opener: dict[str, float] = {}
    by_cause[COPYING] = busy.total - kernels.total
    copies = inside.pick(inside.kind != KERNEL)
    for name in sorted(set(copies.name.tolist())):  # sync-ok: NumPy, of a trace
        mine = copies.pick(copies.name == name).intervals.union().cut(start, end)
        by_detail[COPYING, recording.names[name]] = mine.minus(kernels).total
    gaps: list[Gap] = []
    host = Host(recording)
    idle = busy.gaps(start, end)
    before, after = _neighbours(work, idle)
    both = (before >= 0) & (after >= 0)
    same_graph = both & (work.link[before] == work.link[after]) & (work.link[after] >= 0)
    short = same_graph | (idle.end - idle.start < threshold)
    by_cause[NODES] = float(np.sum((idle.end - idle.start)[short]))
    for row in np.flatnonzero(~short).tolist():  # sync-ok: NumPy, of a trace
        a, b = float(idle.start[row]), float(idle.end[row])
        gap = _explain(recording, host, work, a, b, int(after[row]))
        gaps.append(gap)
        if gap.opened_by:
            by_opener[gap.opened_by] = by_opener.get(gap.opened_by, 0.0) + b - a
        for piece in gap.pieces:
            by_cause[piece.cause] += piece.end - piece.start
            key = (piece.cause, piece.detail)
            by_detail[key] = by_detail.get(key, 0.0) + piece.end - piece.start
    return Attribution(by_cause, by_detail, by_opener, gaps)


def _neighbours(work: Spans, gaps: Intervals) -> tuple[I64, I64]:
    """For each gap, the rows of the work that ended as it began, and that began as it ended; -1 for none."""
    by_end = np.argsort(work.end, kind="stable")
    i = np.searchsorted(work.end[by_end], gaps.start, side="right") - 1
    j = np.searchsorted(work.start, gaps.end, side="left")
    before = np.where(i >= 0, by_end[np.maximum(i, 0)], -1)
    return before, np.where(j < len(work), j, -1)


def _explain(recording: Recording, host: Host, work: Spans, a: float, b: float, after: int) -> Gap:
    if after < 0:
        return Gap(a, b, "", "", (Piece(a, b, UNKNOWN, "the profile ends"),))
    name = recording.names[int(work.name[after])]
    row = host.launch_of(int(work.link[after]))
    if row < 0:
        return Gap(a, b, name, "", (Piece(a, b, UNKNOWN, "no call of the next work in the profile"),))
    lane = int(recording.calls.lane[row])
    call = recording.names[int(recording.calls.name[row])]
    launched = min(max(float(recording.calls.start[row]), a), b)
    pieces = host.pieces(lane, a, launched) if launched > a else []
    if b > launched:
        pieces.append(Piece(launched, b, LATENCY, call))
    opened_by = host.opener(lane, a) if launched > a else ""
    return Gap(a, b, name, opened_by, tuple(_merged(pieces)))


def _merged(pieces: list[Piece]) -> Iterator[Piece]:
    """Neighbours of one cause and detail as one."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None and last[2:] == piece[2:]:
            last = last._replace(end=piece.end)
        else:
            if last is not None:
                yield last
            last = piece
    if last is not None:
        yield last
