"""Measuring a workload on an engine: whole runs by the wall clock, the device's share by its own events."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from gapless.bench.workloads import Workload
from gapless.engine import PHASES, EngineStats
from gapless.llm import LLM


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run of a workload gave. Times in the unit of their name.

    ``decode_ms_per_step``: (wall of the run - wall of the same run with one new token) / (new tokens - 1), for uniform
    workloads. ``step_busy``: the device's share of busy time between the first and the last step of the run,
    by events around each step. ``host_ms_per_step``: all phases of the loop but the wait.
    """

    workload: str
    depth: int
    wall_s: float
    output_tokens: int
    steps: int
    prefill_s: float | None
    decode_ms_per_step: float | None
    step_busy: float
    host_ms_per_step: float
    host_ms_by_phase: dict[str, float]
    preemptions: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the whole run's seconds."""
        return self.output_tokens / self.wall_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a result file."""
        return {**asdict(self), "tokens_per_s": self.tokens_per_s}


def run_once(llm: LLM, workload: Workload, salt: int, new_tokens: int | None = None) -> tuple[float, int]:
    """Seconds and output tokens of one run."""
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": p} for p in workload.prompts(salt)]
    params = workload.params(new_tokens)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall = time.perf_counter() - start
    return wall, sum(len(o.outputs[0].token_ids) for o in outputs)


def measure(llm: LLM, workload: Workload, *, salt: int = 0) -> Figures:
    """Run the workload; for a uniform one, first with one new token each, to tell prefill from decode."""
    prefill = None
    if workload.uniform:
        prefill, _ = run_once(llm, workload, salt + 1, new_tokens=1)
    before, before_scheduler = _copy(llm.stats()[0]), llm.stats()[1].preemptions
    wall, tokens = run_once(llm, workload, salt)
    after, scheduler = llm.stats()
    steps = after.steps - before.steps
    busy, idle = after.busy - before.busy, after.idle_host - before.idle_host
    phases = {p: 1e3 * (after.host[p] - before.host[p]) / steps for p in PHASES}
    decode = None
    if prefill is not None and workload.output_lens[0] > 1:
        decode = 1e3 * (wall - prefill) / (workload.output_lens[0] - 1)
    return Figures(
        workload=workload.name,
        depth=llm.config.pipeline_depth,
        wall_s=wall,
        output_tokens=tokens,
        steps=steps,
        prefill_s=prefill,
        decode_ms_per_step=decode,
        step_busy=busy / (busy + idle),
        host_ms_per_step=sum(ms for phase, ms in phases.items() if phase != "wait"),
        host_ms_by_phase=phases,
        preemptions=scheduler.preemptions - before_scheduler,
    )


def _copy(stats: EngineStats) -> EngineStats:
    return replace(stats, host=dict(stats.host))
