"""A profile in columns: what ran on the device, what the host called, and what it says it was doing.

A `Spans` table costs 40 bytes a row, so that a file of a gigabyte (four million events) takes less than 300 MB.
Times are microseconds on the profiler's clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.trace.chrome import TraceError, read_events
from gapless.trace.intervals import F64, I64, Intervals, Nested

I32 = npt.NDArray[np.int32]
Rows = npt.NDArray[np.bool_] | I64

KERNEL, COPY, MEMSET = 0, 1, 2
KINDS = {"kernel": KERNEL, "gpu_memcpy": COPY, "gpu_memset": MEMSET}
CALLS = {"cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver"}
ANNOTATIONS = {"user_annotation"}


class Names:
    """Strings by number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[Any, int] = {}

    def number(self, key: Any, text: str | None = None) -> int:
        """Of a string, or of any key that has one."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.texts)
            self.texts.append(key if text is None else text)
        return number


@dataclass(frozen=True, slots=True)
class Spans:
    """Rows sorted by start; of equal starts, the longer first.

    Attributes:
        start, end: us.
        name, lane: numbers in `Recording.names` and `Recording.lanes`.
        kind: `KERNEL`, `COPY` or `MEMSET` on the device; 0 elsewhere.
        link: what connects a host call with the work that it started; -1 for none.
        size: bytes of a copy.
    """

    start: F64
    end: F64
    name: I32
    lane: I32
    kind: I32
    link: I64
    size: I64

    def __len__(self) -> int:
        return len(self.start)

    def pick(self, rows: Rows) -> Spans:
        """Some rows, by mask or by number."""
        return Spans(*(getattr(self, f)[rows] for f in self.__slots__))

    @property
    def intervals(self) -> Intervals:
        """When they ran; not a union."""
        return Intervals(self.start, self.end)

    def nested(self) -> Nested:
        """For spans of one host thread."""
        return Nested(self.start, self.end)


class _Builder:
    def __init__(self) -> None:
        self.columns: list[array[Any]] = [array(code) for code in "ddiiiqq"]

    def add(self, *values: float) -> None:
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)

    def spans(self) -> Spans:
        types: list[type[np.generic]] = [np.float64, np.float64, *[np.int32] * 3, np.int64, np.int64]
        arrays = [np.frombuffer(c, t) if len(c) else np.zeros(0, t) for c, t in zip(self.columns, types, strict=True)]
        order = np.lexsort((-arrays[1], arrays[0]))
        return Spans(*(a[order] for a in arrays))


@dataclass(slots=True)
class Recording:
    """A loaded trace.

    Attributes:
        work: kernels, copies and memsets of one device; a lane is a stream.
        calls: of the CUDA runtime and driver; a lane is a thread.
        annotations: ``record_function`` ranges of the host.
        frames: Python functions, when the profile was taken with stacks.
        counters: name, time, values.
        device: whose work this is.
        devices: all of the trace.
    """

    names: list[str]
    lanes: list[str]
    work: Spans
    calls: Spans
    annotations: Spans
    frames: Spans
    counters: list[tuple[str, float, dict[str, float]]] = field(default_factory=list)
    device: int = 0
    devices: tuple[int, ...] = ()


def load(path: Path, device: int | None = None) -> Recording:
    """Read a trace file; of several devices, the one that is busy longest, or the given one."""
    return collect(read_events(path), device)


def collect(events: Iterable[dict[str, Any]], device: int | None = None) -> Recording:
    """Sort events into tables. What is of no use here is dropped at once.

    Raises:
        TraceError: an event lacks what its kind always has, or there is no such device.
    """
    names, lanes = Names(), Names()
    work, calls, annotations, frames = _Builder(), _Builder(), _Builder(), _Builder()
    lane_device: dict[int, int] = {}
    thread_names: dict[tuple[Any, Any], str] = {}
    host_lanes: dict[tuple[Any, Any], int] = {}
    counters: list[tuple[str, float, dict[str, float]]] = []
    for event in events:
        phase, category = event.get("ph"), event.get("cat")
        try:
            if phase == "X":
                if category in KINDS:
                    args = event.get("args", {})
                    at = int(args.get("device", 0))
                    stream = args.get("stream", event.get("tid"))
                    lane = lanes.number((at, stream), str(args.get("lane", f"stream {stream}")))
                    lane_device[lane] = at
                    into, kind, link, size = work, KINDS[category], args.get("correlation", -1), args.get("bytes", 0)
                elif category in CALLS or category in ANNOTATIONS or category == "python_function":
                    thread = (event.get("pid"), event.get("tid"))
                    lane = host_lanes.get(thread, -1)
                    if lane < 0:
                        lane = host_lanes[thread] = lanes.number(("host", *thread), f"thread {thread[1]}")
                    into = frames if category == "python_function" else annotations
                    kind, link, size = 0, -1, 0
                    if category in CALLS:
                        into, link = calls, event.get("args", {}).get("correlation", -1)
                else:
                    continue
                start = float(event["ts"])
                end = start + float(event.get("dur", 0.0))
                into.add(start, end, names.number(str(event["name"])), lane, kind, int(link), int(size))
            elif phase == "C":
                counters.append((str(event["name"]), float(event["ts"]), dict(event.get("args", {}))))
            elif phase == "M" and event.get("name") == "thread_name":
                thread_names[event.get("pid"), event.get("tid")] = str(event["args"]["name"])
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"an event that is none: {str(event)[:200]} ({error!r})") from error
    for key, lane in host_lanes.items():
        lanes.texts[lane] = thread_names.get(key, lanes.texts[lane])
    every = work.spans()
    device_of = np.array([lane_device.get(i, 0) for i in range(len(lanes.texts))] or [0])[every.lane]
    devices = tuple(sorted(set(lane_device.values())))
    if device is None:
        device = max(devices, key=lambda d: every.pick(device_of == d).intervals.total, default=0)
    elif device not in devices:
        raise TraceError(f"the trace has no work of device {device}; it has {', '.join(map(str, devices)) or 'none'}")
    return Recording(
        names=names.texts,
        lanes=lanes.texts,
        work=every.pick(device_of == device),
        calls=calls.spans(),
        annotations=annotations.spans(),
        frames=frames.spans(),
        counters=counters,
        device=device,
        devices=devices,
    )
