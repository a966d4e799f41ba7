"""Steps of a run, one by one, against replays of the same graphs with nothing in between.

    python benchmarks/steps.py --shape llama-8b --workload mid,long

For each workload: how long the device was busy in each step, by its own events, in the order of the run; then the last
step's graphs replayed back to back, forward alone and with the sampler. Whatever a step takes beyond its replay is the
pipeline's; whatever both take is the kernels'.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import gapless
from gapless.batch.row_params import covering
from gapless.bench.environment import environment
from gapless.bench.measure import run_once, warm
from gapless.bench.models import SHAPES, random_model
from gapless.bench.workloads import Workload, workload
from gapless.engine.engine import Engine
from gapless.runner.keys import Key
from gapless.runner.runner import Runner


class Recorder:
    """Keeps what each step of an engine took."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[tuple[int, int, int, float, float, float]] = []
        self._runner: Any = engine._runner
        wait = self._runner.wait

        def recording(step: Any) -> Any:
            result = wait(step)
            plan = result.plan
            longest = int((plan.starts + plan.query_lens).max())
            host = 1e3 * engine.stats.host_work
            self.steps.append((plan.num_tokens, plan.num_seqs, longest, result.busy_ms, result.idle_ms, host))
            self.last = plan
            return result

        self._runner.wait = recording

    def stop(self) -> list[tuple[int, int, int, float, float, float]]:
        """Of each step: tokens, sequences, longest context, ms busy, ms idle before; ms of the host so far."""
        del self._runner.wait
        return self.steps


def replays(runner: Runner, plan: Any, count: int = 50) -> dict[str, float]:
    """ms per replay of the plan's graphs. Runs on the loop's thread, with no step in flight."""
    t, s = runner._shapes.pad(plan)
    keys = (Key("forward", t, s, plan.decode_only), Key("sample", s, s, False, covering(plan.features)))
    graphs = [runner.graphs.captured[plan.step % len(runner._ring.slots), key] for key in keys]
    times = {}
    for name, work in (("forward", graphs[:1]), ("forward and sample", graphs)):
        for graph in work:
            graph()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            for graph in work:
                graph()
        end.record()
        end.synchronize()
        times[name] = start.elapsed_time(end) / count
        alone = []
        for _ in range(10):  # as a benchmark of kernels would, the device idle in between
            start.record()
            for graph in work:
                graph()
            end.record()
            end.synchronize()
            alone.append(start.elapsed_time(end))
        times[f"{name}, one by one"] = statistics.median(alone)
    return times


def record(llm: gapless.LLM, load: Workload, verbose: bool) -> dict[str, Any]:
    """Run the workload once with one new token and once in full, then replay its last step."""
    client, report = llm._client, {}
    engine: Any = client._engine
    warm(client, load)
    walls = {}
    for new_tokens in (1, None):
        recorder = Recorder(engine)
        walls[new_tokens] = run_once(client, load, salt=3 + (new_tokens or 0), new_tokens=new_tokens).wall_s
        steps = recorder.stop()
        full = [s for s in steps if s[0] == s[1] == load.batch]
        print(f"\n{load.name}, {new_tokens or 'all'} new tokens: wall {walls[new_tokens]:.3f} s, {len(steps)} steps")
        print(f"  busy {sum(s[3] for s in steps) / 1e3:.4f} s, idle {sum(s[4] for s in steps[1:]) / 1e3:.4f} s")
        others = [s for s in steps if not s[0] == s[1] == load.batch]
        print(f"  other than full decode: {len(others)} steps, busy {sum(s[3] for s in others) / 1e3:.4f} s")
        for t, s, context, busy, idle, _ in others[: 40 if verbose else 0]:
            print(f"  {t:6} tokens {s:4} sequences, context {context:6}: busy {busy:8.3f} idle {idle:.4f} ms")
        eighth = max(1, len(full) // 8)
        for i in range(0, len(full), eighth):
            part = full[i : i + eighth]
            busy = [p[3] for p in part]
            host = (part[-1][5] - part[0][5]) / max(1, len(part) - 1)
            print(
                f"  decode, context {part[0][2]:6} to {part[-1][2]:6}: busy median {statistics.median(busy):.3f} "
                f"min {min(busy):.3f} max {max(busy):.3f}, idle {1e3 * statistics.mean(p[4] for p in part):.1f} us, "
                f"host {host:.3f} ms"
            )
        report[f"{new_tokens or 'all'} new tokens"] = {"wall_s": walls[new_tokens], "steps": steps}
    print(f"  decode {1e3 * (walls[None] - walls[1]) / (load.output_lens[0] - 1):.3f} ms/step by wall")
    last = full[-1]
    if engine._runner.graphs.captured:
        report["replays"] = engine.call(lambda: replays(engine._runner, recorder.last))
    print(f"  a full step at context {last[2]} took {last[3]:.3f} ms; the last step replayed: {report.get('replays')}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--workload", default="mid,long")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--block-sizes", default="16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = random_model(args.shape, torch.device(args.device), torch.bfloat16)
    loads = [workload(name) for name in args.workload.split(",")]
    longest = max(max(load.prompt_lens) + max(load.output_lens) for load in loads)
    report: dict[str, Any] = {"environment": environment(), "shape": args.shape, "depth": args.depth}
    for size in map(int, args.block_sizes.split(",")):
        options = {"max_num_seqs": max(len(load.prompt_lens) for load in loads), "max_model_len": longest}
        print(f"\n===== block_size {size}")
        options |= {"block_size": size, "pipeline_depth": args.depth, "check_model": False}
        with gapless.LLM(model, device=args.device, **options) as llm:
            report[f"blocks of {size}"] = {load.name: record(llm, load, args.verbose) for load in loads}
    if args.out:
        args.out.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
