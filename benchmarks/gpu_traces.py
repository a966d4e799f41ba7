"""Everything about idle time on a GPU in one go: traces of this engine and of its peer, what the always-on measurement
costs, and which lines of a small program wait. Each part in a process of its own, because a profiler slows its process
for good.

    python benchmarks/gpu_traces.py --out traces                     # all, about eight minutes
    python benchmarks/gpu_traces.py --out traces --only one,peers
    python benchmarks/gpu_traces.py --out traces --only events --shape tiny --device cpu    # to try it without a GPU

own      trace run of long, mid and one of the 8B shape and of 32 x 128 of the 0.6B, at depth 1 and 2
peers    trace run long of the continuous batching of transformers, synchronous and asynchronous, with Python stacks
events   time of a step with the two events per step that are always recorded, against without: runs by turns
syncs    gapless trace syncs on the example of docs/profiling.md, with the fault and mended
one      of own, `one` at depth 2 only: the quickest check of the trace itself

Each trace gives NAME.json, NAME.html, NAME.png and NAME.trace.json.gz, cut to some steps where it is large;
summary.json and summary.txt have one line for each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

PARTS = ("own", "peers", "events", "syncs")
OWN = [("llama-8b", "one"), ("llama-8b", "mid"), ("llama-8b", "long"), ("qwen3-0.6b", "small32")]
TRACE_LIMIT = 4_000_000  # bytes of a kept trace; those with stacks come near it, the others need a tenth
PICTURE_STEPS = 12
EVENTS = [("llama-8b", "mid"), ("qwen3-0.6b", "small32"), ("qwen3-0.6b", "small1")]
GOAL = 0.005  # of a step's time


class Session:
    """Runs commands with a limit each and one for all, and writes down what they gave."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self._end = out, time.monotonic() + seconds
        self.summary: dict[str, Any] = {}
        out.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, command: list[str], limit: float) -> bool:
        """Whether it ended well; its text goes to ``NAME.txt``."""
        limit = min(limit, self._end - time.monotonic())
        if limit < 1:
            print(f"{name}: no time left", flush=True)
            self.summary[name] = {"error": "no time left"}
            return False
        start = time.monotonic()
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit,
                check=False,
            )  # fmt: skip
            text, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
            text = output.decode(errors="replace") if isinstance(output, bytes) else output
            code = 124
        seconds = time.monotonic() - start
        (self.out / f"{name}.txt").write_text(text)
        print(f"{name}: {'done' if code == 0 else f'failed ({code})'} in {seconds:.1f} s", flush=True)
        self.summary[name] = {"seconds": seconds}
        if code:
            self.summary[name]["error"] = text.strip()[-500:]
            print(text.strip()[-800:], flush=True)
        self.save()
        return code == 0

    def save(self) -> None:
        """The summary so far: what is done is kept if a later part is stopped from outside."""
        (self.out / "summary.json").write_text(json.dumps(self.summary, indent=1) + "\n")

    def close(self) -> None:
        """The summary as JSON, and as text."""
        self.save()
        lines = [line(name, row) for name, row in self.summary.items()]
        (self.out / "summary.txt").write_text("\n".join(lines) + "\n")
        print("\n".join(lines))


def line(name: str, row: dict[str, Any]) -> str:
    """A part in a line."""
    if "error" in row:
        return f"{name:34} {row['error'].splitlines()[-1] if row['error'] else 'failed'}"
    return f"{name:34} " + "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())


