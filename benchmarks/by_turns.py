"""Two builds by turns on one machine: ``gapless bench`` from each source tree, and the ratio of their figures.

    python benchmarks/by_turns.py OLD/src NEW/src --turns 2 --save out.json -- long mid one --depth 2 --shape llama-8b

Whole processes in the order old, new, new, old, ..., so that a drift of the machine falls on both alike. What stands
after ``--`` goes to ``gapless bench``. Of each figure the best of the turns is compared, and all of them are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from gapless.bench.table import grid

FIGURES = {"decode_ms_per_step": min, "tokens_per_s": max, "prefill_s": min, "host_ms_per_step": min, "step_busy": max}
"""Figures of a row, and which of several is the best."""


def bench(source: Path, arguments: list[str]) -> tuple[list[dict[str, Any]], dict[str, str], float]:
    """The rows and the environment of one run from the package in ``source``, and its seconds in all."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "gapless", "bench", *arguments, "--save", str(out)]
        start = time.perf_counter()
        path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
        seconds = time.perf_counter() - start
        saved = json.loads(out.read_text())
    return saved["figures"], saved["environment"], seconds


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--save", type=Path)
    parser.add_argument("bench", nargs="+", help="arguments of gapless bench, after --")
    arguments = parser.parse_args()
    values: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: {"old": [], "new": []})
    seconds: dict[str, list[float]] = {"old": [], "new": []}
    environment: dict[str, str] = {}
    for turn in range(arguments.turns):
        for which in ("old", "new") if turn % 2 == 0 else ("new", "old"):
            print(f"--- turn {turn}: {which}", flush=True)
            rows, environment, took = bench(getattr(arguments, which).resolve(), arguments.bench)
            seconds[which].append(took)
            for row in rows:
                for figure in FIGURES:
                    if row.get(figure) is not None:
                        values[f"{row['shape']} {row['workload']}", figure][which].append(row[figure])
    body = []
    for (load, figure), found in values.items():
        old, new = (FIGURES[figure](found[which]) for which in ("old", "new"))
        body.append([load, figure, f"{old:.4f}", f"{new:.4f}", f"{new / old:.4f}"])
    print(grid(["workload", "figure", "old", "new", "new / old"], body))
    print("seconds of a process:", {which: [round(s, 1) for s in found] for which, found in seconds.items()})
    if arguments.save:
        figures = [{"workload": load, "figure": figure, **found} for (load, figure), found in values.items()]
        text = json.dumps({"environment": environment, "seconds": seconds, "figures": figures}, indent=1)
        arguments.save.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
