"""gapless and ``transformers`` on this machine's CPU, in one process, run by turns.

    python benchmarks/cpu_compare.py --out cpu_compare.json

    equal    16 prompts of 64 tokens, 64 new tokens each: against ``model.generate`` on the padded batch
    ragged   32 prompts of 8 to 256 tokens, 16 to 128 new tokens: against the continuous batching of ``generate_batch``

Both sides share one copy of SmolLM2's weights in fp32, decode greedily, ignore end-of-sequence and make the same number
of tokens. A round runs both, in alternating order, on prompts that no earlier round had. The ratio of a round is the
peer's seconds over ours; the figure is the median over the rounds, beside the smallest and the largest. The same ratio
of processor seconds stands beside it: on a machine that is busy with other things it is the steadier one.

``generate_batch`` takes one length for all of its requests. So the ragged case does what that method does, with a
length for each: it opens the manager, adds the requests, and collects the results. Opening it is not timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

import gapless
from gapless.bench.workloads import Workload, uniform
from gapless.model.load.smollm2 import get_smollm2

Prompts = list[list[int]]
Run = Callable[[Workload, Prompts], tuple[float, Prompts]]
GOALS = {"equal": 1.0, "ragged": 1.5}


def ragged(name: str, batch: int) -> Workload:
    """``batch`` prompts of 8 to 256 tokens with 16 to 128 new tokens, the same on every machine."""
    rng = random.Random(0)
    return Workload(
        name,
        tuple(rng.randint(8, 256) for _ in range(batch)),
        tuple(rng.randint(16, 128) for _ in range(batch)),
    )


def no_end(model: Any) -> GenerationConfig:
    """Greedy, without an end-of-sequence."""
    config = GenerationConfig(do_sample=False, pad_token_id=0)
    config.eos_token_id = None
    return config


def run_gapless(llm: gapless.LLM, load: Workload, prompts: Prompts) -> tuple[float, Prompts]:
    """Seconds and new tokens."""
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], load.params(), use_tqdm=False)
    wall = time.perf_counter() - start
    return wall, [o.outputs[0].token_ids for o in outputs]


def run_generate(model: Any, load: Workload, prompts: Prompts) -> tuple[float, Prompts]:
    """``model.generate`` on one batch of equal lengths."""
    config = no_end(model)
    config.max_new_tokens = load.output_lens[0]
    start = time.perf_counter()
    ids = torch.tensor(prompts)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    tokens = out[:, ids.shape[1] :].tolist()
    return time.perf_counter() - start, tokens


def run_generate_batch(model: Any, batching: ContinuousBatchingConfig, load: Workload, prompts: Prompts) -> Any:
    """The continuous batching of ``transformers``."""
    config = no_end(model)
    config.eos_token_id = -1
    config.max_new_tokens = max(load.output_lens)
    results: dict[str, list[int]] = {}
    opened = model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching, block=True, timeout=5
    )
    with opened as manager:
        start = time.perf_counter()
        names = [
            manager.add_request(prompt, max_new_tokens=new)
            for prompt, new in zip(prompts, load.output_lens, strict=True)
        ]
        while len(results) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                results[result.request_id] = result.generated_tokens
            elif result is None and not manager.is_running():
                raise RuntimeError("the manager of transformers stopped before all results were there")
        wall = time.perf_counter() - start
    return wall, [results[name] for name in names]


def compare(load: Workload, ours: Run, theirs: Run, rounds: int, peer: str) -> dict[str, Any]:
    """Both by turns. A short round before the first warms up and does not count."""
    rows: list[dict[str, Any]] = []
    whole = load
    for i in range(rounds + 1):
        load = whole if i else whole.limited(4)
        prompts = load.prompts(salt=i + 1)
        sides = [("gapless", ours), (peer, theirs)]
        walls, tokens, busy = {}, {}, {}
        for name, run in sides if i % 2 else sides[::-1]:
            gc.collect()
            before = time.process_time()
            walls[name], tokens[name] = run(load, prompts)
            busy[name] = time.process_time() - before
            if tuple(map(len, tokens[name])) != load.output_lens:
                raise RuntimeError(f"{name} made {list(map(len, tokens[name]))} tokens, not {load.output_lens}")
        if i:
            same = sum(a == b for a, b in zip(tokens["gapless"], tokens[peer], strict=True))
            ratio, cpu_ratio = walls[peer] / walls["gapless"], busy[peer] / busy["gapless"]
            rows.append({**walls, "ratio": ratio, "cpu_s": busy, "cpu_ratio": cpu_ratio, "equal_requests": same})
            print(
                f"{load.name:7s} round {i}: gapless {walls['gapless']:6.2f} s   {peer} {walls[peer]:6.2f} s   "
                f"ratio {ratio:.3f}, of processor seconds {cpu_ratio:.3f}   {same} of {load.batch} requests equal",
                flush=True,
            )
    ratios = [row["ratio"] for row in rows]
    new = sum(load.output_lens)
    medians = {name: statistics.median(row[name] for row in rows) for name in ("gapless", peer)}
    result = {
        "case": load.name,
        "peer": peer,
        "requests": load.batch,
        "prompt_tokens": sum(load.prompt_lens),
        "new_tokens": new,
        "median_s": medians,
        "tokens_per_s": {name: new / seconds for name, seconds in medians.items()},
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "cpu_ratio": statistics.median(row["cpu_ratio"] for row in rows),
        "goal": GOALS[load.name],
        "rounds": rows,
    }
    print(
        f"{load.name:7s} median : gapless {medians['gapless']:6.2f} s ({new / medians['gapless']:.0f} tokens/s)   "
        f"{peer} {medians[peer]:6.2f} s ({new / medians[peer]:.0f} tokens/s)   "
        f"ratio {result['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), of processor seconds "
        f"{result['cpu_ratio']:.2f}; goal {GOALS[load.name]}",
        flush=True,
    )
    return result


def processor() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def environment(threads: int) -> dict[str, Any]:
    """What the figures depend on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "gapless": gapless.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "cpu": processor() if Path("/proc/cpuinfo").exists() else platform.processor(),
        "threads": threads,
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2, help="of torch, for both sides")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="equal,ragged")
    parser.add_argument("--depth", type=int, default=2, help="pipeline_depth of gapless")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    where = environment(args.threads)
    print("  ".join(f"{k} {v}" for k, v in where.items()), flush=True)

    model = AutoModelForCausalLM.from_pretrained(get_smollm2(), dtype=torch.float32).eval()
    loads = {"equal": uniform("equal", 16, 64, 64), "ragged": ragged("ragged", 32)}
    # The quickest of the settings that were tried; its own defaults take twice the time.
    batching = ContinuousBatchingConfig(num_blocks=128, page_size=64, max_batch_tokens=256)
    results = []
    with gapless.LLM(
        model, device="cpu", pipeline_depth=args.depth, max_num_seqs=32, max_num_batched_tokens=1024, max_model_len=512
    ) as llm:
        for case in args.cases.split(","):
            peers: dict[str, tuple[str, Run]] = {
                "equal": ("generate", lambda load, prompts: run_generate(model, load, prompts)),
                "ragged": ("generate_batch", lambda load, prompts: run_generate_batch(model, batching, load, prompts)),
            }
            name, theirs = peers[case]
            ours: Run = lambda load, prompts: run_gapless(llm, load, prompts)  # noqa: E731
            results.append(compare(loads[case], ours, theirs, args.rounds, name))
    if args.out:
        args.out.write_text(json.dumps({"environment": where, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
