"""A few steps of two profiles as lanes, for the picture in the README: synchronous above asynchronous.

    gapless trace run small32 --shape qwen3-0.6b --depth 1 --window 8 --keep depth1.json.gz
    gapless trace run small32 --shape qwen3-0.6b --depth 2 --window 8 --keep depth2.json.gz
    python benchmarks/timelines.py depth1.json.gz depth2.json.gz --out benchmarks/results/h200-timelines.json
    python benchmarks/plots.py

A profiler slows launches, so that the host's spans are longer than they are without one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gapless.bench.environment import environment
from gapless.trace.analyze import analyze
from gapless.trace.picture import spans
from gapless.trace.recording import load
from gapless.trace.steps import find_steps
from gapless.trace.timeline import timeline

HOST = ("receive", "schedule", "launch", "commit", "publish")
CLOSER = 30  # tenths of a microsecond: kernels of a graph become one span


def lanes(path: Path, count: int) -> dict[str, Any]:
    """Milliseconds of the first ``count`` steps: what the host did, and when the device computed."""
    recording = load(path, None)
    steps = find_steps(recording, None, None, None)
    report, found = analyze(recording, steps, 5.0, None)
    data = timeline(recording, steps, report, found, path.name, count)
    low, high = data["window"]
    out: dict[str, list[list[float]]] = {}
    for lane in data["lanes"]:
        name = lane["name"].partition(":")[0]
        if name not in (*HOST, "wait", "compute", "h2d", "d2h"):
            continue
        merged: list[list[float]] = []
        for at, length, _ in spans(lane):
            if merged and at - merged[-1][1] < CLOSER:
                merged[-1][1] = max(merged[-1][1], at + length)
            elif low <= at < high:
                merged.append([at, at + length])
        out[name] = [[round((at - low) * data["unit"] / 1e3, 4) for at in span] for span in merged]
    return {"lanes": out, "ms": (high - low) * data["unit"] / 1e3, "step_busy": report.step_busy}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("synchronous", type=Path)
    parser.add_argument("asynchronous", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    runs = {1: lanes(arguments.synchronous, arguments.steps), 2: lanes(arguments.asynchronous, arguments.steps)}
    text = json.dumps({"environment": environment(), "title": arguments.title, "depths": runs})
    arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
