"""From a watched window to a Chrome trace file: on a GPU by ``torch.profiler``, on the CPU device by our own clock.

The profiler runs on the loop's thread. Its clock is tied to ours (`gapless.trace.clock`), so that the engine's phases
go into its file as annotations ``gapless:<phase>``. With the profiler off none of this costs anything.

On the CPU device each piece of work of a stream is an event as a kernel or a copy would be, and the loop's wait is
the call that blocks.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from gapless.device.base import Access, Stream
from gapless.engine.client import EngineClient
from gapless.runner.runner import Runner
from gapless.trace.causes import PREFIX, SYNC_CALL
from gapless.trace.chrome import read_events
from gapless.trace.clock import Clock, Span, by_marks, by_waits
from gapless.trace.export import finish
from gapless.trace.observe import Seen
from gapless.trace.recording import CALLS

MARK = "gapless:mark"
MARKS = 8  # at each edge of a window
Event = dict[str, Any]
LOOP_NAME = "loop thread"
KV_BLOCKS = "KV blocks"


class GpuRecorder:
    """``torch.profiler`` around a window; `begin` and `end` run on the loop's thread.

    Args:
        stacks: record Python functions, which costs time.
    """

    def __init__(self, stacks: bool) -> None:
        import torch.profiler as profiler

        self._range = profiler.record_function
        kinds = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
        self._profile: Any = profiler.profile(activities=kinds, with_stack=stacks)
        self._warm = profiler.profile(activities=kinds)
        self._marks: list[list[Span]] = []

    def prepare(self) -> None:
        """A profile of nothing: starting the first takes the driver seconds, and so does the first range in it, ms."""
        self._warm.start()
        self._mark()
        self._warm.stop()
        self._marks.clear()

    def begin(self) -> None:
        self._profile.start()
        self._mark()

    def end(self) -> None:
        self._mark()
        self._profile.stop()

    def _mark(self) -> None:
        edge = []
        for _ in range(MARKS):
            before = time.perf_counter()
            with self._range(MARK):
                pass
            edge.append((before, time.perf_counter()))
        self._marks.append(edge)

    def write(self, path: Path, seen: Seen) -> None:
        """The trace, with the engine's phases and counters."""
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder) / "raw.json"
            self._profile.export_chrome_trace(str(raw))
            clock, thread = tie(read_events(raw), self._marks, seen)
            finish(itertools.chain(read_events(raw), phase_events(seen, thread, clock)), path)


def tie(events: Iterable[Event], marks: list[list[Span]], seen: Seen) -> tuple[Clock, tuple[Any, Any]]:
    """The clock of a profile, and pid and tid of the loop's thread in it.

    Args:
        events: as the profiler wrote them.
        marks: of ours at each edge, see `gapless.trace.clock.by_marks`.

    Raises:
        TraceError: the marks are not in the profile.
    """
    theirs: list[Span] = []
    waits: dict[tuple[Any, Any], list[Span]] = {}
    replays: tuple[Any, Any] | None = None
    marked: tuple[Any, Any] = (0, 0)
    for event in events:
        if event.get("ph") != "X":
            continue
        name, lane = str(event.get("name")), (event.get("pid"), event.get("tid"))
        if name == MARK and event.get("cat") == "user_annotation":
            theirs.append(_span(event))
            marked = lane
        elif event.get("cat") in CALLS:
            if SYNC_CALL.match(name):
                waits.setdefault(lane, []).append(_span(event))
            elif replays is None and "GraphLaunch" in name:
                replays = lane
    # The thread under the name that the runtime's calls have: the loop's is the only one that replays graphs.
    thread = replays or marked
    clock = by_marks(marks, sorted(theirs))
    ours = [(start, end) for phase, start, end in seen.phases if phase == "wait"]
    return by_waits(clock, ours, sorted(waits.get(thread, []))), thread


def _span(event: Event) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))


def phase_events(seen: Seen, thread: tuple[Any, Any], clock: Callable[[float], float]) -> Iterator[Event]:
    """The phases and counters of a window as events."""
    lane = {"pid": thread[0], "tid": thread[1]}
    yield {"ph": "M", "name": "thread_name", **lane, "args": {"name": LOOP_NAME}}
    if isinstance(clock, Clock):
        tied = {"waits": len(clock.at), "largest_correction_us": clock.largest_correction, "us_per_s": clock.rate}
        yield {"ph": "M", "name": "gapless_clock", **lane, "args": tied}
    for phase, start, end in seen.phases:
        at = clock(start)
        yield {"ph": "X", "cat": "user_annotation", "name": PREFIX + phase, **lane, "ts": at, "dur": clock(end) - at}
    for t, running, waiting, blocks in seen.counters:
        values = {"requests": {"running": running, "waiting": waiting}, KV_BLOCKS: {"used": blocks}}
        for name, args in values.items():
            yield {"ph": "C", "name": name, **lane, "ts": clock(t), "args": args}


class CpuRecorder:
    """Times every piece of work of the CPU device's streams, and the loop's calls that put it there."""

    def __init__(self, client: EngineClient) -> None:
        self._device: Any = cast(Runner, client._built.runner).device
        self._events: list[Event] = []
        self._links = itertools.count(1)

    def prepare(self) -> None:
        """Nothing to warm up."""

    def begin(self) -> None:
        device = self._device
        put = type(device)._put

        def timed_put(stream: Stream, work: Callable[[], None], access: Access, name: str) -> None:
            link = next(self._links)
            copy = stream.name != "compute"
            start = time.perf_counter()

            def timed() -> None:
                begin = time.perf_counter()
                work()
                self._work(stream.name, name, begin, time.perf_counter(), link, access if copy else None)

            put(device, stream, timed, access, name)
            self._call("copy" if copy else "launch", start, time.perf_counter(), link)

        vars(device)["_put"] = timed_put

    def end(self) -> None:
        vars(self._device).pop("_put", None)

    def _work(self, stream: str, name: str, start: float, end: float, link: int, copied: Access | None) -> None:
        args: dict[str, Any] = {"device": 0, "stream": stream, "lane": stream, "correlation": link}
        if copied is not None:
            args["bytes"] = sum(t.nbytes for t in copied.writes)
        category = "kernel" if copied is None else "gpu_memcpy"
        event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": 1e6 * start}
        self._events.append({**event, "dur": 1e6 * (end - start), "args": args})

    def _call(self, name: str, start: float, end: float, link: int) -> None:
        event = {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 1, "tid": 1, "ts": 1e6 * start}
        self._events.append({**event, "dur": 1e6 * (end - start), "args": {"correlation": link}})

    def write(self, path: Path, seen: Seen) -> None:
        """The trace, with the engine's phases and counters."""
        for phase, start, end in seen.phases:
            if phase == "wait":
                self._call("synchronize", start, end, next(self._links))
        events: Iterable[Event] = itertools.chain(self._events, phase_events(seen, (1, 1), lambda t: 1e6 * t))
        finish(events, path)
