"""The comparison that started this project: an 8B model, 32 requests, 8K new tokens, synchronous against asynchronous.

Published for the continuous batching of ``transformers`` (Hugging Face, 2026-05-14): 300.6 s with the GPU active for
76.0 % of the time, against 234.5 s with 99.4 %.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gapless.bench.environment import environment
from gapless.bench.subject import compare, make_subject
from gapless.bench.sweep import sweep
from gapless.bench.table import grid, headline, of_floor, progress, save, step_ms
from gapless.bench.workloads import Workload, uniform, workload

logger = logging.getLogger("gapless")

TOKENS = 32 * 8192
PUBLISHED = [("published, sync", 300.6, 0.760), ("published, async", 234.5, 0.994)]
HEAD = ("run", "seconds", "tokens/s", "ms/step", "% of floor", "step-busy %", "kernel-busy %", "idle s", "speed-up")


def cpu_workload() -> Workload:
    """The same comparison for a laptop: SmolLM2, 8 requests of 32 tokens, 64 new each."""
    return uniform("seed on a CPU", 8, 32, 64)


def seed(arguments: argparse.Namespace, depths: list[int], options: dict[str, Any]) -> int:
    """Run, and print the table."""
    subject = make_subject(arguments, options)
    gpu = subject.device.type == "cuda"
    load = workload("seed") if gpu else cpu_workload()
    if arguments.max_new_tokens:
        load = load.limited(arguments.max_new_tokens)
    print(headline(environment()), flush=True)

    def show(row: dict[str, Any]) -> None:
        if not arguments.quiet:
            print(progress(row), file=sys.stderr, flush=True)

    rows = sweep(subject, [load], depths, show) + compare(arguments, subject, [load], show)
    name, shape = subject.name, arguments.shape
    del subject
    if gpu and not arguments.no_profile:
        for row in rows:
            if row["engine"] == "gapless":
                row["kernel_busy"] = _profiled(shape, arguments.model, load, row)
    print(render(rows, load, name, gpu))
    if arguments.save:
        save(arguments.save, environment(), rows)
    return 0


def render(rows: list[dict[str, Any]], load: Workload, name: str, gpu: bool) -> str:
    """The table, and what differs from the published one."""
    base = rows[0]["wall_s"]
    lines = []
    for row in rows:
        what = {1: "sync (depth 1)"}.get(row["depth"], f"async (depth {row['depth']})")
        lines.append(
            [
                what if row["engine"] == "gapless" else row["engine"],
                f"{row['wall_s']:.2f}",
                f"{row['tokens_per_s']:.0f}",
                step_ms(row),
                of_floor(row),
                _percent(row.get("step_busy")),
                _percent(row.get("kernel_busy")),
                "-" if row.get("idle_s") is None else f"{row['idle_s']:.2f}",
                f"{base / row['wall_s']:.3f}",
            ]
        )
    for what, seconds, active in PUBLISHED:
        idle, ms = seconds * (1 - active), 1e3 * seconds / 8192
        speed_up = PUBLISHED[0][1] / seconds
        lines.append([what, f"{seconds:.2f}", f"{TOKENS / seconds:.0f}", f"~{ms:.3f}", "-", "-", _percent(active),
                      f"{idle:.2f}", f"{speed_up:.3f}"])  # fmt: skip
    text = [grid(HEAD, lines), ""]
    new = load.output_lens[0]
    text.append(f"here: {name}, {load.batch} requests of {load.prompt_lens[0]} tokens, {new} new tokens each, greedy.")
    text.append(
        "published: an 8B model, 32 requests, 8,192 new tokens each, on a GPU that is not named, by the engine of "
        "transformers.\nIts busy figure is the profiler's: kernels and copies over the whole run, so it counts the "
        "gaps between kernels as idle,\nand it is slowed by the profiler. Here step-busy is by events without a "
        "profiler and says what the host costs; kernel-busy\nis work per step by the profiler over the step time "
        "without it."
    )
    if not gpu:
        text.append("There is no GPU here: the CPU device ran, whose kernels share the cores with the host.")
        text.extend(_hidden(row) for row in rows if row["engine"] == "gapless" and row["depth"] > 1)
    elif new != 8192 or load.batch != 32:
        text.append("The workload was shortened: seconds and idle seconds do not compare with the published ones.")
    return "\n".join(text)


def _hidden(row: dict[str, Any]) -> str:
    hidden, host = row["host_hidden_ms_per_step"], row["host_ms_per_step"]
    return (
        f"depth {row['depth']} hides {hidden:.3f} ms of the {host:.3f} ms that the host works per step "
        f"({hidden * row['steps']:.1f} ms in {row['steps']} steps)."
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def _profiled(shape: str | None, model: str | None, load: Workload, row: dict[str, Any]) -> float | None:
    """Undisturbed kernel-busy at the run's mean context, from a profile in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        what = ["--shape", shape] if shape else ["--model", str(model)]
        context = load.prompt_lens[0] + load.output_lens[0] // 2
        size = ["--batch", str(load.batch), "--prompt-len", str(context)]
        command = [sys.executable, "-m", "gapless", "trace", "run", *what, *size, "--depth", str(row["depth"])]
        command += ["--json", str(out), "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            logger.warning("no profile at depth %d: %s", row["depth"], done.stderr.strip()[-400:])
            return None
        busy: float | None = json.loads(out.read_text())["undisturbed_busy"]
        return busy
