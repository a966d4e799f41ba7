"""Workloads placed by step, and an engine that runs them on the calling thread."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gapless.batch.plan import SeqFlag, StepPlan
from gapless.batch.row_layout import RowLayout
from gapless.cache.groups import group_windows
from gapless.config import EngineConfig
from gapless.device.base import Device
from gapless.device.cpu import CpuDevice
from gapless.engine.engine import Engine
from gapless.lora.bank import AdapterBank
from gapless.model.base import CausalModel
from gapless.request.messages import Finished, StepMessage
from gapless.request.outputs import FinishReason
from gapless.request.request import Request
from gapless.request.sampling_params import SamplingParams
from gapless.runner.kernels import reference_kernels
from gapless.runner.runner import Runner
from gapless.runner.shapes import EXACT, Shapes
from gapless.scheduler.scheduler import Scheduler
from gapless.scheduler.stats import SchedulerStats
from gapless.scheduler.step_builder import max_updates
from gapless.speculative.base import Speculation
from gapless.speculative.make import make_speculation


@dataclass
class Job:
    """A request that arrives once ``at_step`` steps are committed, and is aborted ``abort_after`` steps later."""

    request: Request
    at_step: int = 0
    abort_after: int | None = None


@dataclass
class Outcome:
    finished: dict[int, Finished] = field(default_factory=dict)
    streamed: dict[int, list[int]] = field(default_factory=dict)
    steps: int = 0
    plans: list[StepPlan] = field(default_factory=list)
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    records: dict[int, list[bytes]] = field(default_factory=dict)

    def tokens(self) -> dict[int, list[int]]:
        return {i: f.token_ids.tolist() for i, f in sorted(self.finished.items())}


def make_request(
    request_id: int,
    prompt: list[int],
    max_tokens: int,
    *,
    stop: tuple[int, ...] = (),
    streaming: bool = True,
    **params: object,
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0, **params})  # type: ignore[arg-type]
    seed = sampling.seed if sampling.seed is not None else request_id * 7919 + 1
    return Request(
        id=request_id,
        prompt_token_ids=np.array(prompt, np.int32),
        params=sampling,
        max_tokens=max_tokens,
        stop_token_ids=stop,
        seed=seed,
        streaming=streaming,
    )


class SteppedEngine(Engine):
    """The real loop, run by the caller; arrivals and aborts happen at given steps instead of at given times."""

    def __init__(
        self, jobs: list[Job], scheduler: Scheduler, runner: Runner, depth: int, check: bool
    ) -> None:
        self.outcome = Outcome()
        super().__init__(scheduler, runner, depth, self._take, lambda error: None, check=check)
        self._jobs = sorted(jobs, key=lambda job: job.at_step)
        self._aborts = [(j.at_step + j.abort_after, j.request.id) for j in jobs if j.abort_after is not None]
        self._left = {job.request.id for job in jobs}

    def _take(self, message: StepMessage) -> None:
        for i, token in zip(message.ids.tolist(), message.tokens.tolist(), strict=True):
            assert i not in self.outcome.finished, "a token after the end"
            self.outcome.streamed.setdefault(i, []).append(token)
        if message.records is not None:
            for i, record in zip(message.ids.tolist(), message.records, strict=True):
                self.outcome.records.setdefault(i, []).append(record.tobytes())
        for f in message.finished:
            assert f.id not in self.outcome.finished, "a second end"
            self.outcome.finished[f.id] = f
            self._left.discard(f.id)

    def _launch(self, plan: StepPlan) -> Any:
        self.outcome.plans.append(plan)
        return super()._launch(plan)

    def _receive(self, block: bool) -> None:
        self.outcome.steps += not block
        now = self.outcome.steps
        if block and not self.scheduler.has_requests and self._jobs:
            now = max(now, self._jobs[0].at_step)
            self.outcome.steps = now
        while self._jobs and self._jobs[0].at_step <= now:
            self.scheduler.add(self._jobs.pop(0).request)
        for at, request_id in [a for a in self._aborts if a[0] <= now]:
            self._aborts.remove((at, request_id))
            self.scheduler.finish(request_id, FinishReason.ABORT)
        if block and not self.scheduler.has_requests and not self._jobs:
            self._running = False

    def run(self) -> Outcome:
        try:
            self._loop()
        finally:
            self._runner.close()
        assert not self._left
        return self.outcome


def make_parts(
    model: CausalModel,
    device: Device,
    *,
    depth: int,
    num_blocks: int | tuple[int, ...] = 200,
    groups: bool = True,
    adapters: AdapterBank | None = None,
    speculation: Speculation | None = None,
    shapes: Shapes = EXACT,
    **options: object,
) -> tuple[Scheduler, Runner]:
    """Without ``groups`` all layers share one block table, and windows only mask."""
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8, "max_model_len": 128}
    config = EngineConfig(**{**defaults, **options})  # type: ignore[arg-type]
    assert config.max_model_len is not None
    windows = group_windows(model.kv_specs, config.max_model_len) if groups else (None,)
    longest = config.max_model_len + config.num_drafts
    layout = RowLayout(config.max_num_seqs, longest, config.block_size, model.vocab_size, windows)
    if speculation is None and config.speculative is not None:
        speculation = make_speculation(config.speculative, reference_kernels().sample, on_gpu=False)
    runner = Runner(
        device,
        model,
        layout,
        num_blocks=num_blocks,
        depth=depth,
        max_num_tokens=config.max_num_batched_tokens,
        max_updates=max_updates(config, layout),
        kernels=reference_kernels(),
        shapes=shapes,
        processed_logprobs=config.logprobs_mode == "processed_logprobs",
        adapters=adapters,
        speculation=speculation,
    )
    return Scheduler(config, layout, num_blocks), runner


def run_jobs(
    jobs: list[Job],
    model: CausalModel,
    *,
    depth: int,
    delays: int | None = None,
    debug: bool = False,
    num_blocks: int | tuple[int, ...] = 200,
    speculation: Speculation | None = None,
    shapes: Shapes = EXACT,
    **options: Any,
) -> Outcome:
    device = CpuDevice(delays=delays, max_delay=0.001, debug=debug)
    scheduler, runner = make_parts(
        model, device, depth=depth, num_blocks=num_blocks, speculation=speculation, shapes=shapes, **options
    )
    if shapes.capture:
        runner.capture(runner.graph_keys())
    engine = SteppedEngine(jobs, scheduler, runner, depth, check=True)
    outcome = engine.run()
    outcome.stats = scheduler.stats
    assert all(pool.available == pool.capacity for pool in scheduler.blocks.pools)
    assert scheduler.rows.num_free == len(scheduler.rows.requests)
    steps = scheduler.stats.steps
    assert device.copies.h2d == steps + engine.stats.held_steps  # masks have a copy of their own
    assert device.copies.d2h == steps
    assert engine.stats.copies.waits == engine.stats.steps == steps, "the loop waits once a step"
    assert (engine.stats.busy_prompts > 0) == any(map(computes_prompts, outcome.plans))
    assert engine.stats.busy_prompts <= engine.stats.busy
    return outcome


def computes_prompts(plan: StepPlan) -> bool:
    """Some sequence, drafts aside, has several tokens or scores."""
    several = (plan.query_lens > 1) & ~plan.having(SeqFlag.DRAFTS)
    return bool((plan.having(SeqFlag.SCORES) | several).any())


def random_options(rng: random.Random, *, fewest_blocks: int = 17) -> dict[str, object]:
    """Of an engine: few rows, budgets that cut prompts, and pools from one that is always short."""
    return {
        "max_num_seqs": rng.randint(1, 5),
        "max_num_batched_tokens": rng.choice([5, 8, 17, 64]),
        "num_blocks": rng.choice([fewest_blocks, 30, 200]),
        "enable_prefix_caching": rng.random() < 0.7,
    }


def random_jobs(
    rng: random.Random,
    vocab_size: int,
    *,
    eos: int,
    count: int | None = None,
    aborts: bool = False,
    longest: int = 60,
) -> list[Job]:
    """Random lengths, arrivals, stops, shared prefixes and sampling parameters."""
    shared = [rng.randrange(2, vocab_size) for _ in range(40)]
    jobs = []
    for i in range(count or rng.randint(3, 10)):
        n = rng.randint(1, longest)
        prompt = [rng.randrange(2, vocab_size) for _ in range(n)]
        if rng.random() < 0.5:
            k = min(rng.randint(1, 40), n)
            prompt[:k] = shared[:k]
        max_tokens = rng.choice([1, 2, 3, rng.randint(1, 40)])
        params: dict[str, Any] = {}
        if rng.random() < 0.4:
            params = {
                "temperature": rng.choice([0.7, 1, 1.5]),
                "top_k": rng.choice([0, 3, 20]),
                "top_p": rng.choice([1.0, 0.8]),
                "min_p": rng.choice([0.0, 0.05]),
            }
        params["min_tokens"] = rng.choice([0, 0, min(3, max_tokens)])
        stop = (eos,) if rng.random() < 0.8 else ()
        abort_after = rng.randint(0, 12) if aborts and rng.random() < 0.4 else None
        request = make_request(i, prompt, max_tokens, stop=stop, **params)
        jobs.append(Job(request, rng.choice([0, 0, rng.randint(0, 20)]), abort_after))
    return jobs
