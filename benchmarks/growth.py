"""How time grows with requests, layers and context, against the law that it should follow.

    python benchmarks/growth.py --out benchmarks/results/growth.json
    python benchmarks/growth.py --shape tiny --device cpu --requests 1,2,4 --layers 1,2,4 --contexts 64,128,256 --new 8
    python benchmarks/plots.py

requests   1 to 512 of them. A decode step reads the weights once and each request's cache: a + b n.
layers     1 to 80 of a narrow model. A step takes a + b n; what the host does per step does not depend on n: a.
context    1k to 128k tokens of one request. A decode step reads them all: a + b n. The prompt as a whole takes
           a + b n + c n^2: products of every token, and attention of every pair.

A law is fitted with factors that are not negative, by least squares of the relative error; printed and kept is how
far the worst point lies from it. The law of a decode step is fitted where the device is busy for at least 90 % of the
time: few layers take less than the host needs for a step, and then the host's time is what is measured. Steps are
decode steps: the prompts are in the prefix cache when they are timed, but for the prompt's own time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gapless.bench.environment import environment
from gapless.bench.measure import run_once
from gapless.bench.models import SHAPES, random_model
from gapless.bench.sweep import Subject, free
from gapless.bench.workloads import Workload, uniform
from gapless.engine.client import EngineClient
from gapless.engine.stats import PHASES

POWERS = {"a": 0, "a + b n": 1, "a + b n + c n^2": 2}
LAWS = {
    "requests": {"decode_ms": "a + b n", "host_ms": "a + b n"},
    "layers": {"decode_ms": "a + b n", "host_ms": "a"},
    "context": {"decode_ms": "a + b n", "prompt_s": "a + b n + c n^2"},
}
BUSY = 0.9
NARROW = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 64, "vocab_size": 10_240}  # fmt: skip


def fit(n: Sequence[float], y: Sequence[float], law: str) -> dict[str, Any]:
    """The law's factors, and the largest deviation of a point from it, as a share of the law's value.

    Of all subsets of the terms, the best whose factors are not negative: exact, and small enough to be tried out.
    """
    x, values = np.array(n, float), np.array(y, float)
    best: tuple[float, dict[int, float]] | None = None
    terms = range(POWERS[law] + 1)
    for size in range(1, len(terms) + 1):
        for chosen in itertools.combinations(terms, size):
            table = np.stack([x**power for power in chosen], 1)
            factors = np.linalg.lstsq(table / values[:, None], np.ones_like(values), rcond=None)[0]
            error = float(np.sum((table @ factors / values - 1) ** 2))
            if (factors >= 0).all() and (best is None or error < best[0] - 1e-12):
                best = (error, dict(zip(chosen, factors.tolist(), strict=True)))
    assert best is not None  # a constant alone always fits somehow
    factors_of = {letter: best[1].get(power, 0.0) for power, letter in enumerate("abc"[: len(terms)])}
    expected = sum(factor * x**power for power, factor in best[1].items())
    return {"law": law, **factors_of, "worst": float(np.max(np.abs(values / expected - 1)))}


def point(client: EngineClient, load: Workload, repeats: int) -> dict[str, float]:
    """A point of a curve: the prompt's time; decode steps by the difference of two runs whose prompts are cached."""
    prompt_s = run_once(client, load, 0, new_tokens=1).wall_s
    best: dict[str, float] = {}
    for _ in range(repeats):
        first = run_once(client, load, 0, new_tokens=1).wall_s
        stats = client.stats()[0]
        before = dataclasses.replace(stats, host=dict(stats.host))
        wall = run_once(client, load, 0).wall_s
        after = client.stats()[0]
        steps, busy = after.steps - before.steps, after.busy - before.busy
        host = sum(after.host[p] - before.host[p] for p in PHASES if p != "wait")
        decode = max(1e3 * (wall - first) / (load.output_lens[0] - 1), 1e-6)  # noise may be larger than a tiny run
        if not best or decode < best["decode_ms"]:
            best = {
                "decode_ms": decode,
                "host_ms": 1e3 * host / steps,
                "step_busy": busy / (busy + after.idle_host - before.idle_host),
            }
    return {**best, "prompt_s": prompt_s}


