"""Writing Chrome traces that read well: named lanes, arrows from each launch to its first kernel, counters.

Open them in https://ui.perfetto.dev or ``chrome://tracing``.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gapless.trace.recording import CALLS, KINDS

Event = dict[str, Any]


def finish(events: Iterable[Event], path: Path) -> None:
    """Write events, one a line, with names for the streams' lanes and the arrows; gzip if the name ends in ``.gz``."""
    lanes: dict[tuple[Any, Any], Counter[str]] = defaultdict(Counter)
    calls: dict[int, Event] = {}
    first: dict[int, Event] = {}
    arrows = False
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for event in events:
            category = event.get("cat")
            arrows = arrows or category == "ac2g"
            if event.get("ph") == "X":
                link = event.get("args", {}).get("correlation")
                if category in KINDS:
                    lanes[event.get("pid"), event.get("tid")][_purpose(event)] += 1
                    if link is not None and (link not in first or event["ts"] < first[link]["ts"]):
                        first[link] = {k: event[k] for k in ("pid", "tid", "ts")}
                elif category in CALLS and link is not None:
                    calls[link] = {k: event[k] for k in ("pid", "tid", "ts")}
            file.write(json.dumps(event) + ",\n")
        for lane, purposes in lanes.items():
            name = f"{stream_name(purposes)} (stream {lane[1]})"
            meta = {"ph": "M", "name": "thread_name", "pid": lane[0], "tid": lane[1], "args": {"name": name}}
            file.write(json.dumps(meta) + ",\n")
        if not arrows:  # torch.profiler draws them itself
            for link, call in calls.items():
                if link in first:
                    common = {"cat": "ac2g", "name": "ac2g", "id": link}
                    file.write(json.dumps({"ph": "s", **common, **call}) + ",\n")
                    file.write(json.dumps({"ph": "f", "bp": "e", **common, **first[link]}) + ",\n")
        file.write(json.dumps({"ph": "M", "name": "written_by", "args": {"name": "gapless"}}) + "\n]}\n")


def _purpose(event: Event) -> str:
    return "compute" if event["cat"] == "kernel" else purpose_of_copy(str(event["name"]))


def purpose_of_copy(name: str) -> str:
    """``h2d``, ``d2h`` or ``copies``."""
    return "h2d" if "HtoD" in name or "h2d" in name else "d2h" if "DtoH" in name or "d2h" in name else "copies"


def stream_name(purposes: Counter[str]) -> str:
    """``compute`` for a stream with kernels, else what it copies."""
    return "compute" if purposes["compute"] else purposes.most_common(1)[0][0]