def trace(session: Session, name: str, words: list[str], limit: float) -> None:
    """One ``gapless trace run``, with everything that it can write."""
    out = session.out
    kept = out / f"{name}.trace.json.gz"
    command = [sys.executable, "-m", "gapless", "trace", "run", *words, "--quiet"]
    command += ["--json", str(out / f"{name}.json"), "--html", str(out / f"{name}.html"), "--keep", str(kept)]
    command += ["--picture-steps", str(PICTURE_STEPS)]
    with contextlib.suppress(ImportError):
        import matplotlib  # noqa: F401

        command += ["--png", str(out / f"{name}.png")]
    done = session.run(name, command, limit)
    if done:
        report = json.loads((out / f"{name}.json").read_text())
        keys = ("undisturbed_step_ms", "step_busy_by_events", "step_busy", "undisturbed_busy", "kernel_busy",
                "activity_span_ms_per_step", "kernel_ms_per_step", "nodes_per_step", "gap_us_per_node",
                "steps_found_by", "notes")  # fmt: skip
        session.summary[name] |= {key: report[key] for key in keys}
        session.summary[name]["syncs_per_step"] = sum(c["per_step"] for c in report["syncs"])
    if kept.exists() and kept.stat().st_size > TRACE_LIMIT:
        shorten(session, name, kept)


def shorten(session: Session, name: str, kept: Path) -> None:
    """As many steps as fit, with all their Python functions if that can be."""
    from cut_trace import cut_file  # of tools/
    from gapless.trace.chrome import TraceError

    part = kept.with_name(kept.name + ".part")
    for steps in (10, 5):
        try:
            cut_file(kept, part, 2, steps, TRACE_LIMIT)
        except TraceError as error:
            session.summary[name]["trace"] = f"not cut: {error}"
            continue
        part.replace(kept)
        session.summary[name]["trace"] = f"cut to {steps} steps"
        return
    kept.unlink()  # it cannot be read as steps, and is too large to keep


def own(session: Session, args: argparse.Namespace, only_one: bool) -> None:
    """Traces of this engine."""
    for shape, load in OWN:
        for depth in (2, 1):
            if only_one and (load, depth) != ("one", 2):
                continue
            words = [load, "--shape", args.shape or shape, "--depth", str(depth), *device(args)]
            trace(session, f"{args.shape or shape}-{load}-depth{depth}", words, args.limit)


def peers(session: Session, args: argparse.Namespace) -> None:
    """Traces of the peer."""
    for mode in ("sync", "async"):
        words = ["long", "--shape", args.shape or "llama-8b", "--engine", f"transformers-{mode}", *device(args)]
        trace(session, f"transformers-{mode}-long", [*words, "--window", "20", "--stacks"], args.limit)


def device(args: argparse.Namespace) -> list[str]:
    """The option, if it is not the default."""
    return ["--device", args.device] if args.device != "cuda" else []


EXAMPLE = re.compile(r"```python\n(import torch\n.*?)```", re.S)


def examples() -> dict[str, str]:
    """The documentation's example, with its fault and mended as the text says."""
    found = EXAMPLE.search((ROOT / "docs" / "profiling.md").read_text())
    assert found is not None, "docs/profiling.md has no example any more"
    text = found.group(1)
    pinned = text.replace("torch.arange(10)", "torch.arange(10).pin_memory()")
    mended = pinned.replace('index.to("cuda")', 'index.to("cuda", non_blocking=True)')
    assert mended.count("non_blocking") == mended.count("pin_memory") == 1, "the example has changed"
    return {"fault": text, "mended": mended}


def syncs(session: Session, args: argparse.Namespace) -> None:
    """Both programs under ``gapless trace syncs``."""
    for name, program in examples().items():
        script = session.out / f"{name}.py"
        script.write_text(program)
        command = [sys.executable, "-m", "gapless", "trace", "syncs", "--", str(script)]
        if session.run(f"syncs-{name}", command, args.limit):
            session.summary[f"syncs-{name}"]["said"] = (session.out / f"syncs-{name}.txt").read_text().strip()


# ---- what the events cost ---------------------------------------------------------------------------------------


class NoEvent:
    """Records nothing; no time passes between two of them."""

    def record(self, stream: Any) -> None: ...
    def elapsed_ms(self, later: Any) -> float:
        return 0.0