def curve(name: str, points: list[dict[str, float]]) -> dict[str, Any]:
    """Points with the laws that belong to them, printed."""
    laws = {}
    for key, law in LAWS[name].items():
        chosen = points
        if key == "decode_ms":  # a law of the device: not where it waits for the host
            chosen = [p for p in points if p["step_busy"] >= BUSY] or points
        laws[key] = {**fit([p["n"] for p in chosen], [p[key] for p in chosen], law), "from": chosen[0]["n"]}
        factors = "  ".join(f"{k} {v:.4g}" for k, v in laws[key].items() if k in "abc")
        print(f"{name}: {key} = {law} from {chosen[0]['n']}: {factors}; the worst point is "
              f"{100 * laws[key]['worst']:.1f} % off", flush=True)  # fmt: skip
    return {"points": points, "laws": laws}


def measured(n: int, client: EngineClient, load: Workload, repeats: int, name: str) -> dict[str, float]:
    """A point, printed."""
    row = {"n": n, **point(client, load, repeats)}
    print(f"{name} {n}: " + "  ".join(f"{k} {v:.4f}" for k, v in row.items() if k != "n"), flush=True)
    return row


def several(subject: Subject, loads: dict[int, Workload], args: argparse.Namespace, name: str) -> dict[str, Any]:
    """A curve over workloads on one engine. None finds the prompts of another in the prefix cache."""
    loads = {n: dataclasses.replace(load, seed=n) for n, load in loads.items()}
    options = dict(subject.options)
    subject.options["max_num_seqs"] = max(load.batch for load in loads.values())
    try:
        with subject.engine(list(loads.values()), args.depth) as client:
            run_once(client, next(iter(loads.values())), 9, new_tokens=2)
            return curve(name, [measured(n, client, load, args.repeats, name) for n, load in loads.items()])
    finally:
        subject.options = options


def layers(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A model and an engine for each number of layers."""
    points = []
    load = uniform("layers", args.layer_requests, 64, args.new)
    for n in args.layers:
        model = random_model("tiny", device, dtype, **NARROW, num_hidden_layers=n)
        with Subject(model, f"{n} layers", device).engine([load], args.depth) as client:
            run_once(client, load, 9)
            points.append(measured(n, client, load, args.repeats, "layers"))
        del model
        free()
    return curve("layers", points)


def curves(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those that were asked for; what would begin after the time is over is left out."""
    begin = time.monotonic()
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    if "layers" in args.curves:
        yield "layers", layers(args, device, dtype)
    if not {"requests", "context"} & set(args.curves):
        return
    subject = Subject(random_model(args.shape, device, dtype), args.shape, device)
    longest = subject.model.config.max_position_embeddings - args.new
    if "requests" in args.curves and time.monotonic() - begin < args.seconds:
        loads = {n: uniform(f"{n} requests", n, args.prompt_len, args.new) for n in args.requests}
        yield "requests", several(subject, loads, args, "requests")
    if "context" in args.curves and time.monotonic() - begin < args.seconds:
        loads = {n: uniform(f"{n} tokens", 1, min(n, longest), args.new) for n in args.contexts}
        loads = {n: load for n, load in loads.items() if n - args.new <= longest}
        yield "context", several(subject, loads, args, "context")


def numbers(text: str) -> list[int]:
    """``1,2,4``, in order and without repetition."""
    return sorted({int(word) for word in text.split(",")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b", help="of requests and context")
    parser.add_argument("--curves", default="requests,layers,context", type=lambda text: text.split(","))
    parser.add_argument("--requests", type=numbers, default=numbers("1,2,4,8,16,32,64,128,256,512"))
    parser.add_argument("--layers", type=numbers, default=numbers("1,2,5,10,20,40,80"))
    parser.add_argument("--contexts", type=numbers, default=numbers("1024,4096,16384,32768,65536,131072"))
    parser.add_argument("--prompt-len", type=int, default=256, help="of the curve over requests")
    parser.add_argument("--layer-requests", type=int, default=8)
    parser.add_argument("--new", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2, help="the quickest counts")
    parser.add_argument("--seconds", type=float, default=400.0, help="begin no curve after that")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default=None, help="default: bfloat16; float32 on a CPU")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if unknown := set(args.curves) - set(LAWS):
        parser.error(f"--curves {', '.join(sorted(unknown))} is not allowed: {', '.join(LAWS)}")
    if args.new < 2:
        parser.error("--new must be at least 2")
    result: dict[str, Any] = {"environment": environment(), "shape": args.shape, "depth": args.depth, "curves": {}}
    for name, found in curves(args):
        result["curves"][name] = found
        if args.out:  # what is there is kept if a later curve fails
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
