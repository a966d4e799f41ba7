"""Every call of a program that made the host wait for the GPU: where, how often, how long.

    with watch() as waits:
        train_step()
    print(waits)

Three sources meet. ``torch.profiler`` times every blocking call of the CUDA runtime, and knows which copies were from
or to pageable memory. PyTorch's sync debug mode warns after each operation that waited, with its Python line. And a
few functions that wait, or may, note their own begin, end and line while they are watched: explicit waits raise no
warning, nor does a pageable copy with ``non_blocking=True``. A blocking call belongs to the noted function around it,
else to the next warning of its thread, else to no line.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gapless.errors import ConfigError
from gapless.trace.causes import SYNC_CALL, is_pageable
from gapless.trace.chrome import read_events
from gapless.trace.clock import Span, by_marks
from gapless.trace.recording import COPY, Recording, collect

MARK = "gapless:mark"
MARKS = 8  # at each edge
WARNED = "synchronizing operation"
"""What is known of an operation that only PyTorch's warning tells of."""
SOON_US = 500.0
"""A warning comes at the end of its operation; one that comes later belongs to another."""


class Note(NamedTuple):
    """A watched function, or a warning (then ``start`` is ``end``); seconds of ``perf_counter``."""

    thread: int
    start: float
    end: float
    what: str
    line: str


@dataclass(frozen=True, slots=True)
class Wait:
    """One line that waits.

    Attributes:
        line: ``file.py:12``; empty if it is not known.
        what: the function, or the runtime's call.
        calls: of the CUDA runtime, in which the host was blocked.
        count: how often the host was blocked.
        ms: in all.
        pageable: copies from or to memory that is not pinned.
    """

    line: str
    what: str
    calls: tuple[str, ...]
    count: int
    ms: float
    pageable: int


@dataclass(slots=True)
class Waits:
    """Filled when the watch ends; longest first."""

    rows: list[Wait] = field(default_factory=list)
    span_ms: float = 0.0

    @property
    def ms(self) -> float:
        """The host's time in blocking calls, all threads together."""
        return sum(row.ms for row in self.rows)

    def __str__(self) -> str:
        return render(self)


def render(waits: Waits) -> str:
    """As a table."""
    if not waits.rows:
        return f"the host did not wait for the GPU in {waits.span_ms:.1f} ms"
    lines = [f"the host waited for the GPU {waits.ms:.3f} ms of {waits.span_ms:.1f} ms"]
    lines.append(f"{'count':>7} {'ms':>11}  where")
    for row in waits.rows:
        where = f"{row.line or '(line not known)'}  {row.what} [{', '.join(row.calls)}]"
        if row.pageable:
            where += f", {row.pageable} pageable copies: pin the memory and copy with non_blocking=True"
        lines.append(f"{row.count:7d} {row.ms:11.3f}  {where}")
    return "\n".join(lines)


@contextmanager
def watch() -> Iterator[Waits]:
    """List what waits inside, on every thread. The program runs slower meanwhile.

    Raises:
        ConfigError: there is no GPU.
    """
    import torch
    import torch.profiler as profiler

    if not torch.cuda.is_available():
        raise ConfigError("there is no GPU here, so nothing can wait for one")
    kinds = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
    with profiler.profile(activities=kinds):
        torch.cuda.synchronize()  # sync-ok: the first profile of a process takes the driver seconds
    waits, marks = Waits(), list[list[Span]]()

    def mark() -> None:
        marks.append([])
        for _ in range(MARKS):
            begin = time.perf_counter()
            with profiler.record_function(MARK):
                pass
            marks[-1].append((begin, time.perf_counter()))

    recorder: Any = profiler.profile(activities=kinds)
    with ExitStack() as stack:
        recorder.start()
        try:
            mark()
            with noting() as notes:
                mode = torch.cuda.get_sync_debug_mode()
                torch.cuda.set_sync_debug_mode("warn")
                stack.callback(torch.cuda.set_sync_debug_mode, mode)
                yield waits
            stack.close()
            mark()
        finally:
            recorder.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(path))
        events = list(read_events(path))
    own = [e for e in events if e.get("name") == MARK and e.get("cat") == "user_annotation"]
    theirs = sorted((float(e["ts"]), float(e["ts"]) + float(e.get("dur", 0.0))) for e in own)
    clock = by_marks(marks, theirs)
    waits.span_ms = 1e3 * (marks[-1][0][0] - marks[0][-1][1])
    first, last = theirs[MARKS - 1][1], theirs[-MARKS][0]
    inside = [e for e in events if float(e.get("ts", first)) <= last]
    waits.rows = match(collect(inside), notes, thread_lanes(inside), clock)


