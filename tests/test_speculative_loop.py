"""Drafts change no token: any depth, any drafts, any parameters give what a run without drafts gives."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from drafts import oracle
from gapless.batch.plan import SeqFlag
from gapless.request.outputs import FinishReason
from gapless.runner.shapes import graph_shapes
from gapless.speculative_config import SpeculativeConfig
from proof.choosers import RandomChooser
from proof.harness import Job, Outcome, SteppedEngine, make_parts, make_request, random_jobs, random_options, run_jobs
from proof.hash_model import EOS, HashModel
from proof.races import RaceDetector
from proof.simulated import SimulatedDevice

ALWAYS: dict[str, Any] = {"min_accepted": 0}


def with_drafts(
    jobs: list[Job], model: Any, truth: Outcome, k: int, seed: int, *, depth: int, **options: Any
) -> Outcome:
    """The same jobs with an oracle's drafts, spoilt at random places."""
    whole = [[*job.request.prompt_token_ids.tolist(), *truth.tokens()[job.request.id]] for job in jobs]
    config = SpeculativeConfig(num_speculative_tokens=k, **{**ALWAYS, **options.pop("config", {})})
    outcome = run_jobs(
        jobs, model, depth=depth, speculative=config, speculation=oracle(whole, k, seed, model.vocab_size), **options
    )
    plans: list[Any] = outcome.plans
    for p in plans:
        bounded = p.query_width > 1 and (p.having(SeqFlag.DRAFTS) | (p.query_lens == 1)).all()
        assert p.max_query_len == (p.query_width if bounded else None), "also if repeated"
    return outcome


def varied_jobs(seed: int, model: HashModel, **options: Any) -> list[Job]:
    """Random jobs; some have penalties, bad words, or take no drafts."""
    rng = random.Random(seed)
    jobs = random_jobs(rng, model.vocab_size, eos=EOS, **options)
    for job in jobs:
        p = job.request.params
        if rng.random() < 0.3:
            object.__setattr__(p, "frequency_penalty", rng.choice([0.5, 1.5]))
            object.__setattr__(p, "repetition_penalty", rng.choice([1.0, 1.3]))
        if rng.random() < 0.2:
            object.__setattr__(p, "logprobs", 2)
        if rng.random() < 0.2:
            a, b, c = (rng.randrange(model.vocab_size) for _ in range(3))
            job.request.bad_words = ((a,), (b, c))
        if rng.random() < 0.2:
            object.__setattr__(p, "speculative", False)
    return jobs


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("k", [1, 4])
def test_every_acceptance_length_gives_the_same_tokens(depth: int, k: int) -> None:
    model = HashModel()

    def jobs() -> list[Job]:
        return [Job(make_request(i, list(range(2, 5 + 7 * i)), 30), at_step=2 * i) for i in range(4)]

    truth = run_jobs(jobs(), model, depth=1)
    outcome = with_drafts(jobs(), model, truth, k, 5, depth=depth)
    assert outcome.tokens() == truth.tokens()
    assert outcome.streamed == truth.streamed
    stats = outcome.stats.drafts
    assert stats is not None
    assert all(0 < a < p for a, p in zip(stats.accepted, stats.proposed, strict=True)), stats
    assert outcome.stats.steps < truth.stats.steps
    assert outcome.stats.generated_tokens == truth.stats.generated_tokens