def switch(client: Any) -> Callable[[bool], None]:
    """A function that turns the two events around each step on and off, between two steps of an idle engine."""
    from gapless.runner.runner import Stopwatch

    runner = client._built.runner
    real = runner._watches
    none = [Stopwatch(*(NoEvent() for _ in fields(Stopwatch))) for _ in real]

    def turn(on: bool) -> None:
        def act() -> None:
            runner._watches, runner._last = (real if on else none), None

        client._engine.call(act)

    return turn


def cost_of_events(shape: str, load_name: str, pairs: int, where: str, new_tokens: int | None) -> dict[str, Any]:
    """Pairs of the same run, one with events and one without, in changing order; by the wall clock of each."""
    import torch

    from gapless.bench.measure import run_once, warm
    from gapless.bench.models import random_model
    from gapless.bench.sweep import Subject
    from gapless.bench.workloads import workload

    place = torch.device(where)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    subject = Subject(random_model(shape, place, dtype), shape, place)
    load = workload(load_name).limited(new_tokens or 10**9)
    ratios, seconds = [], {True: list[float](), False: list[float]()}
    with subject.engine([load], 2) as client:
        turn = switch(client)
        warm(client, load)
        for salt in (0, 0):
            run_once(client, load, salt)  # the prompts go into the prefix cache: what follows is decode
        for pair in range(pairs):
            got = {}
            for on in (True, False) if pair % 2 else (False, True):
                turn(on)
                got[on] = run_once(client, load, 0).wall_s
                seconds[on].append(got[on])
            ratios.append(got[True] / got[False])
        turn(True)
    spread = statistics.quantiles(ratios, n=4) if len(ratios) > 3 else [min(ratios), 0.0, max(ratios)]
    cost = statistics.median(ratios) - 1
    with_s, without_s = statistics.median(seconds[True]), statistics.median(seconds[False])
    return {
        "shape": shape,
        "workload": load_name,
        "pairs": pairs,
        "steps": load.output_lens[0],
        "cost": cost,
        "quarter": spread[0] - 1,
        "three_quarters": spread[2] - 1,
        "with_s": with_s,
        "without_s": without_s,
        "us_per_step": 1e6 * (with_s - without_s) / load.output_lens[0],
        "goal": GOAL,
        "reached": cost < GOAL,
    }


def events(session: Session, args: argparse.Namespace) -> None:
    """The cost of the always-on measurement, each in a process of its own."""
    for shape, load in EVENTS if args.shape is None else [(args.shape, "cpu")]:
        name = f"events-{shape}-{load}"
        file = session.out / f"{name}.json"
        command = [sys.executable, __file__, "--events", f"{shape},{load}", "--out", str(file)]
        command += ["--pairs", str(args.pairs), "--device", args.device]
        if session.run(name, command, args.limit):
            session.summary[name] |= json.loads(file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}, one (default: all)")
    parser.add_argument("--limit", type=float, default=110.0, help="seconds of one process (default: 110)")
    parser.add_argument("--seconds", type=float, default=560.0, help="of all; then the rest is skipped (default: 560)")
    parser.add_argument("--pairs", type=int, default=8, help="of runs with and without events (default: 8)")
    parser.add_argument("--shape", help="instead of the shapes above")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--events", help=argparse.SUPPRESS)  # SHAPE,WORKLOAD: this process measures
    args = parser.parse_args()
    if args.events:
        shape, load = args.events.split(",")
        args.out.write_text(json.dumps(cost_of_events(shape, load, args.pairs, args.device, None), indent=1) + "\n")
        return
    wanted = args.only.split(",")
    unknown = set(wanted) - {*PARTS, "one"}
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))} is not allowed: {', '.join(PARTS)}, one")
    session = Session(args.out, args.seconds)
    try:
        if "own" in wanted or "one" in wanted:
            own(session, args, "own" not in wanted)
        if "peers" in wanted:
            peers(session, args)
        if "events" in wanted:
            events(session, args)
        if "syncs" in wanted:
            syncs(session, args)
    finally:
        session.close()


if __name__ == "__main__":
    main()
