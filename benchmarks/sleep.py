"""What it costs to change weights, to sleep and to wake, and what memory a sleep gives back.

    python benchmarks/sleep.py --shape qwen3-0.6b --out benchmarks/results/sleep-h200.json
    python benchmarks/sleep.py --device cpu --shape tiny

Memory is the driver's count on a GPU, and the process's resident memory on a CPU. Level 2 needs a model that the engine
loaded itself: with ``--folder`` the random model is written there first.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gapless
from gapless.bench.environment import environment
from gapless.bench.models import random_model

MIB = 2**20


def used(device: torch.device) -> int:
    """Bytes in use."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(action: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default=None, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--level-2", action="store_true", help="also move the weights; writes the model to a folder")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()

    name = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    device = torch.device(name)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    model = random_model(args.shape, device, dtype)
    with tempfile.TemporaryDirectory() as folder:
        source: Any = model
        if args.level_2:
            model.cpu().save_pretrained(folder)
            source = folder
            del model
        options = {"device": name, "max_num_seqs": args.max_num_seqs, "max_model_len": 4096, "check_model": False}
        llm = gapless.LLM(source, kv_cache_memory_bytes=args.kv_mib * MIB, **options)
        rows = measure(llm, device, args.rounds, 2 if args.level_2 else 1, own=not args.level_2)
        kv_mib = sum(tensor.nbytes for tensor in llm._client._built.runner.state.kv) / MIB
        llm.close()
    for row in rows:
        print(
            "  ".join(
                f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "round"}
    print("median:", "  ".join(f"{key} {value:.2f}" for key, value in medians.items()))
    if args.out:
        result = {
            "environment": environment(),
            "shape": args.shape,
            "device": name,
            "dtype": str(dtype).removeprefix("torch."),
            "kv_mib": kv_mib,
            "max_num_seqs": args.max_num_seqs,
            "level": 2 if args.level_2 else 1,
            "median": medians,
            "rounds": rows,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(llm: gapless.LLM, device: torch.device, rounds: int, level: int, *, own: bool) -> list[dict[str, Any]]:
    """One row for each round; what generates afterwards must give what it gave before."""
    params = gapless.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(5, 5 + 64 + i))} for i in range(8)]

    def generate() -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    want = generate()
    state = {n: t.clone() for n, t in llm._client._built.runner.weights._tensors.items()}  # type: ignore[union-attr]
    rows = []
    for round in range(rounds):
        awake = used(device)
        asleep_s = timed(lambda: llm.sleep(level))
        asleep = used(device)
        wake_s = timed(llm.wake)
        first_s = timed(generate)
        rows.append(
            {
                "round": round,
                "sleep_ms": 1e3 * asleep_s,
                "wake_ms": 1e3 * wake_s,
                "first_batch_after_ms": 1e3 * first_s,
                "given_back_mib": (awake - asleep) / MIB,
                "grown_mib": (used(device) - awake) / MIB,
                "update_in_place_ms": 1e3 * timed(llm.update_weights) if own else 0.0,
                "update_by_copy_ms": 1e3 * timed(lambda: llm.update_weights(state)),
            }
        )
        if generate() != want:
            raise RuntimeError("the tokens after a sleep differ from those before")
    return rows


if __name__ == "__main__":
    main()