@pytest.mark.parametrize("seed", range(16))
def test_random_workloads_with_drafts_give_the_tokens_without(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = HashModel(peaked=rng.random() < 0.5)
    options: dict[str, Any] = random_options(rng, fewest_blocks=18)  # drafts have a place beyond the end
    k = rng.randint(1, 8)
    truth = run_jobs(varied_jobs(seed, model), model, depth=1, **options)
    for depth in (rng.choice([1, 2]), rng.choice([3, 4])):
        delays = seed if rng.random() < 0.3 else None
        outcome = with_drafts(varied_jobs(seed, model), model, truth, k, seed, depth=depth, delays=delays, **options)
        assert outcome.tokens() == truth.tokens()
        assert {i: f.reason for i, f in outcome.finished.items()} == {i: f.reason for i, f in truth.finished.items()}
        assert {i: f.stop_token for i, f in outcome.finished.items()} == {
            i: f.stop_token for i, f in truth.finished.items()
        }


@pytest.mark.parametrize("seed", range(6))
def test_an_abort_between_draft_and_verification_harms_nobody(seed: int) -> None:
    print(f"seed {seed}")
    model = HashModel()
    options = {"max_num_batched_tokens": random.Random(seed).choice([7, 32]), "num_blocks": 30}
    plain = [Job(j.request, j.at_step) for j in varied_jobs(seed, model, aborts=True)]
    truth = run_jobs(plain, model, depth=1, **options)
    outcome = with_drafts(varied_jobs(seed, model, aborts=True), model, truth, 3, seed, depth=1 + seed % 4, **options)
    for i, tokens in outcome.tokens().items():
        if outcome.finished[i].reason is FinishReason.ABORT:
            assert tokens == truth.tokens()[i][: len(tokens)]
        else:
            assert tokens == truth.tokens()[i]


@pytest.mark.parametrize("seed", range(4))
def test_captured_shapes_serve_steps_with_drafts(seed: int) -> None:
    """Padded sizes, and a key for each: what is not captured would be a KeyError."""
    print(f"seed {seed}")
    model = HashModel(vocab_size=31)
    seqs = [3, 16, 5, 17][seed]
    options = {"max_num_seqs": seqs, "max_num_batched_tokens": 80, "num_blocks": 300}
    truth = run_jobs(varied_jobs(seed, model, count=8), model, depth=1, **options)
    shapes = graph_shapes(seqs, 80)
    outcome = with_drafts(
        varied_jobs(seed, model, count=8), model, truth, 2 + seed, seed, depth=2, shapes=shapes, **options
    )
    assert outcome.tokens() == truth.tokens()


@pytest.mark.parametrize("depth", [1, 3])
def test_preempted_rows_with_drafts_in_flight_resume_rightly(depth: int) -> None:
    model = HashModel()

    def jobs() -> list[Job]:
        return [Job(make_request(i, [2 + i] * 20, 60)) for i in range(8)]

    truth = run_jobs(jobs(), model, depth=1, num_blocks=1000, max_num_seqs=8)
    small = with_drafts(jobs(), model, truth, 4, 1, depth=depth, num_blocks=18, max_num_seqs=8)
    assert small.tokens() == truth.tokens()
    assert sum(f.num_preemptions for f in small.finished.values()) > 0


@pytest.mark.parametrize("depth", [1, 3])
def test_nothing_undeclared_is_touched_with_drafts(depth: int) -> None:
    model = HashModel()
    jobs = [Job(make_request(i, [2 + i] * 9, 8), at_step=i) for i in range(2)]
    truth = run_jobs([Job(j.request, j.at_step) for j in jobs], model, depth=1, max_num_seqs=2)
    outcome = with_drafts(jobs, model, truth, 2, 3, depth=depth, debug=True, num_blocks=9, max_num_seqs=2)
    assert outcome.tokens() == truth.tokens()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", ["lfm2", "qwen4_exp"])
def test_layers_that_are_not_attention_forget_rejected_drafts(kind: str, depth: int) -> None:
    """Inputs of short convolutions are paged by token, n-grams are read in the token table, and a recurrent state is
    kept for each place to which a step may go back."""
    from gapless.model.adapter import TransformersModel
    from models import tiny

    k, module = 3, tiny(kind)

    def jobs() -> list[Job]:
        return [Job(make_request(i, list(range(5 + i, 9 + 5 * i)), 14), at_step=i) for i in range(3)]

    options: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 2, "max_model_len": 48}
    truth = run_jobs(jobs(), TransformersModel(module), depth=1, **options)
    model: Any = TransformersModel(module, num_drafts=k)
    outcome = with_drafts(jobs(), model, truth, k, 7, depth=depth, **options)
    assert outcome.tokens() == truth.tokens()
    drafts = outcome.stats.drafts
    assert drafts is not None
    assert 0 < sum(drafts.accepted) < sum(drafts.proposed)


