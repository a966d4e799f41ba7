"""What the loop costs the host per step, without a device: every stream, event and kernel is a no-op.

    python benchmarks/host_cost.py --batches 1,32,256 --profile 32

Steady decode: nothing joins, nothing leaves; with ``--drafts`` each step has drafts. The figures are the host's own
work; a real device adds its driver calls.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gapless.config import EngineConfig
from gapless.device.counts import CopyCounts
from gapless.engine import Engine
from gapless.kv.spec import KVSpec
from gapless.pipeline.kernels import reference_kernels
from gapless.pipeline.runner import Runner
from gapless.pipeline.shapes import graph_shapes
from gapless.plan import RowLayout
from gapless.request import Request, SamplingParams
from gapless.scheduler import Scheduler, max_updates
from gapless.speculative.make import make_speculation
from gapless.speculative_config import SpeculativeConfig


class NullEvent:
    """Always done."""

    def record(self, stream: Any) -> None: ...
    def wait(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_ms(self, later: Any) -> float:
        return 0.0


class NullDevice:
    """Takes work and does none of it."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.copies = CopyCounts()
        self.closed = False
        self.h2d = self.compute = self.d2h = None

    def event(self, *, timing: bool = False) -> NullEvent:
        return NullEvent()

    def host_buffer(self, num_bytes: int, name: str) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def copy_h2d(self, *args: Any) -> None: ...
    def copy_d2h(self, *args: Any) -> None: ...
    def launch(self, *args: Any) -> None: ...
    def capture(self, work: Any) -> Any:
        return work

    def host_access(self, *access: Any) -> Any:
        return contextlib.nullcontext()

    thread_context = host_access

    def synchronize(self) -> None: ...
    def close(self) -> None: ...


class NullModel:
    """Has a shape and nothing else."""

    name, kv_specs, vocab_size, max_position = "null", (KVSpec(1, 8, 8, "float32"),), 100, 1 << 20
    eos_token_ids, weight_bytes, dtype, device = (), 0, torch.float32, torch.device("cpu")

    def forward(self, *args: Any) -> None: ...


def measure(batch: int, steps: int, context: int, profile: bool, drafts: int = 0) -> dict[str, float]:
    """Milliseconds per step of each phase."""
    # None ends while it is measured: the first requests decode already while the last ones' prompts are computed.
    apart = batch * context // 4096 + 60
    steps_of = (drafts + 1) * (steps + 100 + apart)
    config = EngineConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=max(8192, batch),
        max_model_len=context + steps_of,
        speculative=SpeculativeConfig(num_speculative_tokens=drafts) if drafts else None,
    )
    assert config.max_model_len is not None
    layout = RowLayout(batch, config.max_model_len + drafts, 16)
    blocks = batch * layout.max_blocks + 1
    runner: Any = Runner(
        NullDevice(),  # type: ignore[arg-type]
        NullModel(),  # type: ignore[arg-type]
        layout,
        num_blocks=blocks,
        depth=2,
        max_num_tokens=config.max_num_batched_tokens,
        max_updates=max_updates(config, layout),
        kernels=reference_kernels(),
        shapes=graph_shapes(batch, config.max_num_batched_tokens),
        speculation=make_speculation(config.speculative, print, on_gpu=False) if config.speculative else None,
    )
    for slot in runner._ring.slots if drafts else ():
        slot._out_words[:] = drafts + 1  # the tokens, and how many of them are true: all
    for key in runner.graph_keys():
        for slot in runner._ring.slots:
            runner.graphs.captured[slot.index, key] = lambda: None
    scheduler = Scheduler(config, layout, blocks)
    engine = Engine(scheduler, runner, 2, lambda message: None, print)
    most = steps_of - 100
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    rng = np.random.default_rng(0)
    for i in range(batch):
        prompt = rng.integers(0, 100, context, dtype=np.int32)
        scheduler.add(Request(i, prompt, params, most, (), i, False))
    flying: deque[Any] = deque()

    def turn() -> None:
        while len(flying) < 2 and (plan := engine._schedule()) is not None:
            flying.append(engine._launch(plan))
        result = engine._wait(*flying.popleft())
        engine._receive(block=False)
        engine._commit(result)
        engine._publish()

    while (scheduler.rows.total[:batch] < context + 40).any():
        turn()
    before = dict(engine.stats.host)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    start = time.thread_time()
    for _ in range(steps):
        turn()
    wall = time.thread_time() - start
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    phases = {k: 1e3 * (v - before[k]) / steps for k, v in engine.stats.host.items()}
    return {"batch": batch, "context": context, "total_ms": 1e3 * wall / steps, **phases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", default="1,32,128,256,512")
    parser.add_argument("--contexts", default="128")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--drafts", type=int, default=0, help="of each row and step, all of them accepted")
    parser.add_argument("--profile", type=int, default=None, help="print a profile of this batch size")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    rows = []
    for context in map(int, args.contexts.split(",")):
        for batch in map(int, args.batches.split(",")):
            row = measure(batch, args.steps, context, batch == args.profile, args.drafts)
            rows.append(row)
            print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
