"""Whether a change leaves every bit alone: tokens and log-probabilities of fixed runs, written down and compared.

    python benchmarks/same_bits.py write before.json      # in the old tree
    python benchmarks/same_bits.py write after.json       # in the new one
    python benchmarks/same_bits.py compare before.json after.json

A run's requests are handed over together, so that its batches are the same each time, and so are the kernels that
they meet. Twenty log-probabilities a token stand for the logits: they hold the sum over the whole vocabulary. Only the
public interface is used, so that the script runs in any tree. ``compare`` exits with 1 if a run differs, and says at
which request and token. One run that is made twice shows whether the device itself repeats its bits.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gapless import LLM, SamplingParams
from gapless.bench.models import random_model

Case = tuple[str, str, dict[str, Any], dict[str, Any], list[tuple[int, int]], dict[str, Any]]
"""Name, shape, changes of the shape, engine options, (prompt, new) tokens of each request, sampling parameters."""


def cases(device: str) -> Iterator[Case]:
    """On a GPU real widths, whose kernels are in the table; on a CPU the same runs on a tiny shape."""
    rng = random.Random(5)
    ragged = [(rng.randint(1, 700), rng.randint(2, 40)) for _ in range(48)]
    gpu = device == "cuda"
    eight = ("llama-8b", {"num_hidden_layers": 4}) if gpu else ("tiny", {})
    small = ("qwen3-0.6b", {}) if gpu else ("tiny", {})
    wide = [(20, 24)] * 200 if gpu else [(20, 8)] * 20
    for name, (shape, changes) in {"llama-8b": eight, "qwen3-0.6b": small}.items():
        yield f"{name} one", shape, changes, {}, [(100, 48)], {}
        yield f"{name} ragged", shape, changes, {"max_num_batched_tokens": 512}, ragged, {}
        yield f"{name} ragged again", shape, changes, {"max_num_batched_tokens": 512}, ragged, {}
        yield f"{name} depth 1", shape, changes, {"max_num_batched_tokens": 512, "pipeline_depth": 1}, ragged, {}
        yield f"{name} wide", shape, changes, {"max_num_seqs": 200}, wide, {}
        yield f"{name} sampled", shape, changes, {}, ragged, {"temperature": 0.8, "top_p": 0.9, "seed": 3}
        drafts = {"speculative": "ngram,num_speculative_tokens=3"}
        yield f"{name} drafts", shape, changes, drafts, ragged[:16], {}
    yield "llama-8b float32", *eight, {"dtype": "float32"}, ragged[:12], {}
    yield "llama-8b prompts", *eight, {}, ragged[:12], {"prompt_logprobs": 20}


def run(case: Case, device: str) -> list[list[Any]]:
    """For each request its tokens, and a digest of the bits of its log-probabilities."""
    _, shape, changes, options, lengths, params = case
    usual = {"max_num_seqs": 64, "max_model_len": 1024, "check_model": False, "kv_cache_memory_bytes": 2**30}
    options = {**usual, **options}
    if device == "cpu":
        options |= {"dtype": "float32", "kv_cache_memory_bytes": 2**26}
    dtype = getattr(torch, options.pop("dtype", "bfloat16"))
    model = random_model(shape, torch.device(device), dtype, **changes)
    rng = random.Random(1)
    prompts = [[rng.randrange(5_000) for _ in range(n)] for n, _ in lengths]
    settings = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": new, "ignore_eos": True, "logprobs": 20, **params})
        for _, new in lengths
    ]
    with LLM(model, tokenizer=None, device=device, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False)
    found = []
    for output in outputs:
        completion = output.outputs[0]
        bits = hashlib.sha256()
        for entry in [*(output.prompt_logprobs or []), *(completion.logprobs or [])]:
            for token, value in (entry or {}).items():
                bits.update(struct.pack("<id", token, value.logprob))
        found.append([list(completion.token_ids), bits.hexdigest()])
    del model
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Say what differs; the number of runs that do."""
    different = 0
    for name in sorted(set(before) | set(after)):
        a, b = before.get(name), after.get(name)
        if a == b:
            print(f"equal      {name}")
            continue
        different += 1
        if a is None or b is None:
            print(f"missing    {name}")
            continue
        wrong = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        tokens = [i for i in wrong if a[i][0] != b[i][0]]
        print(f"DIFFERENT  {name}: {len(wrong)} of {len(a)} requests, {len(tokens)} of them in tokens")
        for i in tokens[:3]:
            at = next(k for k, (x, y) in enumerate(zip(a[i][0], b[i][0], strict=False)) if x != y)
            print(f"           request {i} from token {at} on: {a[i][0][at : at + 5]} and {b[i][0][at : at + 5]}")
    return different


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    arguments = parser.parse_args()
    if arguments.action == "compare":
        before, after = (json.loads(path.read_text()) for path in arguments.files)
        return 1 if compare(before, after) else 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = {}
    for case in cases(device):
        if arguments.only in case[0]:
            results[case[0]] = run(case, device)
            print(case[0], flush=True)
            gc.collect()
    (path,) = arguments.files
    path.write_text(json.dumps(results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
