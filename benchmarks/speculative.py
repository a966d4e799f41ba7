"""Tokens per second with drafts and without, on text that repeats and on text that never does.

    python benchmarks/speculative.py --model smollm2 --batches 1,4 --out speculative.json
    python benchmarks/speculative.py --shape qwen3-0.6b --device cuda --batches 1,8,32
    python benchmarks/speculative.py --model TARGET --method draft_model --draft-model DRAFT

    edit      a file of code, to be written again with one name changed: the answer repeats the prompt
    extract   a list of records, to be copied: the answer repeats parts of the prompt
    loop      random ids, greedy: what a model with random weights falls into
    ceiling   one token is allowed, so that every draft is right: the most that drafts can give
    fresh     random ids, drawn at a temperature of 4: text that never repeats; this is what drafts may cost

With random weights there is no answer to a question, so ``edit`` and ``extract`` need a real model. They end where
the answer ends; what a small model says after that repeats nothing. Both engines share one copy of the weights and
run by turns, in alternating order. A round's ratio is the tokens per second with drafts over those without; the
figure is the median over the rounds, beside the smallest and the largest. ``equal`` is the share of requests whose
tokens are the same in both. A product of five tokens may round otherwise than one of one; at a temperature of 4 the
last bit of a logit may move a draw, and in bf16 an argmax.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import gapless
from gapless.bench.environment import environment
from gapless.bench.models import SHAPES, load_once, random_model

CODE = '''class Account:
    """Money of one customer."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        self.history.append(("deposit", amount))
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
        self.history.append(("withdraw", amount))
        return self.balance
'''
ANSWERED = ("edit", "extract")
NAMES = ("Ada Lovelace", "Alan Turing", "Grace Hopper", "Edsger Dijkstra", "Barbara Liskov", "Donald Knuth")


def questions(kind: str, tokenizer: Any, count: int) -> list[list[int]]:
    """Prompts as ids; no two of them are equal."""
    prompts = []
    for i in range(count):
        if kind == "edit":
            text = f"Write this file again with `amount` renamed to `sum_{i}`:\n```python\n{CODE}```"
        else:
            lines = [f"{n}. {name} - born {1800 + 7 * n + i}, room {100 + n}" for n, name in enumerate(NAMES)]
            text = "Copy every line, as it is:\n" + "\n".join(lines)
        messages = [{"role": "user", "content": text}]
        prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    return prompts


def random_ids(count: int, vocab: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, vocab) for _ in range(length)] for _ in range(count)]


def run(llm: gapless.LLM, prompts: list[list[int]], params: Any) -> tuple[float, list[list[int]]]:
    """Tokens per second, and the tokens."""
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    wall = time.perf_counter() - start
    tokens = [o.outputs[0].token_ids for o in outputs]
    return sum(map(len, tokens)) / wall, tokens


def case(
    engines: dict[str, gapless.LLM], kind: str, batch: int, args: argparse.Namespace, tokenizer: Any, vocab: int
) -> dict[str, Any]:
    """One workload at one batch size."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    ratios, equal = [], []
    before = drafts_of(engines["drafts"])
    for index in range(args.rounds + 1):  # the first is a rehearsal
        if kind in ANSWERED:
            prompts = questions(kind, tokenizer, batch)
        else:
            prompts = random_ids(batch, vocab, args.prompt, 1000 * index + batch)
        how: dict[str, Any] = {"temperature": 4.0 if kind == "fresh" else 0.0, "ignore_eos": kind not in ANSWERED}
        if kind == "ceiling":
            how["allowed_token_ids"] = [20 + index]
        params = [gapless.SamplingParams(max_tokens=args.tokens, seed=1000 * index + i, **how) for i in range(batch)]
        found = {}
        for name in sorted(engines, reverse=index % 2 == 1):
            engines[name].reset_prefix_cache()
            rate, found[name] = run(engines[name], prompts, params)
            if index:
                rates[name].append(rate)
        if not index:
            before = drafts_of(engines["drafts"])
            continue
        ratios.append(rates["drafts"][-1] / rates["plain"][-1])
        equal += [a == b for a, b in zip(found["drafts"], found["plain"], strict=True)]
    after = drafts_of(engines["drafts"])
    steps = after["steps"] - before["steps"]
    proposed = [a - b for a, b in zip(after["proposed"], before["proposed"], strict=True)]
    accepted = [a - b for a, b in zip(after["accepted"], before["accepted"], strict=True)]
    return {
        "workload": kind,
        "batch": batch,
        "tokens_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(min(ratios), 3), round(max(ratios), 3)],
        "steps_with_drafts": steps,
        "accepted_per_step": round(sum(accepted) / steps, 3) if steps else 0.0,
        "accepted_by_place": [round(a / p, 3) if p else None for a, p in zip(accepted, proposed, strict=True)],
        "stopped": after["stopped"] - before["stopped"],
        "equal": sum(equal) / len(equal),
    }


def drafts_of(llm: gapless.LLM) -> dict[str, Any]:
    stats = llm.stats()[1].drafts
    assert stats is not None
    return {"steps": stats.steps, "proposed": list(stats.proposed), "accepted": list(stats.accepted),
            "stopped": stats.stopped}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="a folder, a name, or smollm2")
    which.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--method", default="ngram", choices=("ngram", "draft_model"))
    parser.add_argument("--draft-model")
    parser.add_argument("--drafts", type=int, default=4, metavar="K")
    parser.add_argument("--pause", type=int, default=64, help="see SpeculativeConfig")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--workloads", default=None, help="default: all that the model can do")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a random prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    device, tokenizer = torch.device(args.device), None
    if args.shape:
        half = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = random_model(args.shape, device, half if args.dtype == "auto" else getattr(torch, args.dtype))
        kinds = ["ceiling", "loop", "fresh"]
    else:
        from gapless.engine.client import find_tokenizer

        model = load_once(args.model, device, args.dtype)
        tokenizer = find_tokenizer(model, "auto")
        kinds = ["edit", "extract", "fresh"]
    kinds = args.workloads.split(",") if args.workloads else kinds
    batches = [int(b) for b in args.batches.split(",")]
    longest = min(model.config.max_position_embeddings, 1024 + args.prompt + args.tokens)
    options: dict[str, Any] = {
        "device": args.device, "pipeline_depth": args.depth, "max_num_seqs": max(batches), "max_model_len": longest,
        "num_kv_blocks": 1 + (max(batches) + 1) * -(-(longest + 16) // 16), "check_model": False,
        "max_num_batched_tokens": max(2048, max(batches) * (args.drafts + 1)),
    }  # fmt: skip
    config = gapless.SpeculativeConfig(
        method=args.method, num_speculative_tokens=args.drafts, model=args.draft_model, pause=args.pause
    )
    cases = []
    with gapless.LLM(model, **options) as plain, gapless.LLM(model, **options, speculative=config) as drafts:
        for kind in kinds:
            for batch in batches:
                cases.append(
                    case({"plain": plain, "drafts": drafts}, kind, batch, args, tokenizer, model.config.vocab_size)
                )
                print(json.dumps(cases[-1]), flush=True)
    result = {
        "environment": environment(), "model": args.model or f"{args.shape}, random weights", "method": args.method,
        "num_speculative_tokens": args.drafts, "pause": args.pause, "depth": args.depth, "new_tokens": args.tokens,
        "rounds": args.rounds, "cases": cases,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
