"""What each call of a launch costs the host, in steps that go on unchanged.

    python benchmarks/launch_cost.py --shape llama-8b --batch 32
    python benchmarks/launch_cost.py --shape llama-8b --batch 32 --no-dependent-launch

The engine runs with a clock around each call of its device, which costs some 0.2 us a call itself; then a replay of its
graphs, and ways to enqueue a copy and an event, are timed alone while the device has other work. Microseconds, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gapless
from gapless.bench.environment import environment
from gapless.bench.models import SHAPES, random_model
from gapless.device.cuda import CudaDevice, CudaEvent
from gapless.device.dependent_launch import OFF
from gapless.model.run.few_tokens import FewTokens
from gapless.runner.graphs import Graphs
from gapless.runner.slot import Slot

STEPS = 300


class Clock:
    """Times calls by name, from the loop's thread only."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    def wrap(self, owner: type, name: str, label: Callable[..., str]) -> None:
        """Put a clock around a method."""
        method = getattr(owner, name)

        def timed(this: Any, *args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = method(this, *args, **options)
            self.times[label(*args)].append(time.perf_counter() - start)
            return result

        setattr(owner, name, timed)

    def report(self, steps: int) -> dict[str, dict[str, float]]:
        """Of each name: calls a step, median of a call and mean of a step in us."""
        return {
            name: {
                "calls": round(len(times) / steps, 2),
                "median_us": round(1e6 * statistics.median(times), 2),
                "us_per_step": round(1e6 * sum(times) / steps, 2),
            }
            for name, times in self.times.items()
        }


def watched() -> Clock:
    """A clock around all that a launch and a wait call."""
    clock = Clock()
    clock.wrap(Slot, "fill", lambda *args: "fill the slot")
    clock.wrap(Slot, "read", lambda *args: "read the tokens")
    clock.wrap(CudaDevice, "copy_h2d", lambda *args: "copy h2d")
    clock.wrap(CudaDevice, "copy_d2h", lambda *args: "copy d2h")
    clock.wrap(CudaEvent, "record", lambda *args: "record")
    clock.wrap(CudaEvent, "wait", lambda *args: "wait on a stream")
    clock.wrap(CudaEvent, "elapsed_ms", lambda *args: "elapsed")
    clock.wrap(Graphs, "launch", lambda key, slot: f"graph {key.part}")
    return clock


def host_us(call: Callable[[], Any], rounds: int = 200) -> float:
    """Median of a call while the device is busy with something else. Every eight calls it may catch up."""
    busy = torch.empty(1 << 26, device="cuda")
    times = []
    for i in range(rounds):
        if i % 8 == 0:
            torch.cuda.synchronize()
            for _ in range(20):
                busy.add_(1)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return round(1e6 * statistics.median(times), 2)


def alone(runner: Any) -> dict[str, float]:
    """Calls by themselves. On the loop's thread, with no step in flight."""
    found = {}
    steps = [key for (index, key) in runner.graphs.captured if index == 0 and (key.part == "sample" or key.decode_only)]
    for part in ("forward", "sample"):
        key = max((key for key in steps if key.part == part), key=lambda key: key.num_tokens)
        found[f"replay of {part}, {key.num_tokens} tokens"] = host_us(runner.graphs.captured[0, key])
    small = torch.zeros(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for _ in range(250):
        small.add_(1)
    graph.capture_end()
    found["replay of 250 small kernels"] = host_us(graph.replay)

    device = runner.device
    src, dst = torch.zeros(256, dtype=torch.int32, pin_memory=True), torch.zeros(256, dtype=torch.int32, device="cuda")
    found["copy h2d, as the device does"] = host_us(lambda: device.copy_h2d(dst, src, "h2d"))
    found["copy, on the current stream"] = host_us(lambda: dst.copy_(src, non_blocking=True))

    def switched() -> None:
        torch.cuda.set_stream(device.h2d)
        dst.copy_(src, non_blocking=True)
        torch.cuda.set_stream(device.compute)

    found["copy, with set_stream"] = host_us(switched)
    event, timing = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)
    found["record"] = host_us(lambda: event.record(device.compute))
    found["record with timing"] = host_us(lambda: timing.record(device.compute))
    found["record, class of torch._C"] = host_us(lambda: torch._C._CudaEventBase.record(event, device.compute))
    found["wait_event"] = host_us(lambda: device.d2h.wait_event(event))
    found["wait, class of torch._C"] = host_us(lambda: torch._C._CudaEventBase.wait(event, device.d2h))
    try:
        from cuda.bindings import runtime
    except ImportError:
        return found
    kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
    to, at, n, stream = dst.data_ptr(), src.data_ptr(), src.nbytes, device.h2d.cuda_stream
    found["copy, cuda.bindings"] = host_us(lambda: runtime.cudaMemcpyAsync(to, at, n, kind, stream))
    raw, its = event.cuda_event, device.compute.cuda_stream
    found["record, cuda.bindings"] = host_us(lambda: runtime.cudaEventRecord(raw, its))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--no-dependent-launch", action="store_true", help="graphs without programmatic edges")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.no_dependent_launch:
        assert FewTokens.__init__.__kwdefaults__ is not None
        FewTokens.__init__.__kwdefaults__["pdl"] = OFF
    model = random_model(args.shape, torch.device("cuda"), torch.bfloat16)
    prompts = [{"prompt_token_ids": [10 + i] * 128} for i in range(args.batch)]
    params = gapless.SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    options: dict[str, Any] = {"max_num_seqs": args.batch, "max_model_len": 1024, "check_model": False}
    result: dict[str, Any] = {"environment": environment(), **vars(args), "out": None}
    with gapless.LLM(model, device="cuda", **options) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        before = llm.stats()[0]
        steps, host = before.steps, dict(before.host)
        llm.generate(prompts, params, use_tqdm=False)
        after = llm.stats()[0]
        steps = after.steps - steps
        result["phases_us"] = {name: round(1e6 * (after.host[name] - host[name]) / steps, 1) for name in host}
        print(json.dumps(result["phases_us"]), flush=True)
        engine: Any = llm._client._engine
        result["alone_us"] = engine.call(lambda: alone(engine._runner))
        print(json.dumps(result["alone_us"], indent=1), flush=True)
        clock = watched()
        steps = llm.stats()[0].steps
        llm.generate(prompts, params, use_tqdm=False)
        result["calls"] = clock.report(llm.stats()[0].steps - steps)
        print(json.dumps(result["calls"], indent=1), flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
