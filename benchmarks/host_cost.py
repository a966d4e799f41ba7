"""What the loop costs the host per step, without a device: every stream, event and kernel is a no-op.

    python benchmarks/host_cost.py --batches 1,32,256 --profile 32
    python benchmarks/host_cost.py --runs small256,nano --rounds 5
    python benchmarks/host_cost.py --runs small256,nano --pace 0.7,0.0205,0.0021

Steady decode: nothing joins, nothing leaves; with ``--drafts`` each step has drafts. With ``--runs`` whole workloads of
`gapless.bench` instead, with the threads of a real engine: prompts come in, and requests end. The figures are the
host's own work; a real device adds its driver calls. With ``--pace`` the device takes as long as that: ms for a step,
for each of its sequences and for each token of a step with prompts; so it is seen when it waits for the host.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from gapless.batch.row_layout import RowLayout
from gapless.bench.measure import measure as measure_run
from gapless.bench.measure import warm
from gapless.bench.workloads import Workload, workload
from gapless.cache.spec import KVSpec
from gapless.config import EngineConfig
from gapless.device.counts import CopyCounts
from gapless.engine.client import EngineClient
from gapless.engine.engine import Engine
from gapless.request.request import Request
from gapless.request.sampling_params import SamplingParams
from gapless.runner.graphs import Graphs
from gapless.runner.kernels import reference_kernels
from gapless.runner.keys import Key
from gapless.runner.runner import Runner
from gapless.runner.shapes import graph_shapes
from gapless.runner.slot import Slot
from gapless.scheduler.scheduler import Scheduler
from gapless.scheduler.step_builder import max_updates
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

    name, kv_specs, vocab_size, max_position = "null", (KVSpec(1, 8, 8, "float32"),), 10_240, 1 << 20
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
        slot.out_words[:] = drafts + 1  # the tokens, and how many of them are true: all
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


class PacedEvent:
    """Done when the work is that was enqueued before it."""

    def __init__(self, device: PacedDevice) -> None:
        self._device = device
        self.time = 0.0

    def record(self, stream: Any) -> None:
        self.time = max(self._device.now, self._device.busy_until)

    def wait(self, stream: Any) -> None: ...
    def synchronize(self) -> None:
        self._device.waited += max(self.time - self._device.now, 0.0)

    def elapsed_ms(self, later: PacedEvent) -> float:
        return 1e3 * (later.time - self.time)


class PacedDevice(NullDevice):
    """Does nothing, and takes its time for it: ``pace`` in ms, see the module.

    Its clock is the processor time of the loop's thread, and the time that this would have waited: so neither other
    programs nor the other threads of this one move it.
    """

    pace = (0.0, 0.0, 0.0)

    def __init__(self) -> None:
        super().__init__()
        self.busy_until = self.waited = 0.0

    @property
    def now(self) -> float:
        return time.thread_time() + self.waited

    def event(self, *, timing: bool = False) -> Any:
        return PacedEvent(self)

    def run(self, key: Key) -> None:
        """A part of a step."""
        if key.part == "forward":
            step, seq, token = self.pace
            ms = step + (seq * key.num_seqs if key.decode_only else token * key.num_tokens)
            self.busy_until = max(self.now, self.busy_until) + 1e-3 * ms


class PacedGraphs(Graphs):
    """Launches everything as if it had been captured."""

    def launch(self, key: Key, slot: Slot) -> None:
        device: Any = self.device
        device.run(key)


class Laps:
    """Collects the processor time of each turn of the loop, without its wait, by what the turn had to do: start
    prompts or go on with them, end requests, or neither."""

    def __init__(self, client: EngineClient) -> None:
        self._stats = client._scheduler.stats
        self._rows = client.config.max_num_seqs
        self._turn = self._mark = 0.0
        self._before = (0, 0, 0)
        self.turns: dict[str, list[float]] = defaultdict(list)

    def __call__(self, phase: str, start: float, end: float) -> None:
        now = time.thread_time()
        if phase not in ("wait", "idle"):
            self._turn += now - self._mark
        self._mark = now
        if phase == "publish":
            counts = self._stats.steps, self._stats.tokens_computed, self._stats.requests_finished
            steps, computed, finished = (now - before for now, before in zip(counts, self._before, strict=True))
            kind = "prompts" if computed > self._rows * steps else "ends" if finished else "decode"
            self.turns[kind].append(1e3 * self._turn)
            self._turn, self._before = 0.0, counts


def measure_whole(load: Workload, depth: int, rounds: int, profile: bool) -> dict[str, Any]:
    """Whole runs with the threads of a real engine; the least of all rounds, each figure by itself.

    Processor time of the loop's thread and of the process, of the run alone and one before it for its prompts (see
    `gapless.bench.measure`); for each kind of turn how many, and the mean and the longest, ms. Every round has the
    same turns, so that of each the shortest counts.
    """
    config = EngineConfig(
        device="cpu", pipeline_depth=depth, max_num_seqs=load.batch, max_model_len=load.longest,
        num_kv_blocks=load.batch * -(-load.longest // 16) + 1,
    )  # fmt: skip
    shapes = graph_shapes(config.max_num_seqs, config.max_num_batched_tokens, capture=False)
    with contextlib.ExitStack() as patches:
        build = "engine.build."
        parts = {f"{build}CpuDevice": PacedDevice, f"{build}EXACT": shapes, "runner.runner.Graphs": PacedGraphs}
        for name, value in parts.items():
            patches.enter_context(mock.patch(f"gapless.{name}", value))
        client = EngineClient(NullModel(), config, tokenizer=None)
    engine: Any = client._engine
    found: list[dict[str, float]] = []
    turns: dict[str, list[list[float]]] = defaultdict(list)
    try:
        warm(client, load)
        for i in range(rounds):
            laps = engine.observer = Laps(client)
            profiler = cProfile.Profile()
            if profile:
                engine.call(profiler.enable)
            loop, every = engine.call(time.thread_time), time.process_time()
            figures = measure_run(client, load, salt=10 * i)
            loop, every = engine.call(time.thread_time) - loop, time.process_time() - every
            if profile:
                engine.call(profiler.disable)
            row = {"steps": figures.steps, "loop_cpu_s": loop, "all_cpu_s": every}
            for kind, times in laps.turns.items():
                turns[kind].append(times)
            if any(PacedDevice.pace):
                row["idle_ms"] = 1e3 * (figures.idle_s or 0.0)
                row["busy_missing_%"] = 100 * (1 - (figures.step_busy or 0.0))
            found.append(row)
    finally:
        engine.observer = None
        client.close()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    best: dict[str, Any] = {"run": load.name, "depth": depth, **{k: min(row[k] for row in found) for k in found[0]}}
    for kind, several in sorted(turns.items()):
        times = np.min(several, axis=0)
        best |= {f"{kind}_turns": len(times), f"{kind}_ms": float(times.mean()), f"{kind}_max": float(times.max())}
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", default="1,32,128,256,512")
    parser.add_argument("--contexts", default="128")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--drafts", type=int, default=0, help="of each row and step, all of them accepted")
    parser.add_argument("--profile", type=int, default=None, help="print a profile of this batch size; with --runs 1")
    parser.add_argument("--runs", default="", help="workloads by name, instead of steady decode")
    parser.add_argument("--rounds", type=int, default=3, help="of each run; the best one counts")
    parser.add_argument("--depth", type=int, default=2, help="of each run")
    parser.add_argument("--pace", default="0,0,0", help="ms for a step, its sequence, a token of a step with prompts")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

    step, seq, token = map(float, args.pace.split(","))
    PacedDevice.pace = (step, seq, token)
    for name in filter(None, args.runs.split(",")):
        show(measure_whole(workload(name), args.depth, args.rounds, bool(args.profile)))
    for context in map(int, args.contexts.split(",")):
        for batch in () if args.runs else map(int, args.batches.split(",")):
            show(measure(batch, args.steps, context, batch == args.profile, args.drafts))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
