"""The table that every benchmark prints, and its result file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def _number(row: Row, key: str, digits: int, scale: float = 1.0) -> str:
    value = row.get(key)
    return "-" if value is None else f"{scale * value:.{digits}f}"


def step_ms(row: Row) -> str:
    """Decode time per step; ``~`` marks a mean over the whole run, prefill included."""
    if row.get("decode_ms_per_step") is not None:
        return _number(row, "decode_ms_per_step", 3)
    return "-" if row.get("mean_ms_per_step") is None else "~" + _number(row, "mean_ms_per_step", 3)


def of_floor(row: Row) -> str:
    """The memory floor's share of the decode time, in percent."""
    floor, decode = row.get("floor_ms"), row.get("decode_ms_per_step")
    return "-" if not floor or not decode else f"{100 * floor / decode:.1f}"


COLUMNS: list[tuple[str, Callable[[Row], str]]] = [
    ("engine", lambda r: str(r.get("engine", "gapless"))),
    ("model", lambda r: str(r["shape"])),
    ("workload", lambda r: str(r["workload"])),
    ("depth", lambda r: str(r["depth"]) if r.get("engine", "gapless") == "gapless" else "-"),
    ("tokens/s", lambda r: _number(r, "tokens_per_s", 0)),
    ("ms/step", step_ms),
    ("% of floor", of_floor),
    ("step-busy %", lambda r: _number(r, "step_busy", 2, 100)),
    ("host ms/step", lambda r: _number(r, "host_ms_per_step", 3)),
    ("hidden ms/step", lambda r: _number(r, "host_hidden_ms_per_step", 3)),
    ("prefill s", lambda r: _number(r, "prefill_s", 3)),
    ("wall s", lambda r: _number(r, "wall_s", 2)),
]
LATENCY = [
    ("TTFT ms p50/p99", lambda r: _pair(r.get("ttft_ms"), 0)),
    ("TPOT ms p50/p99", lambda r: _pair(r.get("tpot_ms"), 2)),
]


def _pair(values: Any, digits: int) -> str:
    return "-" if values is None else "/".join(f"{v:.{digits}f}" for v in values)


def headline(environment: dict[str, str]) -> str:
    """What the figures depend on, in one line."""
    e = environment
    gpu = f"{e['gpu']} (driver {e['driver']}, CUDA {e['cuda']})" if e["gpu"] != "none" else f"no GPU, {e['cpu']}"
    versions = f"torch {e['torch']}, transformers {e['transformers']}"
    return f"gapless {e['gapless']}, commit {e['commit']}, {e['date']}, {gpu}, {versions}"


def table(rows: Sequence[Row]) -> str:
    """Aligned columns, readable as Markdown too."""
    columns = COLUMNS + (LATENCY if any(r.get("rate") for r in rows) else [])
    return grid([name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows])


def grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned: text to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    right = [all(line[i][:1] in "-~0123456789" for line in body) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        parts = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
        return "| " + " | ".join(parts) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)) + "|"
    return "\n".join([line(head), rule, *map(line, body)])


def progress(row: Row) -> str:
    """One line for a run that has just ended."""
    name = row["workload"] if row.get("engine", "gapless") == "gapless" else f"{row['workload']} {row['engine']}"
    parts = [f"{name:9s} depth {row['depth']}  {row['tokens_per_s']:9.1f} tok/s  {step_ms(row)} ms/step"]
    if of_floor(row) != "-":
        parts.append(f"({of_floor(row)} % of floor)")
    if row.get("step_busy") is not None:
        parts.append(f"step-busy {100 * row['step_busy']:.2f} %")
    phases = row.get("host_ms_by_phase") or {}
    return "  ".join([*parts, *(f"{k}={v:.3f}" for k, v in phases.items())])


def save(path: str | Path, environment: dict[str, str], rows: Sequence[Row]) -> None:
    """A result file: ``environment`` and ``figures``."""
    text = json.dumps({"environment": environment, "figures": list(rows)}, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")
