"""Workloads on the simulated device, for the explorer, the race detector and the mutations."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from gapless.batch.row_layout import RowLayout
from gapless.cache.groups import group_windows
from gapless.config import EngineConfig
from gapless.device.base import Device
from gapless.model.base import CausalModel
from gapless.runner.kernels import Kernels
from gapless.runner.runner import Runner
from gapless.runner.shapes import EXACT, Shapes, graph_shapes
from gapless.scheduler.scheduler import Scheduler
from proof.fast_kernels import KERNELS, FastHashModel
from proof.harness import Job, Outcome, SteppedEngine, make_request
from proof.simulated import SimulatedDevice

MODEL = FastHashModel()
MAX_UPDATES = 400  # far more than these workloads need, far less than a slot has room for otherwise
SMALL: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 8, "max_model_len": 32}


@dataclass(frozen=True)
class Workload:
    """Requests and the engine that they meet. ``jobs`` makes them afresh for each run."""

    name: str
    jobs: Callable[[], list[Job]]
    num_blocks: int | tuple[int, ...] = 9
    options: dict[str, Any] = field(default_factory=dict)
    shapes: Shapes = EXACT
    model: CausalModel = MODEL
    kernels: Kernels = KERNELS

    def but(self, **changes: Any) -> Workload:
        return replace(self, **changes)


def run_on(
    device: Device,
    workload: Workload,
    depth: int,
    *,
    runner_class: type[Runner] = Runner,
    scheduler_class: type[Scheduler] = Scheduler,
    check: bool = True,
) -> Outcome:
    """One run; blocks, rows and copies add up at its end."""
    config = EngineConfig(**{**SMALL, **workload.options})
    assert config.max_model_len is not None
    windows = group_windows(workload.model.kv_specs, config.max_model_len)
    layout = RowLayout(config.max_num_seqs, config.max_model_len, config.block_size, workload.model.vocab_size, windows)
    runner = runner_class(
        device,
        workload.model,
        layout,
        num_blocks=workload.num_blocks,
        depth=depth,
        max_num_tokens=config.max_num_batched_tokens,
        max_updates=MAX_UPDATES,
        kernels=workload.kernels,
        shapes=workload.shapes,
    )
    if workload.shapes.capture:
        runner.capture(runner.graph_keys())
    scheduler = scheduler_class(config, layout, workload.num_blocks)
    engine = SteppedEngine(workload.jobs(), scheduler, runner, depth, check)
    outcome = engine.run()
    assert all(p.available == p.capacity for p in scheduler.blocks.pools), "blocks are left behind"
    assert scheduler.rows.num_free == len(scheduler.rows.requests), "rows are left behind"
    h2d = device.copies.h2d - engine.stats.held_steps  # masks have a copy of their own
    assert h2d == device.copies.d2h == scheduler.stats.steps, "a step is one copy each way"
    return outcome


def outcome_key(outcome: Outcome) -> Hashable:
    """Tokens and reason of every request; the tokens that were streamed, and their log-probabilities."""
    ends = tuple((i, tuple(f.token_ids.tolist()), f.reason.value) for i, f in sorted(outcome.finished.items()))
    streamed = tuple((i, tuple(t)) for i, t in sorted(outcome.streamed.items()))
    return ends, (streamed, tuple((i, tuple(r)) for i, r in sorted(outcome.records.items())))


def runs(workload: Workload, depth: int, **options: Any) -> Callable[[SimulatedDevice], Hashable]:
    """For `explore_states` and `explore_races`."""
    return lambda device: outcome_key(run_on(device, workload, depth, **options))


def tokens_of(workload: Workload, depth: int = 1) -> dict[int, list[int]]:
    """In the plain order."""
    return run_on(SimulatedDevice(), workload, depth).tokens()


def oracle(job: Job, model: Any = MODEL) -> list[int]:
    """What a request gives that nobody aborts, computed without an engine."""
    request, out = job.request, list[int]()
    tokens = request.prompt_token_ids.tolist()
    while len(out) < request.max_tokens:
        out.append(model.next_token(tokens + out))
        if out[-1] in request.stop_token_ids:
            break
    return out


def agrees(workload: Workload, outcome: Outcome) -> bool:
    """Every request has the oracle's tokens; an aborted one a prefix of them."""
    for job in workload.jobs():
        end, want = outcome.finished[job.request.id], oracle(job, workload.model)
        got = end.token_ids.tolist()
        if end.reason.value == "abort":
            want = want[: len(got)]
        if got != want:
            return False
    return True


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, MODEL.vocab_size) for _ in range(length)]


def stop_after(tokens: list[int], count: int) -> int:
    """A token that ends the request after ``count`` new ones: found by the oracle."""
    request = make_request(0, tokens, count)
    return oracle(Job(request))[-1]


def random_workload(seed: int) -> Workload:
    """2 to 6 short requests from an alphabet of few blocks; tiny pools, so that they wait, resume and evict."""
    rng = random.Random(seed)
    options = {
        "max_num_seqs": rng.randint(1, 3),
        "max_num_batched_tokens": rng.choice([3, 5, 8, 16, 40]),
        "max_model_len": 40,
        "enable_prefix_caching": rng.random() < 0.7,
    }
    num_blocks = rng.choice([4, 5, 6, 7, 9, 14])
    longest = min(32, (num_blocks - 1) * 8)
    pieces = [prompt(1000 + i, 8) for i in range(3)] + [[0] * 8]
    specs: list[tuple[list[int], int, tuple[int, ...], int, int | None]] = []
    for _i in range(rng.randint(2, 6)):
        if specs and rng.random() < 0.35:  # what an earlier one may have computed and generated
            earlier = specs[rng.randrange(len(specs))][0]
            made = earlier + oracle(Job(make_request(0, earlier, 8))) * (rng.random() < 0.6)
            tokens = made[: rng.randint(1, len(made))] + [0] * rng.choice([0, 0, 1, 2])
        else:
            tokens = [token for _ in range(3) for token in rng.choice(pieces)]
            tokens = tokens[: rng.randint(1, 20)]
        tokens = tokens[: longest - 1]
        new = rng.randint(1, min(10, longest - len(tokens)))
        stop = (stop_after(tokens, rng.randint(1, new)),) if rng.random() < 0.5 else ()
        abort = rng.randint(0, 6) if rng.random() < 0.25 else None
        specs.append((tokens, new, stop, rng.choice([0, 0, 1, 2, rng.randint(0, 9)]), abort))

    def jobs() -> list[Job]:
        return [
            Job(make_request(i, tokens, new, stop=stop), at, abort)
            for i, (tokens, new, stop, at, abort) in enumerate(specs)
        ]

    seqs, budget = options["max_num_seqs"], max(options["max_num_batched_tokens"], options["max_num_seqs"])
    shapes = graph_shapes(int(seqs), int(budget), capture=False) if rng.random() < 0.3 else EXACT
    options["max_num_batched_tokens"] = budget
    return Workload(f"random {seed}", jobs, num_blocks, options, shapes)
