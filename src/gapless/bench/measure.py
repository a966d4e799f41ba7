"""Measuring a workload on an engine: whole runs by the wall clock, the device's share by its own events."""

from __future__ import annotations

import queue
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from gapless.bench.workloads import Workload
from gapless.engine.client import EngineClient, Submission
from gapless.engine.stats import PHASES, EngineStats
from gapless.errors import EngineDeadError
from gapless.request.outputs import RequestOutput

WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run of a workload gave. Times in the unit of their name.

    Attributes:
        engine: whose: ``gapless`` or a peer's name.
        decode_ms_per_step: (wall of the run - wall of the same run with one new token) / (new tokens - 1), for uniform
            workloads that arrive at once.
        mean_ms_per_step: wall / steps.
        step_busy: the device's share of busy time between the first and the last step of the run, by events around
            each step.
        idle_s: the rest of it: the device waited for the host.
        host_ms_per_step: all phases of the loop but the wait.
        host_hidden_ms_per_step: of these, what cost nothing, because the device was busy meanwhile.
        ttft_ms, tpot_ms: time to the first token, and between tokens after it: median and 99th percentile.
    """

    workload: str
    depth: int
    wall_s: float
    output_tokens: int
    steps: int
    prefill_s: float | None = None
    decode_ms_per_step: float | None = None
    mean_ms_per_step: float | None = None
    step_busy: float | None = None
    idle_s: float | None = None
    host_ms_per_step: float | None = None
    host_hidden_ms_per_step: float | None = None
    host_ms_by_phase: dict[str, float] | None = None
    preemptions: int = 0
    ttft_ms: tuple[float, float] | None = None
    tpot_ms: tuple[float, float] | None = None
    engine: str = "gapless"

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the whole run's seconds."""
        return self.output_tokens / self.wall_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a result file."""
        return {**asdict(self), "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True, slots=True)
class Run:
    """One run: seconds from the first submission to the last result, and the results."""

    wall_s: float
    outputs: list[RequestOutput]

    @property
    def tokens(self) -> int:
        """New tokens in all."""
        return sum(len(o.outputs[0].token_ids) for o in self.outputs)


def run_once(client: EngineClient, workload: Workload, salt: int, new_tokens: int | None = None) -> Run:
    """Hand the requests in at their times, and wait for all results."""
    done: queue.SimpleQueue[RequestOutput | BaseException] = queue.SimpleQueue()
    encoded = [client.encode({"prompt_token_ids": p}) for p in workload.prompts(salt)]
    params = workload.params(new_tokens)
    submissions = [Submission(e, p, done.put, done.put) for e, p in zip(encoded, params, strict=True)]
    start = time.perf_counter()
    if workload.rate is None:
        client.submit(submissions)
    else:
        for submission, at in zip(submissions, workload.arrivals(), strict=True):
            time.sleep(max(0.0, start + at - time.perf_counter()))
            client.submit([submission])
    outputs = []
    for _ in submissions:
        output = done.get()
        if isinstance(output, BaseException):
            raise EngineDeadError(f"the run did not end: {output!r}") from output
        outputs.append(output)
    return Run(time.perf_counter() - start, outputs)


def warm(client: EngineClient, workload: Workload) -> None:
    """A short run, untimed."""
    run_once(client, replace(workload.limited(WARM_TOKENS), rate=None), salt=100)


def measure(client: EngineClient, workload: Workload, *, salt: int = 0) -> Figures:
    """Run the workload; for a uniform one, first with one new token each, to tell prefill from decode."""
    prefill = None
    if workload.uniform and workload.rate is None:
        prefill = run_once(client, workload, salt + 1, new_tokens=1).wall_s
    before, before_scheduler = _copy(client.stats()[0]), client.stats()[1].preemptions
    run = run_once(client, workload, salt)
    after, scheduler = client.stats()
    steps = after.steps - before.steps
    busy, idle = after.busy - before.busy, after.idle_host - before.idle_host
    phases = {p: 1e3 * (after.host[p] - before.host[p]) / steps for p in PHASES}
    host = sum(ms for phase, ms in phases.items() if phase != "wait")
    decode = None
    if prefill is not None and workload.output_lens[0] > 1:
        decode = 1e3 * (run.wall_s - prefill) / (workload.output_lens[0] - 1)
    ttft, tpot = latencies(run.outputs)
    return Figures(
        workload=workload.name,
        depth=client.config.pipeline_depth,
        wall_s=run.wall_s,
        output_tokens=run.tokens,
        steps=steps,
        prefill_s=prefill,
        decode_ms_per_step=decode,
        mean_ms_per_step=1e3 * run.wall_s / steps,
        step_busy=busy / (busy + idle),
        idle_s=idle,
        host_ms_per_step=host,
        host_hidden_ms_per_step=max(host - 1e3 * idle / steps, 0.0),
        host_ms_by_phase=phases,
        preemptions=scheduler.preemptions - before_scheduler,
        ttft_ms=ttft,
        tpot_ms=tpot,
    )


def latencies(outputs: list[RequestOutput]) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Time to the first token, and per token after it: median and 99th percentile, ms."""
    first, rest = [], []
    for output in outputs:
        m = output.metrics
        if m is None or m.first_token_time is None or m.finished_time is None:
            continue
        first.append(1e3 * (m.first_token_time - m.arrival_time))
        count = len(output.outputs[0].token_ids)
        if count > 1:
            rest.append(1e3 * (m.finished_time - m.first_token_time) / (count - 1))
    return _percentiles(first), _percentiles(rest)


def _percentiles(values: list[float]) -> tuple[float, float] | None:
    if not values:
        return None
    median, high = np.percentile(values, [50, 99])
    return float(median), float(high)


def _copy(stats: EngineStats) -> EngineStats:
    return replace(stats, host=dict(stats.host))
