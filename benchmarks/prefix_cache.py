"""Requests that share a long prefix: it is computed once, and what that saves.

    python benchmarks/prefix_cache.py --shape qwen3-0.6b --out benchmarks/results/prefix-cache-h200.json
    python benchmarks/prefix_cache.py --device cpu --shape tiny --out benchmarks/results/prefix-cache-cpu.json

All requests are submitted at once to an engine whose cache is empty, so that what is found was computed by another
request of the same batch. The number of computed tokens is asserted from the engine's own counters: the prefix once,
and for each request its own tokens and the last block of the prompt. Engines with and without the cache give equal
numbers of tokens; times are medians of runs that alternate between the two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import gapless
from gapless.bench.environment import environment
from gapless.bench.models import random_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=1024, help="tokens that all prompts begin with")
    parser.add_argument("--own", type=int, default=16, help="tokens of each prompt behind it")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()

    name = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    dtype = torch.bfloat16 if name.startswith("cuda") else torch.float32
    model = random_model(args.shape, torch.device(name), dtype)
    vocabulary = model.config.vocab_size
    block = 16
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        found: list[int] = torch.randint(2, vocabulary, (count,), generator=generator).tolist()
        return found

    longest = args.prefix + args.own + args.new_tokens
    options: dict[str, Any] = {
        "device": name,
        "block_size": block,
        "max_num_seqs": args.requests,
        "max_num_batched_tokens": 8192,
        "max_model_len": longest,
        "num_kv_blocks": args.requests * (-(-longest // block) + 1) + 1,
        "check_model": False,
    }
    params = gapless.SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)
    engines = {cache: gapless.LLM(model, enable_prefix_caching=cache, **options) for cache in (True, False)}
    figures: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    try:
        for run in range(args.runs + 1):  # the first warms up
            shared = ids(args.prefix)
            prompts = [{"prompt_token_ids": shared + ids(args.own)} for _ in range(args.requests)]
            for cache, llm in engines.items():
                llm.reset_prefix_cache()
                before = llm.stats()[1].tokens_computed
                start = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                wall = time.perf_counter() - start
                computed = llm.stats()[1].tokens_computed - before
                found = args.prefix // block * block if cache else 0
                decoded = args.requests * (args.new_tokens - 1)
                expected = found + args.requests * (args.prefix - found + args.own) + decoded
                if computed != expected:
                    raise RuntimeError(f"{computed} tokens were computed, and not {expected} (cache: {cache})")
                if run:
                    figures[cache].append({"wall_s": wall, "tokens_computed": computed})
    finally:
        for llm in engines.values():
            llm.close()
    walls = {cache: statistics.median(f["wall_s"] for f in figures[cache]) for cache in figures}
    computed = {cache: figures[cache][0]["tokens_computed"] for cache in figures}
    ratio = walls[False] / walls[True]
    print(
        f"{args.requests} requests, {args.prefix} tokens shared, {args.own} own, {args.new_tokens} new: with the cache "
        f"{computed[True]:.0f} tokens in {walls[True]:.3f} s, without {computed[False]:.0f} in {walls[False]:.3f} s: "
        f"{ratio:.2f} times as fast"
    )
    if args.out:
        result = {
            "environment": environment(),
            "shape": args.shape,
            "device": name,
            "requests": args.requests,
            "prefix": args.prefix,
            "own": args.own,
            "new_tokens": args.new_tokens,
            "ratio": ratio,
            "with_cache": figures[True],
            "without_cache": figures[False],
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
