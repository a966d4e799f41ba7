"""Decode speed while every core of the host is busy with something else, at several depths.

    python benchmarks/disturbance.py --out benchmarks/results/disturbance.json
    python benchmarks/plots.py

One process per core spins in Python, as a busy neighbour on the same machine would; each depth is measured without
them and with them, over the same weights. The prompts are in the prefix cache by then, so that what is timed is decode:
(wall of the run - wall of the same run with one new token) / (new tokens - 1).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import gapless
from gapless.bench.environment import environment
from gapless.bench.measure import run_once
from gapless.bench.models import SHAPES, random_model
from gapless.bench.workloads import Workload, workload
from gapless.engine.stats import PHASES

SPIN = """
import os, sys
parent = int(sys.argv[1])
if sys.argv[2] == "numpy":
    import numpy as np
    a = np.random.default_rng(0).random((400, 400))
    while os.getppid() == parent:
        a = a @ a % 1.0
x = 0
while os.getppid() == parent:
    for i in range(100_000):
        x = (x * 31 + i) & 0xFFFF
"""


@contextlib.contextmanager
def busy_cores(count: int, kind: str = "python") -> Iterator[None]:
    """``count`` spinning processes; all run when this yields, and have ended when it is left or the parent is gone."""
    one_core = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, "-c", SPIN, str(os.getpid()), kind]
    spinning = [subprocess.Popen(command, env={**os.environ, **one_core}) for _ in range(count)]
    try:
        deadline = time.monotonic() + 30
        while min(map(_cpu_seconds, spinning), default=1.0) < 0.4:
            if time.monotonic() > deadline:
                print("not all busy processes run: the figures are of a quieter machine than they should be")
                break
            time.sleep(0.1)
        yield
    finally:
        for process in spinning:
            process.terminate()
        for process in spinning:
            process.wait()


def _cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def decode_figures(llm: gapless.LLM, load: Workload, repeats: int) -> dict[str, Any]:
    """The median run of decode, its prompts cached."""
    client, runs = llm._client, []
    for _ in range(repeats):
        first = run_once(client, load, salt=0, new_tokens=1).wall_s
        stats = client.stats()[0]
        before = dataclasses.replace(stats, host=dict(stats.host))
        wall = run_once(client, load, salt=0).wall_s
        after = client.stats()[0]
        steps, busy, idle = after.steps - before.steps, after.busy - before.busy, after.idle_host - before.idle_host
        phases = {p: 1e3 * (after.host[p] - before.host[p]) / steps for p in PHASES}
        runs.append(
            {
                "decode_ms_per_step": 1e3 * (wall - first) / (load.output_lens[0] - 1),
                "step_busy": busy / (busy + idle),
                "host_ms_per_step": sum(ms for phase, ms in phases.items() if phase != "wait"),
                "host_ms_by_phase": phases,
                "wall_s": wall,
                "steps": steps,
            }
        )
    runs.sort(key=lambda run: run["decode_ms_per_step"])
    return {**runs[len(runs) // 2], "all_decode_ms_per_step": [run["decode_ms_per_step"] for run in runs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--workload", default="long")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="shortens the workload")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=None, help="shortens its prompts")
    parser.add_argument("--depths", default="1,2,3")
    parser.add_argument("--stress", choices=("python", "numpy"), default="python")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=600, help="start no further measurement after so long")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()

    begin = time.monotonic()
    model = random_model(args.shape, torch.device(args.device), getattr(torch, args.dtype))
    load = workload(args.workload).limited(args.max_new_tokens)
    if args.prompt_tokens:
        load = dataclasses.replace(load, prompt_lens=tuple(min(n, args.prompt_tokens) for n in load.prompt_lens))
    rows: list[dict[str, Any]] = []
    for depth in map(int, args.depths.split(",")):
        if time.monotonic() - begin > args.seconds:
            break
        llm = gapless.LLM(
            model,
            device=args.device,
            pipeline_depth=depth,
            max_num_seqs=load.batch,
            max_model_len=load.longest,
            num_kv_blocks=load.batch * (-(-load.longest // 16) + 1) + 1,
            check_model=False,
        )
        try:
            run_once(llm._client, load, salt=0, new_tokens=8)  # fills the prefix cache
            for disturbed in (False, True):
                around = busy_cores(args.processes, args.stress) if disturbed else contextlib.nullcontext()
                with around:
                    figures = decode_figures(llm, load, args.repeats)
                named = {"shape": args.shape, "workload": args.workload, "depth": depth, "disturbed": disturbed}
                rows.append({**named, **figures})
                print(
                    f"{load.name} depth {depth} {'every core busy' if disturbed else 'undisturbed    '} "
                    f"{figures['decode_ms_per_step']:.3f} ms/step  step-busy {100 * figures['step_busy']:.2f} %  "
                    f"host {figures['host_ms_per_step']:.3f} ms/step  wall {figures['wall_s']:.2f} s  "
                    + " ".join(f"{phase}={ms:.3f}" for phase, ms in figures["host_ms_by_phase"].items()),
                    flush=True,
                )
        except Exception:
            traceback.print_exc()
        finally:
            llm.close()
            del llm
            gc.collect()
            if args.device.startswith("cuda"):
                torch.cuda.empty_cache()
    kept = {}
    for depth in sorted({row["depth"] for row in rows}):
        quiet, noisy = ([r for r in rows if r["depth"] == depth and r["disturbed"] is d] for d in (False, True))
        if quiet and noisy:
            kept[depth] = quiet[0]["decode_ms_per_step"] / noisy[0]["decode_ms_per_step"]
            print(f"depth {depth} keeps {100 * kept[depth]:.1f} % of its undisturbed decode speed")
    if args.out:
        result = {
            "environment": environment(),
            "cores": os.cpu_count(),
            "processes": args.processes,
            "stress": args.stress,
            "kept": kept,
            "figures": rows,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
