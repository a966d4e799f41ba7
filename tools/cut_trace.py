"""Cuts a few steps out of a trace of torch.profiler, small enough to be kept, with nothing of the machine in it.

    python tools/cut_trace.py trace.json.gz tests/data/sync.json.gz --steps 3

Kept is what the analysis reads: work, calls of the runtime, annotations, Python functions, counters, and names of
threads. Times begin at zero, processes and threads get small numbers, and absolute paths are shortened to what lies
below ``site-packages``, or to the file's name. If the result is too large, short Python functions go first.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gapless.trace.chrome import TraceError, read_events
from gapless.trace.recording import ANNOTATIONS, CALLS, KINDS, load
from gapless.trace.steps import Steps, find_steps

Event = dict[str, Any]
KEPT_ARGUMENTS = ("correlation", "device", "stream", "bytes", "External id", "graph node id", "lane")
FRAMES = "python_function"
KEPT = {*KINDS, *CALLS, *ANNOTATIONS, FRAMES}
INSTALLED = re.compile(r"(?:/[^\s:()'\"]+)?/(?:site|dist)-packages/|/[^\s:()'\"]+/lib/python3\.\d+/")
ABSOLUTE = re.compile(r"(?<![\w.])/(?:[^\s/:()'\"]+/)+")
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


def clean(name: str) -> str:
    """A name without the paths of this machine and without addresses."""
    return ADDRESS.sub("0x0", ABSOLUTE.sub("", INSTALLED.sub("", name)))


def cut(events: Iterable[Event], steps: Steps, first: int, count: int) -> Iterator[Event]:
    """The events of ``count`` steps and the begin of the next, from step ``first`` on.

    Raises:
        TraceError: there are not that many steps.
    """
    if len(steps) < first + count + 1:
        raise TraceError(f"{len(steps)} steps in the trace: too few for {first} + {count} + 1")
    host, device = steps.host_begin, steps.begin
    low = min(float(host[first]), float(device[first]))
    high = max(float(host[first + count]), float(steps.end[first + count]))
    numbers: dict[Any, int] = {}

    def lane(event: Event) -> dict[str, int]:
        pid = numbers.setdefault(("pid", event.get("pid")), len(numbers) + 1)
        return {"pid": pid, "tid": numbers.setdefault((event.get("pid"), event.get("tid")), len(numbers) + 1)}

    for event in events:
        phase, category = event.get("ph"), event.get("cat")
        if phase == "M" and event.get("name") in ("thread_name", "gapless_clock"):
            yield {"ph": "M", "name": event["name"], **lane(event), "args": _anonymous(event.get("args", {}))}
        elif phase in ("X", "C"):
            start = float(event["ts"])
            end = start + float(event.get("dur", 0.0))
            if end < low or start >= high:
                continue
            kept = {"ph": phase, "name": clean(str(event["name"])), **lane(event), "ts": round(start - low, 3)}
            if phase == "C":
                yield {**kept, "args": event.get("args", {})}
                continue
            if category not in KEPT:
                continue
            arguments = {k: v for k, v in event.get("args", {}).items() if k in KEPT_ARGUMENTS}
            yield {**kept, "cat": category, "dur": round(end - start, 3), **({"args": arguments} if arguments else {})}


def _anonymous(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: re.sub(r"\d{3,}", "n", clean(v)) if isinstance(v, str) else v for k, v in arguments.items()}


def pack(events: Iterable[Event]) -> bytes:
    """A Chrome trace, gzip, the same for the same events."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return gzip.compress(('{"traceEvents": [\n' + lines + "\n]}\n").encode(), 9, mtime=0)


def cut_file(source: Path, target: Path, first: int, count: int, limit: int, annotation: str | None = None) -> int:
    """Write the part; its bytes.

    Raises:
        TraceError: it does not fit into ``limit`` bytes even without Python functions.
    """
    steps = find_steps(load(source), annotation)
    events, shortest = list(cut(read_events(source), steps, first, count)), 0.0
    while True:
        data = pack(e for e in events if e.get("cat") != FRAMES or e["dur"] >= shortest)
        if len(data) <= limit:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            return len(data)
        if shortest > 1e6:
            raise TraceError(f"{count} steps take {len(data)} bytes, more than {limit}: cut fewer")
        shortest = max(3 * shortest, 3.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--first", type=int, default=2, help="step (default: 2)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--annotation", help="as for gapless trace analyze")
    parser.add_argument("--limit", type=int, default=200_000, help="bytes (default: 200,000)")
    args = parser.parse_args()
    try:
        size = cut_file(args.source, args.target, args.first, args.steps, args.limit, args.annotation)
    except (TraceError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{args.target}: {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
