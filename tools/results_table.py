"""Writes docs/figures.md's tables and the README's eight rows from ``benchmarks/results/*.json``.

    python tools/results_table.py            # rewrites the parts between the markers
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


BRIEF = ("long", "mid", "one", "wide", "small1", "small32", "small256", "nano")
"""The README's rows, at depth 2."""
SIDE = "h200-vllm-0.26.json"
"""A comparison with vLLM in one hour on one GPU, timed from outside."""


def brief(rows: list[Row], side: dict[str, Any]) -> str:
    """Eight rows of one machine, beside what another engine needs."""
    pairs = {row["workload"]: (f"{row['gapless']:.2f}", f"{row['vllm']:.2f}") for row in side["tuned"]}
    pairs["nano"] = tuple(f"{side['nano_tokens_per_s'][name]:,} tok/s" for name in ("gapless", "vllm"))
    body = []
    for name in BRIEF:
        row = next(r for r in rows if r["workload"] == name and r["engine"] == "gapless" and r["depth"] == 2)
        busy = _number(row.get("step_busy"), 2, 100)
        tokens = f"{row['tokens_per_s']:,.0f}"
        body.append([row["shape"], name, tokens, step_ms(row), of_floor(row), busy, *pairs[name]])
    return grid(("model", "workload", "tokens/s", "ms/step", "% of floor", "step-busy %", "gapless", "vLLM 0.26"), body)


SINCE = {"Gemma-3-4B, text": "gemma3-4b", "Qwen3-30B-A3B, 24 of 48 layers": "qwen3-30b-a3b-24"}
"""Shapes of the comparison that a later build runs otherwise, and what they are called there."""


def others(side: dict[str, Any], rows: list[Row]) -> str:
    """Shapes that nothing was tuned for, with 1, 32 and 256 requests; and what a later build takes for them."""
    later = {(r["shape"], r["workload"]): r for r in rows if r["engine"] == "gapless" and r["depth"] == 2}
    body = []
    for row in side["others"]:
        times = [" / ".join(f"{value:.2f}" for value in row[name]) for name in ("gapless", "vllm")]
        prefill = [f"{row['prefill_s'][name]:.2f}" for name in ("gapless", "vllm")]
        found = [later.get((SINCE.get(row["shape"], ""), load)) for load in ("alone", "team", "crowd")]
        since = ["", ""]
        if all(found):
            since = [" / ".join(f"{r['decode_ms_per_step']:.2f}" for r in found if r)]
            since.append(f"{found[-1]['prefill_s']:.2f}")  # type: ignore[index]
        body.append([row["shape"], *times, since[0], *prefill, since[1]])
    head = ("shape", "gapless, ms", "vLLM, ms", "gapless since, ms", "prompts, s", "vLLM, s", "since, s")
    return grid(head, body)


def _versions(e: dict[str, str]) -> str:
    driver = f"driver {e['driver']}, " if e.get("driver", "none") not in ("none", "unknown") else ""
    return f"{driver}torch {e.get('torch', '?')}, transformers {e.get('transformers', '?')}"


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"


def updated(document: str, name: str, table: str) -> str:
    """The document with the table between the markers of that name.

    Raises:
        ValueError: a marker is missing.
    """
    begin, end = f"<!-- {name}: made by tools/results_table.py -->", f"<!-- end of {name} -->"
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"the document needs one line {begin!r} and one {end!r}")
    head, _, rest = document.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{table}\n\n{end}{tail}"


def documents() -> dict[Path, str]:
    """Both documents as they should be."""
    results = ROOT / "benchmarks" / "results"
    machines, side = newest(results), json.loads((results / SIDE).read_text(encoding="utf-8"))
    readme, figures = ROOT / "README.md", ROOT / "docs" / "figures.md"
    text = updated(figures.read_text(encoding="utf-8"), "figures", render(machines))
    return {
        readme: updated(readme.read_text(encoding="utf-8"), "figures", brief(next(iter(machines.values())), side)),
        figures: updated(text, "other shapes", others(side, [r for rows in machines.values() for r in rows])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    check = parser.parse_args().check
    old = [path for path, text in documents().items() if path.read_text(encoding="utf-8") != text]
    if check:
        for path in old:
            print(f"{path.name} is not up to date: run python tools/results_table.py", file=sys.stderr)
        return int(bool(old))
    for path in old:
        path.write_text(documents()[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
