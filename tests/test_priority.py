"""Who runs first, who is preempted, who is never skipped; and who may share cached blocks with whom."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import check_idle, options
from gapless import LLM, RequestError, SamplingParams
from gapless.batch.plan import StepPlan
from gapless.cache.block_pool import ROOT, block_keys
from gapless.request.outputs import FinishReason
from gapless.request.request import MAX_CACHE_SALT, MAX_PRIORITY, Request, cache_key, check_priority
from gapless.scheduler.queue import WaitingQueue
from gapless.scheduler.scheduler import Scheduler
from proof.harness import make_request
from test_scheduler import answer, make

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def request(number: int, length: int, max_tokens: int, priority: int = 0, salt: str | None = None) -> Request:
    made = make_request(number, [2 + number % 50] * length, max_tokens)
    made.priority, made.cache_key = priority, cache_key(salt)
    return made


def started(plan: StepPlan | None, scheduler: Scheduler) -> list[int]:
    """Ids in a plan whose first chunk it holds."""
    assert plan is not None
    return scheduler.rows.ids[plan.rows[plan.starts == 0]].tolist()


def test_the_queue_is_ordered_by_priority_then_by_arrival() -> None:
    rng = random.Random(3)
    queue, model = WaitingQueue(), []
    for i in range(300):
        if model and rng.random() < 0.4:
            _, number = model.pop(rng.randrange(len(model)))
            assert queue.pop(number).id == number
            assert queue.pop(number, None) is None
        else:
            priority = rng.randint(-3, 3)
            queue[i] = request(i, 1, 1, priority)
            model.append((priority, i))
        assert list(queue) == [number for _, number in sorted(model)]
        assert len(queue) == len(model)
        if model:
            assert next(iter(queue.items()))[1].id == min(model)[1]


def test_lower_priorities_start_first() -> None:
    scheduler = make(max_num_seqs=2, max_num_batched_tokens=64)
    for i, priority in enumerate([0, 5, -1, 0, -1]):
        scheduler.add(request(i, 4, 1, priority))
    order = []
    while (plan := scheduler.schedule()) is not None:
        order += sorted(started(plan, scheduler), key=lambda i: plan.rows.tolist().index(_row(scheduler, i)))
        scheduler.commit(plan, answer(plan))
        scheduler.check()
    assert order == [2, 4, 0, 3, 1]


def _row(scheduler: Scheduler, number: int) -> int:
    return scheduler.states.row_of[number]


def test_the_newest_of_the_least_priority_is_preempted() -> None:
    """Blocks for three prompts of 8, and then for one token more of one of them."""
    scheduler = make(num_blocks=5, max_num_seqs=3, max_num_batched_tokens=64, enable_prefix_caching=False)
    for i, priority in enumerate([1, 0, 0]):
        scheduler.add(request(i, 8, 8, priority))
    lost = []
    for _ in range(40):
        plan = scheduler.schedule()
        if plan is None:
            break
        ids = scheduler.rows.ids[list(scheduler.states.preempted)].tolist()
        lost += [number for number in ids if number not in lost]
        scheduler.commit(plan, answer(plan))
        scheduler.check()
    assert lost == [0]  # the oldest of all, and yet the first to go
    assert scheduler.stats.requests_finished == 3
    ends = scheduler.message()
    assert ends is not None
    assert [f.id for f in ends.finished] == [1, 2, 0]


def test_a_waiting_request_of_lower_priority_number_starts_before_a_preempted_one_resumes() -> None:
    for priority, expected in ((-1, 2), (0, 1)):
        scheduler = make(num_blocks=5, max_num_seqs=3, max_num_batched_tokens=64, enable_prefix_caching=False)
        for i in range(2):
            scheduler.add(request(i, 16, 12))
        first = scheduler.schedule()
        assert first is not None
        scheduler.commit(first, answer(first))
        second = scheduler.schedule()  # 0 needs a third block; 1 loses its own
        assert second is not None
        assert [int(scheduler.rows.ids[row]) for row in scheduler.states.preempted] == [1]
        scheduler.add(request(2, 8, 1, priority))
        scheduler.commit(second, answer(second))
        scheduler.finish(0, FinishReason.ABORT)
        plan = scheduler.schedule()
        assert plan is not None
        assert int(scheduler.rows.ids[plan.rows[0]]) == expected
        scheduler.check()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_a_decoding_request_is_never_skipped(seed: int) -> None:
    """Long prompts keep coming, of any priority, with steps in flight. Whoever needs one token more gets it in every
    step, unless it lost its blocks to somebody of lower rank; and everybody ends."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    seqs = rng.randint(1, 5)
    scheduler = make(
        num_blocks=rng.choice([17, 30, 80]),
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.choice([seqs, 8, 16]),
        enable_prefix_caching=rng.random() < 0.5,
    )
    depth, flying, added, priorities = rng.randint(1, 3), [], 0, rng.choice([[0], [0, 1], [-2, 0, 7]])
    for turn in range(3000):
        if turn < 40 and rng.random() < 0.5:
            n, m = rng.randint(1, 70), rng.randint(1, 20)
            scheduler.add(request(added, n, m, rng.choice(priorities)))
            added += 1
        while len(flying) < depth:
            scheduler._end_steady()
            r, running = scheduler.rows, scheduler.states.running.copy()
            ready = running[(r.total[running] - r.computed[running] == 1) & (r.total[running] < r.limit[running])]
            ranks = r.ranks[ready]
            plan = scheduler.schedule()
            if plan is None:
                break
            skipped = ~np.isin(ready, plan.rows)
            assert set(ready[skipped]) <= set(scheduler.states.preempted)
            if skipped.any():  # and those were the last by rank
                assert ranks[skipped].min() > ranks[~skipped].max(initial=-(2**62))
            assert list(r.ranks[scheduler.states.running]) == sorted(r.ranks[scheduler.states.running])
            flying.append(plan)
        if flying:
            plan = flying.pop(0)
            scheduler.commit(plan, answer(plan, 3))
        scheduler.check()
        if turn >= 40 and not flying and not scheduler.has_requests:
            break
    assert scheduler.stats.requests_finished == added
    assert scheduler.pool.available == scheduler.pool.capacity


