"""Figures of a load test: the block of text and the JSON keys that ``vllm bench serve`` made usual."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gapless.bench.serve_run import Record

TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
"""Name of a metric: its line of title, and its name in the lines below."""
WIDTH = 50


def milliseconds(records: Sequence[Record]) -> dict[str, list[float]]:
    """The values of each metric, of requests that succeeded."""
    return {
        "ttft": [1e3 * r.ttft for r in records],
        "tpot": [1e3 * r.tpot for r in records if r.tpot is not None],
        "itl": [1e3 * gap for r in records for gap in r.itls],
        "e2el": [1e3 * r.latency for r in records],
    }


def goodput(records: Sequence[Record], limits: Mapping[str, float]) -> int:
    """How many requests kept all limits, in milliseconds by metric."""

    def kept(record: Record) -> bool:
        values = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
        return all(1e3 * values[name] <= limit for name, limit in limits.items())

    return sum(map(kept, records))


def peaks(records: Sequence[Record]) -> tuple[float, int]:
    """Most tokens that came within one second of the run, and most requests that were open at once."""
    if not records:
        return 0.0, 0
    begin = min(r.start for r in records)
    tokens = np.zeros(int(max(r.start + r.latency for r in records) - begin) + 1)
    for r in records:
        times = r.start - begin + r.ttft + np.concatenate(([0.0], np.cumsum(r.itls)))
        # A chunk may hold several tokens: they are shared out evenly.
        np.add.at(tokens, np.minimum(times.astype(int), len(tokens) - 1), r.output_len / len(times))
    changes = sorted([(r.start, 1) for r in records] + [(r.start + r.latency, -1) for r in records])
    return float(tokens.max()), max(itertools.accumulate(change for _, change in changes))


def result(
    records: Sequence[Record],
    duration: float,
    *,
    percentiles: Sequence[float] = (99,),
    limits: Mapping[str, float] | None = None,
    texts: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """The result file's object.

    Args:
        duration: seconds from the first request's start to the last one's end.
        limits: of `goodput`.
        texts: with what was generated.
        settings: entries that come first.
    """
    good = [r for r in records if not r.error]
    inputs, outputs = (sum(getattr(r, name) for r in good) for name in ("prompt_len", "output_len"))
    peak_tokens, peak_open = peaks(good)
    found: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        **settings,
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "request_goodput": goodput(good, limits) / duration if limits else None,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_open,
        "client_lag_p99_ms": _percentile([1e3 * r.lag for r in records], 99),
        "input_lens": [r.prompt_len for r in records],
        "output_lens": [r.output_len for r in records],
        "ttfts": [r.ttft for r in records],
        "itls": [r.itls for r in records],
        "errors": [r.error for r in records],
    }
    if texts:
        found["generated_texts"] = [r.text for r in records]
    for name, values in milliseconds(good).items():
        found[f"mean_{name}_ms"] = float(np.mean(values)) if values else 0.0
        found[f"median_{name}_ms"] = _percentile(values, 50)
        found[f"std_{name}_ms"] = float(np.std(values)) if values else 0.0
        for p in percentiles:
            found[f"p{_plain(p)}_{name}_ms"] = _percentile(values, p)
    return found


def _percentile(values: Sequence[float], p: float) -> float:
    return float(np.percentile(values, p)) if values else 0.0


def _plain(p: float) -> str:
    return str(int(p)) if p == int(p) else str(p)


def _line(name: str, value: Any) -> str:
    return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}"


def report(found: Mapping[str, Any], metrics: Sequence[str] = ("ttft", "tpot", "itl")) -> str:
    """The block of text.

    Args:
        found: of `result`.
        metrics: whose sections are shown, of `TITLES`.
    """
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_line("Successful requests:", found["completed"]), _line("Failed requests:", found["failed"])]
    if found.get("max_concurrency") is not None:
        lines.append(_line("Maximum request concurrency:", found["max_concurrency"]))
    if isinstance(found.get("request_rate"), float):
        lines.append(_line("Request rate configured (RPS):", found["request_rate"]))
    lines += [
        _line("Benchmark duration (s):", found["duration"]),
        _line("Total input tokens:", found["total_input_tokens"]),
        _line("Total generated tokens:", found["total_output_tokens"]),
        _line("Request throughput (req/s):", found["request_throughput"]),
    ]
    if found["request_goodput"] is not None:
        lines.append(_line("Request goodput (req/s):", found["request_goodput"]))
    lines += [
        _line("Output token throughput (tok/s):", found["output_throughput"]),
        _line("Peak output token throughput (tok/s):", found["max_output_tokens_per_s"]),
        _line("Peak concurrent requests:", float(found["max_concurrent_requests"])),
        _line("Total Token throughput (tok/s):", found["total_token_throughput"]),
    ]
    for metric in metrics:
        title, short = TITLES[metric]
        lines.append(f"{title:-^{WIDTH}}")
        for name in (n for n in found if n.endswith(f"_{metric}_ms") and not n.startswith("std_")):
            what = name.removesuffix(f"_{metric}_ms")
            lines.append(_line(f"{what.capitalize()} {short} (ms):", found[name]))
    return "\n".join([*lines, "=" * WIDTH])


def save(path: Path, found: Mapping[str, Any]) -> None:
    """The result as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")