@pytest.mark.parametrize("seed", range(4))
def test_no_legal_order_of_streams_changes_a_token_or_races(seed: int) -> None:
    print(f"seed {seed}")
    model, depth = HashModel(vocab_size=31), 2 + seed % 2

    def jobs() -> list[Job]:
        return [Job(make_request(i, [2 + i] * 9, 12), at_step=i) for i in range(3)]

    options: dict[str, Any] = {"max_num_seqs": 2, "num_blocks": 9, "max_num_batched_tokens": 12, "max_model_len": 40}
    truth = run_jobs(jobs(), model, depth=1, **options)
    whole = [[*job.request.prompt_token_ids.tolist(), *truth.tokens()[job.request.id]] for job in jobs()]
    config = SpeculativeConfig(num_speculative_tokens=2, **ALWAYS)
    detector = RaceDetector()
    device = SimulatedDevice(RandomChooser(seed), observer=detector)
    scheduler, runner = make_parts(
        model, device, depth=depth, speculative=config, speculation=oracle(whole, 2, seed, 31), **options
    )
    outcome = SteppedEngine(jobs(), scheduler, runner, depth, check=True).run()
    assert outcome.tokens() == truth.tokens()
    assert [str(race) for race in detector.races] == []


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rows_of_low_acceptance_go_on_with_plain_steps(depth: int) -> None:
    """The oracle knows nothing, so that every draft is random: the row stops, tries again, and stops for longer."""
    model = HashModel()
    job = make_request(0, [3, 4, 5], 100)
    truth = run_jobs([Job(job)], model, depth=1)
    config = SpeculativeConfig(num_speculative_tokens=4, patience=4, pause=16)
    outcome = run_jobs(
        [Job(job)], model, depth=depth, speculative=config, speculation=oracle([], 4, 0, model.vocab_size)
    )
    assert outcome.tokens() == truth.tokens()
    stats = outcome.stats.drafts
    assert stats is not None
    assert stats.stopped >= 2
    widths = [plan.query_width for plan in outcome.plans]
    first_plain = widths.index(1, 1)
    assert widths[first_plain : first_plain + 10] == [1] * 10, "plain steps, until the pause is over"
    assert sum(width == 1 for width in widths) > 60
    trials = [len(list(run)) for width, run in itertools.groupby(widths[1:]) if width > 1]
    assert len(trials) >= 3
    assert trials[0] >= 4
    # A quarter of the patience, the steps in flight by then, and those that must follow their unknown ends.
    assert min(trials[1:]) <= 1 + 2 * (depth - 1)


def test_a_request_can_refuse_drafts() -> None:
    model = HashModel()
    config = SpeculativeConfig(min_accepted=0)
    outcome = run_jobs([Job(make_request(0, [3] * 9, 20, speculative=False))], model, depth=2, speculative=config)
    assert {plan.query_width for plan in outcome.plans} == {1}


@pytest.mark.parametrize("seed", range(8))
def test_drafts_never_keep_a_prompt_waiting(seed: int) -> None:
    """A budget below rows x (K + 1): in every step a prompt that has come gets half of what the one tokens leave, until
    it is computed; and the drafts go on beside it."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    model, k, seqs, depth = HashModel(), rng.randint(1, 6), rng.randint(2, 6), rng.randint(1, 3)
    budget, prompt = rng.randint(seqs, seqs * (k + 1)), rng.randint(20, 90)
    options = {"max_num_seqs": seqs, "max_num_batched_tokens": budget}

    def jobs() -> list[Job]:
        early = [Job(make_request(i, [2 + i], 90)) for i in range(seqs - 1)]
        return [*early, Job(make_request(seqs, [9] * prompt, 3), at_step=8)]

    truth = run_jobs(jobs(), model, depth=1, **options)
    outcome = with_drafts(jobs(), model, truth, k, seed, depth=depth, **options)
    assert outcome.tokens() == truth.tokens()
    plans: list[Any] = outcome.plans
    row, done, drafted = seqs - 1, 0, False  # rows are given in order, and none has ended before
    first = next(plan.step for plan in plans if row in plan.rows)
    assert first < 8 + depth
    for plan in plans[first:]:
        got = int(plan.query_lens[plan.rows == row].sum())
        left = budget - int((plan.rows != row).sum())
        assert got >= min(prompt - done, left - left // 2), (plan, done)
        done += got
        drafted |= plan.query_width > 1 and bool(plan.having(SeqFlag.DRAFTS).any())
        if done >= prompt:
            break
    assert done >= prompt
    assert drafted or (budget - seqs) // 2 < k
