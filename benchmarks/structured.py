"""What structured output costs: milliseconds a decode step with no, one and every row constrained.

    python benchmarks/structured.py --model ~/.cache/gapless/SmolLM2-135M-Instruct --device cpu
    python benchmarks/structured.py --shape llama-8b --device cuda --out benchmarks/results/structured.json

Every row writes as many tokens as it may: the schema asks for a longer array. A shape has random weights and a made-up
tokenizer of its size. Decode is (wall of the run - wall of the same run with one new token) / (new tokens - 1).
"idle for masks" is the time between the forward and the sampling of a step in which the device had nothing to do;
"lost" is the whole difference to the same batch without grammars, the dearer sampling of masked rows included.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch

import gapless
from gapless.bench.environment import environment
from gapless.bench.models import SHAPES, random_model
from gapless.engine.stats import EngineStats

SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"json": SCHEMA, "disable_any_whitespace": True},
    "any json": {"json": {"type": "array", "minItems": 10_000}, "disable_any_whitespace": True},
    "regex": {"regex": "([a-z]{1,12} )*"},
}


def made_up_tokenizer(vocab_size: int) -> Any:
    """Byte-level, with every string of up to three letters or so as a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    letters = 'etaoinsrhldcumfpgwybvkxjqzETAOINSRHL0123456789\u0120,.:{}[]\\"-_'
    longer = ("".join(word) for n in (2, 3, 4) for word in itertools.product(letters, repeat=n))
    words = itertools.islice(itertools.chain(sorted(alphabet), longer), vocab_size - 1)
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate((*words, "</s>"))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def run(llm: gapless.LLM, batch: int, constrained: int, form: dict[str, Any], tokens: int, prompt: int) -> float:
    """Seconds of one run."""
    common: dict[str, Any] = {"max_tokens": tokens, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    params = [
        gapless.SamplingParams(**common, structured_outputs=form if i < constrained else None) for i in range(batch)
    ]
    prompts = [{"prompt_token_ids": [5 + (i + k) % 200 for k in range(prompt)]} for i in range(batch)]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall = time.perf_counter() - start
    for output in outputs:
        if output.outputs[0].finish_reason != "length":
            raise RuntimeError(f"a row ended early: {output.outputs[0]}")
    return wall


def measure(llm: gapless.LLM, batch: int, constrained: int, form: dict[str, Any], args: Any) -> dict[str, float]:
    """The median of several runs, by their decode time."""
    found = []
    for _ in range(args.repeats):
        first = run(llm, batch, constrained, form, 1, args.prompt_tokens)
        before = _copy(llm.stats()[0])
        wall = run(llm, batch, constrained, form, args.new_tokens, args.prompt_tokens)
        after = llm.stats()[0]
        per_step = 1e3 / (after.steps - before.steps)
        found.append(
            {
                "ms_per_step": 1e3 * (wall - first) / (args.new_tokens - 1),
                "busy_ms": per_step * (after.busy - before.busy),
                "idle_masks_ms": per_step * (after.idle_masks - before.idle_masks),
                "idle_host_ms": per_step * (after.idle_host - before.idle_host),
                "host_mask_ms": per_step * (after.host["mask"] - before.host["mask"]),
            }
        )
    return sorted(found, key=lambda one: one["ms_per_step"])[len(found) // 2]


def _copy(stats: EngineStats) -> EngineStats:
    return dataclasses.replace(stats, host=dict(stats.host))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="folder or name")
    which.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", default="8,32")
    parser.add_argument("--depths", default="1,2")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()

    batches = [int(n) for n in args.batches.split(",")]
    model, tokenizer = args.model, "auto"
    if args.shape:
        name = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        model = random_model(args.shape, torch.device(name), torch.bfloat16 if name != "cpu" else torch.float32)
        tokenizer = made_up_tokenizer(SHAPES[args.shape]["vocab_size"])
    longest = args.prompt_tokens + args.new_tokens + 1
    rows = []
    print(f"{'depth':>5} {'batch':>5} {'constrained':>11} {'form':10} {'ms/step':>8} {'lost':>7} "
          f"{'idle for masks':>14} {'idle for host':>13} {'masks on the host':>17}")  # fmt: skip
    for depth in map(int, args.depths.split(",")):
        with gapless.LLM(
            model,
            tokenizer=tokenizer,
            device=args.device,
            pipeline_depth=depth,
            max_num_seqs=max(batches),
            max_model_len=longest,
            num_kv_blocks=max(batches) * (-(-longest // 16) + 1) + 1,
            check_model=False,
        ) as llm:
            for batch in batches:
                plain = 0.0
                for constrained, form in ((0, "-"), *((n, f) for f in args.forms.split(",") for n in (1, batch))):
                    run(llm, batch, constrained, FORMS.get(form, {}), 2, args.prompt_tokens)  # compiles it
                    figures = measure(llm, batch, constrained, FORMS.get(form, {}), args)
                    plain = plain if constrained else figures["ms_per_step"]
                    lost = figures["ms_per_step"] - plain
                    rows.append(
                        {"depth": depth, "batch": batch, "constrained": constrained, "form": form, "lost_ms": lost,
                         **figures}
                    )  # fmt: skip
                    print(f"{depth:5} {batch:5} {constrained:11} {form:10} {figures['ms_per_step']:8.3f} {lost:7.3f} "
                          f"{figures['idle_masks_ms']:14.3f} {figures['idle_host_ms']:13.3f} "
                          f"{figures['host_mask_ms']:17.3f}", flush=True)  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
