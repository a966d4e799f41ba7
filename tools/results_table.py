"""Writes the README's table of figures from ``benchmarks/results/*.json``.

    python tools/results_table.py            # rewrites the part between the markers
    python tools/results_table.py --check    # exit code 1 if it is not up to date

A result file is what ``gapless bench --save`` writes: ``environment`` and ``figures``. Of several rows for one model,
workload, engine, depth and GPU the newest counts: by the file's date, then by its name.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gapless.bench.table import grid, of_floor, step_ms
from gapless.bench.workloads import WORKLOADS

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- figures: made by tools/results_table.py -->", "<!-- end of figures -->"
HEAD = ("model", "workload", "engine", "depth", "tokens/s", "ms/step", "% of floor", "step-busy %", "host ms/step",
        "of")  # fmt: skip
Row = dict[str, Any]


def newest(folder: Path) -> dict[str, list[Row]]:
    """Rows by machine, in the order of models and workloads."""
    chosen: dict[tuple[Any, ...], Row] = {}
    files = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = data.get("figures", []) if isinstance(data, dict) else []
        if rows and all("workload" in row and "tokens_per_s" in row for row in rows):
            files.append((data["environment"], rows))
    for environment, rows in sorted(files, key=lambda item: str(item[0].get("date", ""))):
        for row in rows:
            engine = row.get("engine", "gapless")
            machine = _machine(environment)
            key = (machine, row["shape"], row["workload"], engine, row["depth"])
            chosen[key] = {**row, "engine": engine, "machine": machine, "environment": environment}
    order = list(WORKLOADS)

    def place(row: Row) -> tuple[Any, ...]:
        name, _, new_tokens = row["workload"].partition("/")  # as a shortened workload is called
        known = order.index(name) if name in order else len(order)
        return (row["shape"], known, name, int(new_tokens or 0), row["engine"], row["depth"])

    machines: dict[str, list[Row]] = {}
    for row in sorted(chosen.values(), key=place):
        machines.setdefault(row["machine"], []).append(row)
    return dict(sorted(machines.items(), key=lambda item: (item[0].startswith("no GPU"), item[0])))


def _machine(e: dict[str, str]) -> str:
    gpu = e.get("gpu", "none")
    return f"no GPU, {e.get('cpu', 'a CPU')}" if gpu == "none" else gpu


def render(machines: dict[str, list[Row]]) -> str:
    """A table for each machine."""
    parts = []
    for machine, rows in machines.items():
        versions = sorted({_versions(row["environment"]) for row in rows})
        body = [
            [
                row["shape"],
                row["workload"],
                row["engine"],
                str(row["depth"]) if row["engine"] == "gapless" else "-",
                f"{row['tokens_per_s']:.0f}",
                step_ms(row),
                of_floor(row),
                _number(row.get("step_busy"), 2, 100),
                _number(row.get("host_ms_per_step"), 3),
                f"{row['environment'].get('date', '?')} {row['environment'].get('commit', '')}".replace(" unknown", ""),
            ]
            for row in rows
        ]
        parts.append(f"{machine}; {'; '.join(versions)}.\n\n{grid(HEAD, body)}")
    return "\n\n".join(parts) or "No results yet."


def _versions(e: dict[str, str]) -> str:
    driver = f"driver {e['driver']}, " if e.get("driver", "none") not in ("none", "unknown") else ""
    return f"{driver}torch {e.get('torch', '?')}, transformers {e.get('transformers', '?')}"


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"


def updated(readme: str, table: str) -> str:
    """The README with the table between its markers.

    Raises:
        ValueError: a marker is missing.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"the README needs one line {BEGIN!r} and one {END!r}")
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table}\n\n{END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    check = parser.parse_args().check
    path = ROOT / "README.md"
    before = path.read_text(encoding="utf-8")
    after = updated(before, render(newest(ROOT / "benchmarks" / "results")))
    if check:
        if before != after:
            print("README.md is not up to date: run python tools/results_table.py", file=sys.stderr)
        return int(before != after)
    path.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
