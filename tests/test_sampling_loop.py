"""Penalties, masks and log-probabilities through the whole loop: any depth gives what a plain loop over lists gives."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from gapless.batch.row_layout import Record
from proof.harness import Job, Outcome, SteppedEngine, make_parts, make_request, run_jobs
from proof.hash_model import EOS, HashModel, sequence_hash
from test_sampling_process import brute, expected_record

VOCAB = 61


def request(i: int, prompt: list[int], max_tokens: int, **params: Any) -> Any:
    made = make_request(i, prompt, max_tokens, stop=(EOS,), **params)
    made.bad_words = tuple(tuple(w) for w in params.get("bad_words", ()))
    return made


def truth(model: HashModel, job: Job) -> list[int]:
    """Greedy, in float64, over plain lists."""
    made, tokens = job.request, job.request.prompt_token_ids.tolist()
    n = len(tokens)
    while len(tokens) < n + made.max_tokens and (len(tokens) == n or tokens[-1] not in made.stop_token_ids):
        x = brute(model.logits(sequence_hash(tokens)).double().numpy(), made, tokens)
        if len(tokens) - n < made.params.min_tokens:
            x[list(made.stop_token_ids)] = -np.inf
        tokens.append(int(x.argmax()))
    return tokens[n:]


def random_params(rng: random.Random) -> dict[str, Any]:
    def ids(n: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(n)]

    every = {
        "repetition_penalty": rng.choice([1.3, 0.7]),
        "presence_penalty": rng.uniform(-1, 2),
        "frequency_penalty": rng.uniform(-1, 2),
        "logit_bias": {t: rng.uniform(-3, 3) for t in ids(4)},
        "allowed_token_ids": ids(12),
        "bad_words": [ids(1), ids(2), ids(2), ids(3)],
        "logprobs": rng.choice([0, 3]),
    }
    return {k: v for k, v in every.items() if rng.random() < 0.35}


def workload(seed: int, *, greedy: bool) -> list[Job]:
    rng = random.Random(seed)
    shared = [rng.randrange(2, VOCAB) for _ in range(30)]
    jobs = []
    for i in range(8):
        params: dict[str, Any] = random_params(rng)
        if not greedy and rng.random() < 0.6:
            params |= {"temperature": rng.choice([0.7, 1.2]), "top_k": rng.choice([0, 5]), "seed": i}
        prompt = shared[: rng.choice([0, 16, 30])] + [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 20))]
        n = rng.randint(1, 25)
        made = request(i, prompt, n, **params, min_tokens=rng.choice([0, min(3, n)]))
        jobs.append(Job(made, rng.choice([0, rng.randint(0, 15)])))
    return jobs


@pytest.mark.parametrize("seed", range(8))
def test_greedy_rows_equal_a_plain_loop_at_every_depth(seed: int) -> None:
    model = HashModel(VOCAB, peaked=False)
    rng = random.Random(seed)
    options = {
        "num_blocks": rng.choice([17, 200]),
        "max_num_batched_tokens": rng.choice([6, 32]),
        "enable_prefix_caching": seed % 4 != 0,
    }
    expected = {job.request.id: truth(model, job) for job in workload(seed, greedy=True)}
    for depth in (1, 2, 4):
        assert run_jobs(workload(seed, greedy=True), model, depth=depth, **options).tokens() == expected


@pytest.mark.parametrize("seed", range(8))
def test_depths_agree_with_everything_mixed(seed: int) -> None:
    model = HashModel(VOCAB, peaked=False)
    options = {"num_blocks": random.Random(seed).choice([17, 200])}
    results = [
        run_jobs(workload(seed, greedy=False), model, depth=depth, delays=delays, **options).tokens()
        for depth, delays in ((1, None), (2, None), (4, None), (3, seed))
    ]
    assert results[1:] == results[:1] * 3


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_repetition_penalty_counts_the_token_in_flight(depth: int) -> None:
    """The named pitfall: a penalty of 1.3 at depth 1 against depth 2, in a steady batch."""
    model = HashModel(VOCAB, peaked=False)

    def jobs() -> list[Job]:
        return [Job(request(i, [5 + i, 9], 40, repetition_penalty=1.3, frequency_penalty=0.5)) for i in range(3)]

    expected = {job.request.id: truth(model, job) for job in jobs()}
    assert run_jobs(jobs(), model, depth=depth).tokens() == expected
    plain = [Job(request(i, [5 + i, 9], 40)) for i in range(3)]
    assert run_jobs(plain, model, depth=depth).tokens() != expected


def test_a_prefix_hit_brings_the_prompt_that_the_penalty_reads() -> None:
    """The second request's prompt is in the cache, but its row's tokens are not on the device until they are sent."""
    model = HashModel(VOCAB, peaked=False)
    prompt = [2 + i % 50 for i in range(64)]

    def jobs() -> list[Job]:
        return [
            Job(request(0, prompt, 3)),
            Job(request(1, [*prompt, 4], 20, repetition_penalty=3.0), at_step=10),
            Job(request(2, [*prompt, 5], 20, repetition_penalty=3.0), at_step=10),
        ]

    device_outcome = run_jobs(jobs(), model, depth=2, max_num_batched_tokens=64)
    assert device_outcome.tokens() == {job.request.id: truth(model, job) for job in jobs()}
    starts = [plan.starts for plan in device_outcome.plans if len(plan.updates) > 60]
    assert any((s == 64).any() for s in starts)  # a hit of all eight blocks, with its tokens among the updates


@pytest.mark.parametrize("one_token", [False, True])
def test_masks_that_do_not_fit_into_one_step_wait_for_the_next(one_token: bool) -> None:
    """Each mask of this vocabulary takes 1,250 updates, and a step has room for a few requests with everything."""
    model = HashModel(40_000, peaked=False)
    everything = {
        "logit_bias": dict.fromkeys(range(1024), 1.0),
        "bad_words": [[i] * 8 for i in range(2, 128)],
    }

    def jobs() -> list[Job]:
        prompt = [3] if one_token else [3, 4]
        return [Job(request(i, prompt, 12, allowed_token_ids=[7 + i, 50 + i], **everything)) for i in range(8)]

    outcome = run_jobs(jobs(), model, depth=2, max_num_seqs=8, max_num_batched_tokens=8)
    for i, tokens in outcome.tokens().items():
        assert set(tokens) <= {7 + i, 50 + i}
    assert outcome.steps <= 12 + 4


class NaNModel(HashModel):
    """NaN logits once the sequence holds ``poison``."""

    poison = 60

    def forward(self, input_ids: Any, positions: Any, context: Any, logits_index: Any, out: torch.Tensor) -> None:
        super().forward(input_ids, positions, context, logits_index, out)
        for s, last in enumerate(logits_index.tolist()):
            if input_ids[last] == self.poison:
                out[s, 3] = float("nan")


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_rows_of_nan_end_alone(depth: int) -> None:
    model = NaNModel(VOCAB, peaked=False)

    def jobs(last: int) -> list[Job]:
        made = [Job(request(i, [4 + i, 5], 20, allowed_token_ids=[8, 9, 10])) for i in range(3)]
        return [*made, Job(request(3, [7, last], 20, allowed_token_ids=[8, 9])), Job(request(4, [7], 9, logprobs=2))]

    good, bad = (run_jobs(jobs(last), model, depth=depth, max_num_seqs=5) for last in (59, 60))
    assert bad.finished[3].reason.value == "error"
    assert "NaN" in str(bad.finished[3].error)
    assert bad.tokens()[3] == []
    assert {i: t for i, t in bad.tokens().items() if i != 3} == {i: t for i, t in good.tokens().items() if i != 3}
    assert all(f.reason.value != "error" for i, f in bad.finished.items() if i != 3)


class RecordingEngine(SteppedEngine):
    def _take(self, message: Any) -> None:
        for i, id in enumerate(message.ids.tolist()):
            if message.records is not None:
                self.records.setdefault(id, []).append(message.records[i])
        super()._take(message)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("depth", [1, 3])
def test_logprobs_of_every_token(depth: int, mode: str) -> None:
    from gapless.device.cpu import CpuDevice

    model = HashModel(VOCAB, peaked=False)
    device = CpuDevice(debug=depth == 1)
    scheduler, runner = make_parts(model, device, depth=depth, logprobs_mode=mode)
    params = {"repetition_penalty": 1.5, "logit_bias": {4: 2.0}}
    jobs = [Job(request(i, [3 + i, 9, 9], 15, **params, **({"logprobs": 4} if i else {}))) for i in range(3)]
    jobs.append(Job(request(3, [8] * 40, 3), at_step=5))
    engine = RecordingEngine(jobs, scheduler, runner, depth, check=True)
    engine.records: dict[int, list[Any]] = {}  # type: ignore[misc]
    outcome: Outcome = engine.run()
    assert device.copies.d2h == scheduler.stats.steps
    for job in jobs[1:3]:
        i, tokens = job.request.id, job.request.prompt_token_ids.tolist()
        assert len(engine.records[i]) == len(outcome.tokens()[i])
        for token, record in zip(outcome.tokens()[i], engine.records[i], strict=True):
            x = model.logits(sequence_hash(tokens)).double().numpy()
            if mode == "processed_logprobs":
                x = brute(x, job.request, tokens)
            chosen, rank, ids, values = expected_record(x, token, 4)
            floats = record.view(np.float32)
            assert (record[Record.RANK], record[Record.IDS :][:4].tolist()) == (rank, ids)
            np.testing.assert_allclose(floats[Record.LOGPROB], chosen, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(floats[Record.LOGPROBS :][:4], values, rtol=1e-4, atol=1e-5)
            tokens.append(token)


def test_steps_without_logprobs_copy_tokens_only() -> None:
    from gapless.device.cpu import CpuDevice

    model = HashModel(VOCAB)
    sizes = []
    for params in ({}, {"logprobs": 0}):
        device = CpuDevice()
        scheduler, runner = make_parts(model, device, depth=2)
        SteppedEngine([Job(request(0, [3], 10, **params))], scheduler, runner, 2, check=True).run()
        sizes.append(device.copies.d2h_bytes / scheduler.stats.steps)
    assert sizes == [4, 4 * (1 + Record.COUNT)]


def prompt_jobs(seed: int) -> list[Job]:
    rng = random.Random(seed)
    jobs = []
    for i in range(6):
        shared = [2 + j % 40 for j in range(rng.choice([0, 16, 24]))]
        prompt = shared + [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 12))]
        made = request(i, prompt, rng.randint(1, 10), **({"logprobs": 2} if rng.random() < 0.3 else {}))
        made.prompt_logprobs = rng.choice([None, 0, 3, 3])
        jobs.append(Job(made, rng.choice([0, rng.randint(0, 8)])))
    return jobs


class PromptEngine(SteppedEngine):
    def _take(self, message: Any) -> None:
        if message.prompts is not None:
            p = message.prompts
            for id, position, words in zip(p.ids.tolist(), p.positions.tolist(), p.records, strict=True):
                self.scores.setdefault(id, []).append((position, words))
        super()._take(message)


def check_scores(model: HashModel, jobs: list[Job], all_scores: dict[int, list[Any]]) -> None:
    """Each token of a prompt but the first has the log-probabilities of the model, once and in order."""
    for job in jobs:
        made, prompt = job.request, job.request.prompt_token_ids.tolist()
        scores = all_scores.get(made.id, [])
        if made.prompt_logprobs is None:
            assert not scores
            continue
        assert [position for position, _ in scores] == list(range(1, len(prompt)))
        for position, words in scores:
            x = model.logits(sequence_hash(prompt[:position])).double().numpy()
            chosen, rank, ids, values = expected_record(x, prompt[position], made.prompt_logprobs)
            floats = words.view(np.float32)
            assert (words[Record.RANK], words[Record.IDS :][: len(ids)].tolist()) == (rank, ids)
            np.testing.assert_allclose(floats[Record.LOGPROB], chosen, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(floats[Record.LOGPROBS :][: len(ids)], values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [1, 3])
def test_logprobs_of_prompts(seed: int, depth: int) -> None:
    """Each token of the prompt but the first, once and in order, whatever else runs; and nothing else changes."""
    from gapless.device.cpu import CpuDevice

    model = HashModel(VOCAB, peaked=False)
    rng = random.Random(seed)
    device = CpuDevice(debug=seed == 0)
    options = {"num_blocks": rng.choice([17, 100]), "max_num_batched_tokens": rng.choice([6, 32])}
    options["logprobs_mode"] = rng.choice(["raw_logprobs", "processed_logprobs"])
    scheduler, runner = make_parts(model, device, depth=depth, **options)
    jobs = prompt_jobs(seed)
    engine = PromptEngine(list(jobs), scheduler, runner, depth, check=True)
    engine.scores: dict[int, list[Any]] = {}  # type: ignore[misc]
    outcome = engine.run()
    assert outcome.tokens() == {job.request.id: truth(model, job) for job in jobs}
    assert scheduler.pool.available == scheduler.pool.capacity
    assert all(plan.num_seqs <= 4 for plan in outcome.plans)
    check_scores(model, jobs, engine.scores)


@pytest.mark.parametrize("budget", [4, 32])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_prompt_that_is_preempted_while_it_is_scored(depth: int, budget: int) -> None:
    """Older requests grow into its blocks; what was scored is not told twice, and nothing is left out."""
    from gapless.device.cpu import CpuDevice

    model = HashModel(VOCAB, peaked=False)
    jobs = [Job(request(i, [3 + i, 9, 9], 37)) for i in range(2)]
    for i in (2, 3):
        scored = request(i, [(7 * i + 5 * j) % 50 + 2 for j in range(40)], 4, **({"logprobs": 1} if i == 2 else {}))
        scored.prompt_logprobs = 3
        jobs.append(Job(scored, at_step=3 * i))
    scheduler, runner = make_parts(
        model, CpuDevice(), depth=depth, num_blocks=12, max_num_batched_tokens=budget, enable_prefix_caching=False
    )
    engine = PromptEngine(list(jobs), scheduler, runner, depth, check=True)
    engine.scores: dict[int, list[Any]] = {}  # type: ignore[misc]
    half_scored = 0

    def preempt(row: int, builder: Any) -> None:
        nonlocal half_scored
        rows = scheduler.rows
        half_scored += bool(0 < rows.scored[row] < rows.to_score[row])
        wrapped(row, builder)

    wrapped, scheduler.states.preempt = scheduler.states.preempt, preempt  # type: ignore[method-assign]
    outcome = engine.run()
    assert half_scored, "nothing was preempted while it was scored"
    assert outcome.tokens() == {job.request.id: truth(model, job) for job in jobs}
    check_scores(model, jobs, engine.scores)
