"""Requests that arrive one by one while others run: prompts and decodes in the same steps, at several depths.

    python benchmarks/mixed_load.py --out benchmarks/results/mixed_load.json     # 512 + 256 tokens, 8 a second, 60 s
    python benchmarks/mixed_load.py --shape tiny --device cpu --seconds 3 --prompt-len 32 --output-len 16 --rate 4
    python benchmarks/plots.py

Every token is handed out as it comes, as to a client that streams. Of each depth: step-busy while there is work, by
events around each step; time to the first token, from the arrival; time between tokens, over all gaps of all requests.
The arrivals are the same at every depth.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import queue
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gapless.bench.environment import environment
from gapless.bench.measure import warm
from gapless.bench.models import SHAPES, random_model
from gapless.bench.sweep import Subject
from gapless.bench.workloads import Workload, uniform
from gapless.engine.client import EngineClient, Submission
from gapless.engine.stats import PHASES
from gapless.errors import EngineDeadError

PERCENTILES = (50, 90, 99)
WARM_REQUESTS = 8


def arrivals(kind: str, rate: float, seconds: float, seed: int = 0) -> list[float]:
    """Seconds from the start at which requests come: evenly, or as independent callers do."""
    if kind == "even":
        return [i / rate for i in range(int(rate * seconds))]
    rng, now, times = random.Random(seed), 0.0, []
    while (now := now + rng.expovariate(rate)) < seconds:
        times.append(now)
    return times


def percentiles(values: list[float]) -> dict[str, float] | None:
    """In milliseconds, of seconds."""
    if not values:
        return None
    found = np.percentile(np.array(values) * 1e3, PERCENTILES)
    return {f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}


@dataclasses.dataclass(slots=True)
class Stream:
    """What a client sees of one request: when it was due, and when each token came."""

    due: float
    times: list[float] = dataclasses.field(default_factory=list)


def run(client: EngineClient, load: Workload, times: list[float]) -> dict[str, Any]:
    """One run; its figures."""
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    streams: list[Stream] = []
    submissions = []
    start = time.perf_counter() + 0.05

    def receiver(stream: Stream) -> Any:
        def take(output: Any) -> None:
            stream.times += [time.perf_counter()] * len(output.outputs[0].token_ids)
            if output.finished:
                done.put(None)

        return take

    for prompt, params, due in zip(load.prompts(), load.params(), times, strict=True):
        streams.append(Stream(start + due))
        encoded = client.encode({"prompt_token_ids": prompt})
        submissions.append(Submission(encoded, params, receiver(streams[-1]), done.put, mode="delta"))
    before = dataclasses.replace(client.stats()[0], host=dict(client.stats()[0].host))
    preempted, late, most = client.stats()[1].preemptions, 0.0, 0
    for stream, submission in zip(streams, submissions, strict=True):
        time.sleep(max(0.0, stream.due - time.perf_counter()))
        late = max(late, time.perf_counter() - stream.due)
        client.submit([submission])
        most = max(most, client.stats()[1].running)
    for _ in streams:
        if (error := done.get()) is not None:
            raise EngineDeadError(f"a request did not end: {error!r}") from error
    wall = max(s.times[-1] for s in streams) - start
    after, scheduler = client.stats()
    steps, busy = after.steps - before.steps, after.busy - before.busy
    idle = {cause: seconds - before.idle[cause] for cause, seconds in after.idle.items()}
    no_work = idle.pop("no_work")
    host = {phase: 1e3 * (after.host[phase] - before.host[phase]) / steps for phase in PHASES}
    gaps = [b - a for s in streams for a, b in zip(s.times, s.times[1:], strict=False)]
    tokens = sum(len(s.times) for s in streams)
    return {
        "depth": client.config.pipeline_depth,
        "requests": len(streams),
        "output_tokens": tokens,
        "wall_s": wall,
        "tokens_per_s": tokens / wall,
        "steps": steps,
        "step_busy": busy / (busy + sum(idle.values())),
        "busy_s": busy,
        "idle_s": idle,
        "no_work_s": no_work,
        "most_running": most,
        "preemptions": scheduler.preemptions - preempted,
        "latest_arrival_ms": 1e3 * late,
        "host_ms_per_step": sum(ms for phase, ms in host.items() if phase != "wait"),
        "ttft_ms": percentiles([s.times[0] - s.due for s in streams]),
        "itl_ms": percentiles(gaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="in which they arrive")
    parser.add_argument("--arrivals", choices=("poisson", "even"), default="poisson")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--depths", default="1,2,3")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="of a step; prompts are cut to it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default=None, help="default: bfloat16; float32 on a CPU")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()

    device = torch.device(args.device)
    dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    options = {"max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": args.max_num_batched_tokens}
    subject = Subject(random_model(args.shape, device, getattr(torch, dtype)), args.shape, device, options)
    times = arrivals(args.arrivals, args.rate, args.seconds, args.seed)
    if not times:
        parser.error("no request arrives: raise --rate or --seconds")
    load = uniform("mixed", len(times), args.prompt_len, args.output_len)
    print(f"{len(times)} requests of {args.prompt_len} + {args.output_len} tokens, {args.rate:g} a second, "
          f"{args.arrivals}, seed {args.seed}")  # fmt: skip
    rows = []
    for depth in map(int, args.depths.split(",")):
        with subject.engine([load], depth) as client:
            warm(client, uniform("warm", min(WARM_REQUESTS, args.max_num_seqs), args.prompt_len, args.output_len))
            row = run(client, load, times)
        rows.append({"shape": args.shape, **row})
        print(
            f"depth {depth}: step-busy {100 * row['step_busy']:.2f} %  {row['tokens_per_s']:.0f} tokens/s  "
            + "  ".join(
                f"{name} " + " / ".join(f"{row[key][f'p{p}']:.2f}" for p in PERCENTILES) + " ms"
                for name, key in (("first token", "ttft_ms"), ("between tokens", "itl_ms"))
            )
            + f"  host {row['host_ms_per_step']:.3f} ms/step  at most {row['most_running']} running",
            flush=True,
        )
    if args.out:
        asked = {k: v for k, v in vars(args).items() if k != "out"}
        args.out.write_text(json.dumps({"environment": environment(), "load": asked, "figures": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
