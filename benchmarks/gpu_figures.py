"""Figures of one model shape on a GPU: workloads by name at several depths, as a table and as JSON.

    python benchmarks/gpu_figures.py --shape llama-8b --workloads long,mid,one,wide --depths 1,2,3 --out figures.json

Each depth is an engine of its own over the same weights. A workload runs twice, first with one new token for each
request; prompts differ between the runs, so that none is found in the prefix cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch
import transformers

import gapless
from gapless.bench.measure import measure, run_once
from gapless.bench.models import SHAPES, random_model, step_bytes
from gapless.bench.workloads import Workload, workload

READ_BANDWIDTH = 4.36e12  # bytes per second of an H200, by a Triton kernel over 8.6 GB


def environment() -> dict[str, str]:
    """What the figures depend on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gapless": gapless.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "gpu": gpu,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }


def floor_ms(model: object, load: Workload) -> float | None:
    """Least milliseconds of a decode step at the mean context, if memory is the limit."""
    if not load.uniform:
        return None
    return 1e3 * step_bytes(model, load.batch, load.prompt_lens[0] + load.output_lens[0] / 2) / READ_BANDWIDTH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--workloads", default="long,mid,one,wide")
    parser.add_argument("--depths", default="2")
    parser.add_argument("--max-new-tokens", type=int, default=None, help="shortens every workload")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    model = random_model(args.shape, torch.device(args.device), getattr(torch, args.dtype))
    loads = [workload(name) for name in args.workloads.split(",")]
    if args.max_new_tokens:
        loads = [load.limited(args.max_new_tokens) for load in loads]
    rows = []
    for depth in map(int, args.depths.split(",")):
        start = time.perf_counter()
        llm = gapless.LLM(
            model,
            device=args.device,
            pipeline_depth=depth,
            max_num_seqs=max(load.batch for load in loads),
            max_model_len=max(load.longest for load in loads),
            enforce_eager=args.eager,
            check_model=False,
        )
        print(f"depth {depth}: engine ready in {time.perf_counter() - start:.1f} s", flush=True)
        try:
            for load in loads:
                run_once(llm, load.limited(8), salt=100)  # warm
                figures = measure(llm, load)
                floor = floor_ms(model, load)
                rows.append({**figures.to_dict(), "shape": args.shape, "floor_ms": floor})
                decode = figures.decode_ms_per_step
                print(
                    f"{load.name:9s} depth {depth}  {figures.tokens_per_s:9.1f} tok/s  "
                    + (f"{decode:7.3f} ms/step ({100 * (floor or 0) / decode:4.1f} % of floor)  " if decode else "")
                    + (f"prefill {figures.prefill_s:6.3f} s  " if figures.prefill_s else "")
                    + f"wall {figures.wall_s:7.2f} s  step-busy {100 * figures.step_busy:6.2f} %  "
                    + f"host {figures.host_ms_per_step:.3f} ms/step  steps {figures.steps}  "
                    + " ".join(f"{k}={v:.3f}" for k, v in figures.host_ms_by_phase.items()),
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
    if args.out:
        args.out.write_text(json.dumps({"environment": environment(), "figures": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
