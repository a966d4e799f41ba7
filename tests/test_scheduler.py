"""What the scheduler plans, and that its counts add up under random traffic."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.batch.plan import StepPlan
from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import Feature
from gapless.config import EngineConfig
from gapless.errors import RequestError
from gapless.request.outputs import FinishReason
from gapless.scheduler.scheduler import Scheduler
from gapless.scheduler.step_builder import StepBuilder
from gapless.speculative_config import SpeculativeConfig
from proof.harness import Job, make_request, run_jobs
from proof.hash_model import HashModel


def make(num_blocks: int = 100, **options: object) -> Scheduler:
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 8, "max_model_len": 128}
    config = EngineConfig(**{**defaults, **options})  # type: ignore[arg-type]
    assert config.max_model_len is not None
    return Scheduler(config, RowLayout(config.max_num_seqs, config.max_model_len, config.block_size), num_blocks)


def answer(plan: StepPlan, token: int = 5) -> np.ndarray:
    return np.full(plan.num_seqs, token, np.int32)


def test_a_token_in_flight_is_a_placeholder_with_its_carry_bit_set() -> None:
    scheduler = make()
    scheduler.add(make_request(0, [7, 8, 9], 5))
    first = scheduler.schedule()
    assert first is not None
    assert first.input_ids.tolist() == [7, 8, 9]
    assert first.carry.tolist() == [False] * 3  # cold start: the same path, an all-false mask
    second = scheduler.schedule()
    assert second is not None
    assert (second.starts.tolist(), second.input_ids.tolist(), second.carry.tolist()) == ([3], [0], [True])
    scheduler.commit(first, answer(first, 11))
    third = scheduler.schedule()
    assert third is not None
    assert (third.starts.tolist(), third.input_ids.tolist(), third.carry.tolist()) == ([4], [0], [True])
    scheduler.commit(second, answer(second, 12))
    scheduler.commit(third, answer(third, 13))
    fourth = scheduler.schedule()  # nothing in flight: the host knows the token and sends it
    assert fourth is not None
    assert (fourth.starts.tolist(), fourth.input_ids.tolist(), fourth.carry.tolist()) == ([5], [13], [False])


def test_a_preempted_row_resumes_before_its_tokens_are_known() -> None:
    scheduler = make(num_blocks=6, max_num_seqs=2, max_num_batched_tokens=64, enable_prefix_caching=False)
    scheduler.add(make_request(0, [3] * 7, 30))
    scheduler.add(make_request(1, [4] * 7, 30))
    plans = [scheduler.schedule() for _ in range(4)]
    assert all(plans)
    row = int(scheduler.rows.ids.tolist().index(1))
    scheduler._end_steady()
    scheduler.states.preempt(row, StepBuilder(64, 1000))
    plan = scheduler.schedule()
    assert plan is not None
    mine = np.repeat(plan.rows, plan.query_lens) == row
    assert plan.input_ids[mine].tolist() == [4] * 7 + [0] * 4
    assert plan.carry[mine].tolist() == [False] * 7 + [True] * 4


def test_decodes_come_first_and_prompts_fill_the_budget_in_chunks() -> None:
    scheduler = make()
    scheduler.add(make_request(0, [2] * 4, 50))
    plan = scheduler.schedule()
    for i in range(1, 4):
        scheduler.add(make_request(i, [2 + i] * 40, 5))
    sizes = []
    for _ in range(8):
        assert plan is not None
        scheduler.commit(plan, answer(plan))
        plan = scheduler.schedule()
        assert plan is not None
        assert 0 in plan.rows  # the running request is never skipped
        sizes.append(plan.num_tokens)
    assert sizes[:7] == [16] * 7


def test_no_step_is_planned_beyond_the_last_token() -> None:
    for n in (1, 2, 3):
        scheduler = make()
        scheduler.add(make_request(0, [2, 3], n))
        plans = []
        while (plan := scheduler.schedule()) is not None:
            plans.append(plan)
        assert len(plans) == n
        for plan in plans:
            scheduler.commit(plan, answer(plan))
        message = scheduler.message()
        assert message is not None
        assert message.finished[0].reason is FinishReason.LENGTH
        assert message.finished[0].token_ids.tolist() == [5] * n


def test_an_end_of_sequence_costs_at_most_depth_minus_one_rows() -> None:
    scheduler = make()
    scheduler.add(make_request(0, [2, 3], 50, stop=(5,)))
    plans = [scheduler.schedule() for _ in range(3)]
    for plan in plans:
        assert plan is not None
        scheduler.commit(plan, answer(plan))
    assert scheduler.stats.overrun_tokens == 2
    assert scheduler.schedule() is None
    assert scheduler.rows.num_free == 4


def test_equal_prompts_compute_their_prefix_once_even_in_one_step() -> None:
    scheduler = make(max_num_batched_tokens=64)
    for i in range(3):
        scheduler.add(make_request(i, list(range(2, 26)), 4))
    plan = scheduler.schedule()
    assert plan is not None
    # 24 tokens are exactly 3 blocks: the last must be computed, so two blocks are shared.
    assert plan.query_lens.tolist() == [24, 8, 8]
    assert plan.starts.tolist() == [0, 16, 16]
    assert scheduler.stats.prefix_hit_tokens == 32


def test_what_never_fits_is_refused_with_the_numbers() -> None:
    scheduler = make(num_blocks=5)
    with pytest.raises(RequestError, match=r"100 tokens.*max_tokens is 50.*150.*max_model_len is 128.*28 or less"):
        scheduler.refuse_what_never_fits(100, 50)
    with pytest.raises(RequestError, match=r"130 tokens.* is 128\. Shorten the prompt to 78 tokens or less"):
        scheduler.refuse_what_never_fits(130, 50)
    make(num_blocks=100).refuse_what_never_fits(78, 50)  # what it says fits
    with pytest.raises(RequestError, match=r"Shorten the prompt and lower max_tokens: the two may be 128 together"):
        scheduler.refuse_what_never_fits(130, 128)
    with pytest.raises(RequestError, match=r"60 tokens need 8 blocks of 8.*has 4"):
        scheduler.refuse_what_never_fits(30, 30)
    scheduler.refuse_what_never_fits(16, 16)


def test_a_row_that_is_not_finite_ends_alone_with_an_error() -> None:
    scheduler = make()
    for i in range(2):
        scheduler.add(make_request(i, list(range(2, 12)), 3))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, np.array([-1, 5], np.int32))
    message = scheduler.message()
    assert message is not None
    assert [(f.id, f.reason, len(f.token_ids)) for f in message.finished] == [(0, FinishReason.ERROR, 0)]
    assert message.ids.tolist() == [1]
    scheduler.check()


def test_features_are_those_of_the_rows_that_are_in_the_step() -> None:
    scheduler = make()
    scheduler.add(make_request(0, [2], 9))
    scheduler.add(make_request(1, [2], 2, temperature=1.0))
    scheduler.add(make_request(2, [2], 4, temperature=1.0, top_p=0.5, min_tokens=2))
    seen = []
    while (plan := scheduler.schedule()) is not None:
        seen.append(plan.features)
        scheduler.commit(plan, answer(plan))
    everything = Feature.SAMPLE | Feature.FILTER | Feature.MIN_TOKENS
    filtered = Feature.SAMPLE | Feature.FILTER
    assert seen == [everything] * 2 + [filtered] * 2 + [Feature.GREEDY] * 5


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_counts_add_up_under_random_traffic(seed: int) -> None:
    """Random arrivals, aborts, ends and depths, with the integrity check after every turn."""
    rng = random.Random(seed)
    scheduler = make(
        num_blocks=rng.choice([9, 17, 60]),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.choice([5, 16, 64]),
        enable_prefix_caching=rng.random() < 0.7,
    )
    depth, flying, open_, ended, next_id = rng.randint(1, 4), [], {}, {}, 0
    for _ in range(120):
        if rng.random() < 0.4:
            n, m = rng.randint(1, 40), rng.randint(1, 20)
            if n + m <= min(128, scheduler.pool.capacity * 8):
                prompt = [rng.randint(2, 4)] * n
                scheduler.add(make_request(next_id, prompt, m, stop=(9,), streaming=rng.random() < 0.5))
                open_[next_id] = m
                next_id += 1
        if open_ and rng.random() < 0.15:
            scheduler.finish(rng.choice([*open_, 999]), FinishReason.ABORT)
        while len(flying) < depth and (plan := scheduler.schedule()) is not None:
            flying.append(plan)
        if flying:
            plan = flying.pop(0)
            scheduler.commit(plan, np.array([rng.choice([3, 3, 3, 9, 4]) for _ in plan.rows], np.int32))
        scheduler.check()
        message = scheduler.message()
        for f in message.finished if message else ():
            assert len(f.token_ids) <= open_.pop(f.id)
            ended[f.id] = f
    while open_:
        while len(flying) < depth and (plan := scheduler.schedule()) is not None:
            flying.append(plan)
        plan = flying.pop(0)
        scheduler.commit(plan, answer(plan, 3))
        scheduler.check()
        message = scheduler.message()
        for f in message.finished if message else ():
            open_.pop(f.id)
    for plan in flying:
        scheduler.commit(plan, answer(plan, 3))
    scheduler.check()
    assert scheduler.pool.available == scheduler.pool.capacity
    assert scheduler.rows.num_free == len(scheduler.rows.requests)
    assert scheduler.stats.requests_finished == next_id


def test_each_kind_of_step_is_one_copy_in_and_one_out() -> None:
    jobs = [Job(make_request(i, [2 + i] * 30, 8), at_step=3 * i) for i in range(4)]
    outcome = run_jobs(jobs, HashModel(), depth=2)  # asserts copies == steps in both directions
    kinds = {
        "decode" if p.decode_only else "prefill" if (p.query_lens > 1).all() else "mixed"
        for p in outcome.plans
    }
    assert kinds == {"decode", "prefill", "mixed"}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_plan_that_repeats_is_the_last_one_moved_on(depth: int, drafts: int) -> None:
    """Whoever has the last plan makes this one of its updates, and of the ids if the host knows them."""
    model, rng = HashModel(), random.Random(7 * depth + drafts)
    jobs = [Job(make_request(i, [2 + i, 3] * rng.randint(1, 9), rng.randint(20, 60)), i) for i in range(5)]
    config = SpeculativeConfig(num_speculative_tokens=drafts, min_accepted=0) if drafts else None
    outcome = run_jobs(jobs, model, depth=depth, speculative=config)
    repeated = 0
    for last, plan in itertools.pairwise(outcome.plans):
        assert plan.carried == bool(plan.carry.all())
        if not plan.repeats:
            continue
        repeated += 1
        made = last.moved_on(plan.updates, None if plan.carried else plan.input_ids)
        for field in dataclasses.fields(StepPlan):
            assert np.array_equal(getattr(made, field.name), getattr(plan, field.name)), field.name
    if depth > 1 or not drafts:  # at depth 1 the host knows where every sequence starts
        assert repeated > 10