# ---- cache salt ----------------------------------------------------------------------------------------------------


def test_all_of_an_extra_key_counts() -> None:
    tokens = [np.arange(8, dtype=np.int32).tobytes()]
    extras = [b"", b"a", b"a" * 64, b"a" * 65, b"a" * 64 + b"b", b"a" * 1000]
    assert len({block_keys(ROOT, tokens, extra)[0] for extra in extras}) == len(extras)
    assert block_keys(ROOT, tokens, b"x") == block_keys(ROOT, tokens, b"x")


def test_salts_keep_blocks_apart() -> None:
    prompt = {"prompt_token_ids": list(range(2, 42))}
    long = "x" * (MAX_CACHE_SALT - 1)
    with LLM(**options()) as llm:
        want = llm.generate(prompt, ONE, use_tqdm=False)[0].outputs[0].token_ids

        def hits(salt: str | None) -> int:
            before = llm.stats()[1].prefix_hit_tokens
            outputs = llm.generate(prompt, ONE, use_tqdm=False, cache_salt=salt)
            assert outputs[0].outputs[0].token_ids == want
            return llm.stats()[1].prefix_hit_tokens - before

        assert hits(None) == 32
        for salt in ("a", "b", "A", "a ", "\ud800", long + "1", long + "2"):
            assert hits(salt) == 0, salt
            assert hits(salt) == 32, salt
        assert hits(None) == 32
        before = llm.stats()[1].prefix_hit_tokens
        llm.generate([prompt] * 4, ONE, use_tqdm=False, cache_salt=["p", "q", "p", None])
        assert llm.stats()[1].prefix_hit_tokens - before == 64  # the third, in the first's; the last
        llm.reset_prefix_cache()
        assert hits("a") == 0
        check_idle(llm)


def test_what_is_refused() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"cache_salt": ""}, "cache_salt: a string of 0 characters"),
        ({"cache_salt": "x" * (MAX_CACHE_SALT + 1)}, "string of 1025 characters is not allowed.*1024"),
        ({"cache_salt": 5}, "cache_salt: 5"),
        ({"cache_salt": b"ab"}, "prompt 0: cache_salt: b'ab'"),
        ({"cache_salt": ["a", 5]}, "prompt 1: cache_salt: 5"),
        ({"cache_salt": ["a"]}, "2 prompts but 1 values of cache_salt"),
        ({"priority": 1.0}, "priority=1.0"),
        ({"priority": True}, "priority=True"),
        ({"priority": [0, MAX_PRIORITY + 1]}, "prompt 1: priority=1048577"),
        ({"priority": [0, 0, 0]}, "2 prompts but 3 values of priority"),
    ]
    with LLM(**options()) as llm:
        for given, message in bad:
            with pytest.raises(RequestError, match=message):
                llm.generate(["h", "h"], ONE, use_tqdm=False, **given)
        assert llm.stats()[1].steps == 0
        llm.generate(["h", "h"], ONE, use_tqdm=False, priority=[-MAX_PRIORITY, MAX_PRIORITY])
        check_idle(llm)
    assert check_priority(-MAX_PRIORITY) == -MAX_PRIORITY