def thread_lanes(events: list[dict[str, Any]]) -> dict[str, int]:
    """Thread numbers by what `collect` calls their lanes."""
    lanes: dict[str, int] = {}
    names = {(e.get("pid"), e.get("tid")): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    for event in events:
        if event.get("ph") == "X" and isinstance(event.get("tid"), int):
            key = (event.get("pid"), event["tid"])
            lanes[names.get(key, f"thread {event['tid']}")] = event["tid"]
    return lanes


def match(
    recording: Recording, notes: list[Note], threads: dict[str, int], clock: Callable[[float], float]
) -> list[Wait]:
    """Blocking calls by line.

    Args:
        clock: from seconds of ``perf_counter`` to microseconds of the recording.
    """
    notes = [note._replace(start=clock(note.start), end=clock(note.end)) for note in notes]
    names, calls, work = recording.names, recording.calls, recording.work
    pageable = [i for i, text in enumerate(names) if is_pageable(text)]
    slow = work.link[(work.kind == COPY) & np.isin(work.name, pageable)]
    blocking = np.isin(calls.name, [i for i, text in enumerate(names) if SYNC_CALL.match(text)])
    is_copy = np.isin(calls.link, slow) & (calls.link >= 0)
    by_thread: dict[int, list[Note]] = {}
    for note in sorted(notes, key=lambda n: n.start):
        by_thread.setdefault(note.thread, []).append(note)
    found: dict[tuple[str, str], list[tuple[str, float, bool]]] = {}
    functions: dict[str, list[str]] = {}  # of each line
    for row in np.flatnonzero(blocking | is_copy).tolist():  # sync-ok: NumPy
        start, end = float(calls.start[row]), float(calls.end[row])
        name = names[int(calls.name[row])]
        thread = threads.get(recording.lanes[int(calls.lane[row])], -1)
        owner = _owner(by_thread.get(thread, []), start, end)
        key = (owner.line, owner.what) if owner is not None else ("", name)
        if owner is not None and owner.what != WARNED and owner.what not in functions.setdefault(owner.line, []):
            functions[owner.line].append(owner.what)
        found.setdefault(key, []).append((name, (end - start) / 1e3, bool(is_copy[row])))
    # Where the clocks differ by more than the slack, a function's call seems to be the warning's, on the same line.
    for (line, what), many in list(found.items()):
        if what == WARNED and line in functions:
            found[line, functions[line][0]] += many
            del found[line, what]
    rows = []
    for (line, what), many in found.items():
        kinds = tuple(sorted({name for name, _, _ in many}))
        rows.append(Wait(line, what, kinds, len(many), sum(ms for _, ms, _ in many), sum(p for _, _, p in many)))
    return sorted(rows, key=lambda r: -r.ms)


def _owner(notes: list[Note], start: float, end: float) -> Note | None:
    """The innermost function around the call, else the first warning soon after it; all times in us."""
    slack = 10.0  # of the two clocks
    around = [n for n in notes if n.start < n.end and n.start - slack <= start and end <= n.end + slack]
    if around:
        return min(around, key=lambda n: n.end - n.start)
    after = [n for n in notes if n.start == n.end and end - slack <= n.start <= end + SOON_US]
    return min(after, key=lambda n: n.start, default=None)


# ---- notes ----------------------------------------------------------------------------------------------------------


def user_line() -> str:
    """``file.py:12`` of the innermost frame outside of torch, of ``warnings`` and of this module."""
    frame = sys._getframe(1)
    skipped = {__file__, warnings.__file__}
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if name not in skipped and f"{os.sep}torch{os.sep}" not in name:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def targets() -> list[tuple[Any, str, str]]:
    """Functions that wait, or may: owner, name, and what they are called."""
    import torch

    tensor = ("to", "cpu", "cuda", "copy_", "item", "tolist", "numpy", "nonzero", "type")
    return [
        *[(torch.Tensor, name, f"Tensor.{name}") for name in tensor],
        (torch, "tensor", "torch.tensor"),
        (torch, "as_tensor", "torch.as_tensor"),
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),  # sync-ok: the name of what is watched for
        (torch.cuda.Event, "synchronize", "Event.synchronize"),
        (torch.cuda.Stream, "synchronize", "Stream.synchronize"),
    ]


@contextmanager
def noting() -> Iterator[list[Note]]:
    """Watch the `targets` and PyTorch's warnings; all is put back at the end."""
    notes: list[Note] = []
    saved: list[tuple[Any, str, bool, Any]] = []
    try:
        for owner, name, what in targets():
            own = name in vars(owner)
            original = getattr(owner, name)
            saved.append((owner, name, own, original))
            setattr(owner, name, _noted(original, what, notes))
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message="called a synchronizing CUDA operation")
            show = warnings.showwarning

            def showwarning(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
                if "synchronizing CUDA operation" not in str(message):
                    show(message, category, filename, lineno, *rest, **more)
                    return
                now = time.perf_counter()
                notes.append(Note(threading.get_native_id(), now, now, WARNED, user_line()))

            warnings.showwarning = showwarning
            yield notes
    finally:
        for owner, name, own, original in reversed(saved):
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


def _noted(function: Callable[..., Any], what: str, notes: list[Note]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            notes.append(Note(threading.get_native_id(), start, time.perf_counter(), what, user_line()))

    return noted
