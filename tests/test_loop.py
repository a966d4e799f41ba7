"""Any depth gives the tokens of depth 1, on the hash model, where a single wrong read shows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gapless.batch.plan import SeqFlag
from gapless.device.cpu import CpuDevice
from gapless.engine.engine import Engine
from proof.harness import Job, make_parts, make_request, random_jobs, random_options, run_jobs
from proof.hash_model import EOS, HashModel


def greedy(model: HashModel, job: Job) -> list[int]:
    """What the request must give, computed without an engine."""
    request, out = job.request, []
    tokens = request.prompt_token_ids.tolist()
    while len(out) < request.max_tokens:
        out.append(model.next_token(tokens + out))
        if out[-1] in request.stop_token_ids:
            break
    return out


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_greedy_tokens_are_those_of_the_hash(depth: int) -> None:
    model = HashModel()
    jobs = [Job(make_request(i, list(range(2, 5 + 7 * i)), 20, stop=(EOS,)), at_step=2 * i) for i in range(6)]
    outcome = run_jobs(jobs, model, depth=depth)
    assert outcome.tokens() == {job.request.id: greedy(model, job) for job in jobs}
    assert outcome.streamed == outcome.tokens()


@pytest.mark.parametrize("seed", range(25))
def test_depths_agree_on_random_workloads(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = HashModel(peaked=rng.random() < 0.5)
    options: dict[str, Any] = random_options(rng)

    def run(depth: int, delays: int | None = None) -> dict[int, list[int]]:
        jobs = random_jobs(random.Random(seed), model.vocab_size, eos=EOS)
        return run_jobs(jobs, model, depth=depth, delays=delays, **options).tokens()

    truth = run(1)
    for depth in (2, 3, 4):
        assert run(depth) == truth
    assert run(rng.choice([2, 3]), delays=seed) == truth


@pytest.mark.parametrize("seed", range(15))
def test_an_aborted_request_is_a_prefix(seed: int) -> None:
    print(f"seed {seed}")
    model = HashModel()
    options = {"max_num_batched_tokens": random.Random(seed).choice([7, 32]), "num_blocks": 30}

    def jobs(aborts: bool) -> list[Job]:
        made = random_jobs(random.Random(seed), model.vocab_size, eos=EOS, aborts=True)
        return made if aborts else [Job(j.request, j.at_step) for j in made]

    truth = run_jobs(jobs(False), model, depth=1, **options).tokens()
    for depth in (1, 2, 3):
        outcome = run_jobs(jobs(True), model, depth=depth, **options)
        for i, tokens in outcome.tokens().items():
            if outcome.finished[i].reason.value == "abort":
                assert tokens == truth[i][: len(tokens)]
            else:
                assert tokens == truth[i]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_pool_of_17_blocks_gives_the_tokens_of_a_large_one(depth: int) -> None:
    model = HashModel()

    def jobs() -> list[Job]:
        return [Job(make_request(i, [2 + i] * 20, 60)) for i in range(32)]

    large = run_jobs(jobs(), model, depth=1, num_blocks=1000, max_num_seqs=32)
    small = run_jobs(jobs(), model, depth=depth, num_blocks=17, max_num_seqs=32)
    assert small.tokens() == large.tokens()
    assert sum(f.num_preemptions for f in small.finished.values()) > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_undeclared_is_touched(depth: int) -> None:
    model = HashModel()
    jobs = random_jobs(random.Random(7), model.vocab_size, eos=EOS, count=4)
    truth = run_jobs(random_jobs(random.Random(7), model.vocab_size, eos=EOS, count=4), model, depth=1)
    assert run_jobs(jobs, model, depth=depth, debug=True).tokens() == truth.tokens()


def test_a_prompt_that_is_scored_counts_as_a_prompt() -> None:
    """Its sequences are of one token each, as those of a decode step are; `run_jobs` looks at the counters."""
    request = make_request(0, [2, 3, 4, 5, 6], 1)
    request.prompt_logprobs = 1
    outcome = run_jobs([Job(request)], HashModel(), depth=2)
    assert all(plan.decode_only for plan in outcome.plans)
    assert any(plan.having(SeqFlag.SCORES).any() for plan in outcome.plans)


def test_a_second_error_in_the_inbox_does_not_keep_the_memory() -> None:
    """What is left there when the loop ends is run, so that nobody waits; whatever it raises, the runner is closed."""
    device, died = CpuDevice(), list[BaseException]()
    scheduler, runner = make_parts(HashModel(), device, depth=2)
    engine = Engine(scheduler, runner, 2, lambda message: None, died.append)
    engine.fail(ValueError("first"))
    engine.fail(ValueError("second"))
    engine.start()
    engine._thread.join(30)
    assert [str(error) for error in died] == ["first"]
    assert device.closed
