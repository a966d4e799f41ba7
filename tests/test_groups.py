"""Groups of layers: blocks that leave a window, prefix hits over several groups, pools that are smaller than a request.

The oracle of an engine with groups is the model's own function of a token list, and an engine whose windows only mask.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.batch.plan import StepPlan
from gapless.batch.row_layout import NULL_BLOCK, RowLayout
from gapless.cache.groups import blocks_spanned, group_of, group_windows, kv_groups, longest_chunk
from gapless.cache.sizing import given_blocks, split_memory, window_blocks
from gapless.cache.spec import KVKind, KVSpec, StateSpec, VectorSpec
from gapless.config import EngineConfig
from gapless.device.cpu import CpuDevice
from gapless.errors import RequestError
from gapless.request.outputs import FinishReason
from gapless.scheduler.scheduler import Scheduler
from proof.fast_kernels import FastWindowModel
from proof.harness import Job, SteppedEngine, make_parts, make_request, random_jobs, run_jobs

SIZE = 8
BOTH = FastWindowModel((None, 10))
ALONE = FastWindowModel((13,))
THREE = FastWindowModel((5, None, 20))
VECTORS = FastWindowModel((None, 3, None), vectors=(1, 2))  # attention, a short convolution, an indexer's keys


def make(windows: tuple[int | None, ...], num_blocks: int | tuple[int, ...] = 100, **options: object) -> Scheduler:
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": SIZE, "max_model_len": 128}
    config = EngineConfig(**{**defaults, **options})  # type: ignore[arg-type]
    assert config.max_model_len is not None
    layout = RowLayout(config.max_num_seqs, config.max_model_len, SIZE, windows=windows)
    return Scheduler(config, layout, num_blocks)


def answer(plan: StepPlan, token: int = 5) -> np.ndarray:
    return np.full(plan.num_seqs, token, np.int32)


def run_all(scheduler: Scheduler) -> list[StepPlan]:
    plans = []
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(plan, answer(plan))
        scheduler.check()
        plans.append(plan)
    return plans


# ---- what a layer keeps, and which layers go together --------------------------------------------------------------


def test_specs_name_their_kind_shape_and_size() -> None:
    full, window = KVSpec(2, 8, 8, "bfloat16"), KVSpec(2, 8, 8, "float32", 10)
    convolution, indexer = VectorSpec(48, "float32", 3), VectorSpec(16, "bfloat16")
    state = StateSpec((4, 8, 8), "float32", slots=3)
    kinds = [spec.kind for spec in (full, window, convolution, indexer, state)]
    assert kinds == list(KVKind)
    assert [spec.paged for spec in (full, window, convolution, indexer, state)] == [True] * 4 + [False]
    assert full.shape(5, SIZE) == window.shape(5, SIZE) == (2, 5, SIZE, 2, 8)
    assert convolution.shape(5, SIZE) == (5, SIZE, 48)
    assert state.shape(9) == (9, 3, 4, 8, 8)
    assert [full.bytes_per_token, convolution.bytes_per_token, indexer.bytes_per_token] == [64, 192, 32]
    assert state.bytes_per_row == 3 * 4 * 8 * 8 * 4


def test_layers_that_keep_the_same_positions_are_a_group() -> None:
    full, window, wider = (KVSpec(2, 8, 8, "float32", w) for w in (None, 10, 100))
    convolution, indexer, state = VectorSpec(48, "float32", 3), VectorSpec(16, "float32"), StateSpec((2,), "float32")
    assert group_windows([wider, full, window, full]) == (None, 10, 100)
    assert group_windows([wider, window]) == (10, 100)
    assert group_windows([wider, window], max_model_len=100) == (None, 10)  # nobody can leave a window of 100
    assert group_windows([]) == group_windows([state]) == (None,)
    specs = [convolution, indexer, state, full, convolution]
    groups = kv_groups(specs, group_windows(specs))
    assert [(g.window, g.layers, g.bytes_per_token) for g in groups] == [
        (None, (1, 3), 16 * 4 + full.bytes_per_token),
        (3, (0, 4), 2 * 48 * 4),
    ]
    assert group_of(10, (None, 5)) == 0
    with pytest.raises(ValueError, match="window 10 fits in none of the groups"):
        group_of(10, (5,))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 30), st.sampled_from([8, 16]))
def test_how_many_blocks_a_window_spans(window: int, new: int, capacity: int, size: int) -> None:
    spans = [(p + new - 1) // size - max(0, p + 1 - window) // size + 1 for p in range(window, window + 2 * size)]
    assert max(spans) == blocks_spanned(window, new, size)
    longest = longest_chunk(window, capacity, size)
    if longest >= 1:
        assert blocks_spanned(window, longest, size) <= capacity < blocks_spanned(window, longest + 1, size)
    else:
        assert blocks_spanned(window, 1, size) > capacity


def test_memory_is_split_by_need() -> None:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": SIZE}
    full, window = KVSpec(1, 8, 8, "float32"), KVSpec(1, 8, 8, "float32", 16)
    groups = kv_groups([full, window], (None, 16))
    need = window_blocks(16, 4, 64, SIZE)
    assert need == 2 * 4 * 3 + 8 + 1
    block = SIZE * 64
    for budget in (2 * block, 20 * block, 200 * block, 10**9):
        counts = split_memory(groups, budget, **sizes, most=1000)
        assert sum(counts) * block <= budget
        assert counts[1] == min(need, budget // 2 // block, counts[0])
    assert counts == (1000, need)
    assert split_memory(groups[1:], 10**9, **sizes, most=1000) == (1000,)
    assert split_memory(groups[1:], 50 * block, **sizes, most=1000) == (50,)
    assert split_memory(kv_groups([full], (None,)), 50 * block, **sizes, most=1000) == (50,)
    assert given_blocks(groups, 500, **sizes) == (500, need)
    assert given_blocks(groups, 9, **sizes) == (9, 9)
    assert given_blocks(groups[1:], 9, **sizes) == (9,)


# ---- windows ------------------------------------------------------------------------------------------------------


def test_a_row_never_holds_more_than_its_window_and_its_chunk() -> None:
    scheduler = make((None, 20), max_num_batched_tokens=12, enable_prefix_caching=False)
    scheduler.add(make_request(0, [3] * 50, 60))
    held = []
    while (plan := scheduler.schedule()) is not None:
        held.append(scheduler.blocks.used)
        assert held[-1][1] <= blocks_spanned(20, plan.num_tokens, SIZE) + 1
        scheduler.commit(plan, answer(plan))
        scheduler.check()
    assert max(window for _, window in held) <= blocks_spanned(20, 12, SIZE) + 1
    assert held[-1][0] == -(-109 // SIZE)
    assert [used for used, _ in scheduler.snapshot().used_by_group] == [0, 0]


def test_a_steady_phase_frees_and_appends() -> None:
    """The phase goes on over block boundaries, and the window's blocks stay as few as they are."""
    scheduler = make((None, 16), max_num_seqs=3, max_num_batched_tokens=64)
    for i in range(3):
        scheduler.add(make_request(i, [3 + i] * (10 + 3 * i), 90, streaming=False))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, answer(plan))
    plan = scheduler.schedule()
    phase = scheduler._steady
    assert plan is not None
    assert phase is not None
    for _ in range(60):
        scheduler.commit(plan, answer(plan))
        plan = scheduler.schedule()
        assert plan is not None
        assert scheduler._steady is phase
        assert scheduler.blocks.used[1] <= 3 * (blocks_spanned(16, 1, SIZE) + 1)
    assert scheduler.blocks.used[0] >= 3 * 8
    scheduler.check()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_window_model_outlives_its_pool(depth: int) -> None:
    """100 tokens through 4 blocks of 8: the prompt comes in chunks that fit, and nothing is preempted."""
    prompt = [random.Random(3).randrange(2, 61) for _ in range(50)]
    jobs = [Job(make_request(0, prompt, 50))]
    outcome = run_jobs(jobs, ALONE, depth=depth, num_blocks=5, max_num_batched_tokens=32)
    want = list(prompt)
    for _ in range(50):
        want.append(ALONE.next_token(want))
    assert outcome.tokens()[0] == want[50:]
    assert outcome.finished[0].num_preemptions == 0


def test_what_no_group_could_hold_is_refused() -> None:
    scheduler = make((None, 40), (100, 5))
    assert scheduler.blocks.longest == 32
    scheduler.refuse_what_never_fits(20, 12)
    with pytest.raises(RequestError, match=r"33 tokens need 5 blocks of 8, at least 6.*window of 40 tokens has 4"):
        scheduler.refuse_what_never_fits(20, 13)
    wide = make((None, 40), (100, 8))
    assert wide.blocks.longest == 128
    wide.refuse_what_never_fits(100, 28)
    with pytest.raises(ValueError, match="2 groups need as many numbers"):
        make((None, 40), (100,))


def test_a_window_that_is_short_of_blocks_makes_rows_wait() -> None:
    jobs = [Job(make_request(i, [2 + i] * 30, 30)) for i in range(4)]
    free = run_jobs(jobs, BOTH, depth=2)
    tight = run_jobs(jobs, BOTH, depth=2, num_blocks=(200, 5), max_num_batched_tokens=32)
    assert tight.tokens() == free.tokens()
    assert tight.steps > free.steps


# ---- prefixes -------------------------------------------------------------------------------------------------------


def hit_of(scheduler: Scheduler, tokens: list[int], new: int = 1) -> int:
    """Tokens that a new request finds, once it has been computed; nothing else may be running."""
    before = scheduler.stats.prefix_hit_tokens
    request_id = scheduler.stats.requests_finished + 1000
    scheduler.add(make_request(request_id, tokens, new))
    run_all(scheduler)
    return scheduler.stats.prefix_hit_tokens - before


def test_a_hit_needs_the_last_window_only() -> None:
    scheduler = make((None, 12), max_num_batched_tokens=64)
    prompt = list(range(100, 140))  # 5 blocks, of which 4 can be hit
    assert hit_of(scheduler, prompt) == 0
    window = scheduler.blocks.pools[1]
    # A boundary at 32 is seen from position 32, whose window begins at 21: blocks 2 and 3 are enough.
    keys = list(scheduler.rows.hashes[0])
    for key in keys[:2]:
        window.unpublish_key(key)
    assert hit_of(scheduler, prompt) == 32
    window.unpublish_key(keys[2])  # now 32 and 24 lack it; 16 and 8 lack the others
    assert hit_of(scheduler, prompt) == 0


def test_groups_agree_on_the_longest_boundary() -> None:
    scheduler = make((None, 9, 20), max_num_batched_tokens=64)
    prompt = list(range(100, 164))  # 8 blocks, 7 can be hit
    assert hit_of(scheduler, prompt) == 0
    keys = list(scheduler.rows.hashes[0])
    full, near, far = scheduler.blocks.pools
    assert hit_of(scheduler, prompt) == 56
    near.unpublish_key(keys[6])  # so 48 at most
    far.unpublish_key(keys[5])  # so 40 at most for that one
    full_before = full.num_published
    rows, blocks = scheduler.rows, scheduler.blocks
    scheduler.add(make_request(1, prompt, 1))
    plan = scheduler.schedule()
    assert plan is not None
    row = int(plan.rows[0])
    assert plan.starts.tolist() == [40]
    # From position 40 the windows begin at 32 and at 21.
    assert blocks.first_blocks[:, row].tolist() == [0, 4, 2]
    assert (blocks.tables[1, row, :4] == NULL_BLOCK).all()
    assert full.num_published == full_before
    tokens = rows.tokens[row, 40:48]
    assert all(pool.lookup(keys[5], tokens.tobytes()) is not None for pool in blocks.pools)  # published again
    scheduler.commit(plan, answer(plan))
    run_all(scheduler)


def test_a_failed_row_takes_back_what_it_left_behind() -> None:
    scheduler = make((None, 10), max_num_batched_tokens=16)
    prompt = list(range(100, 150))
    scheduler.add(make_request(0, prompt, 5))
    while (plan := scheduler.schedule()) is not None and not plan.draws[0]:
        scheduler.commit(plan, answer(plan))
    assert plan is not None
    assert scheduler.blocks.first_blocks[1, plan.rows[0]] >= 3
    assert scheduler.blocks.pools[1].num_published > 0
    scheduler.commit(plan, answer(plan, -1))
    assert [pool.num_published for pool in scheduler.blocks.pools] == [0, 0]
    message = scheduler.message()
    assert message is not None
    assert message.finished[0].reason is FinishReason.ERROR
    assert hit_of(scheduler, prompt) == 0


def test_a_reset_forgets_all_groups() -> None:
    scheduler = make((None, 10), max_num_batched_tokens=64)
    prompt = list(range(100, 150))
    assert hit_of(scheduler, prompt) == 0
    scheduler.reset_prefix_cache()
    assert hit_of(scheduler, prompt) == 0
    assert hit_of(scheduler, prompt) == 48


# ---- random traffic -------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_counts_add_up_under_random_traffic(seed: int) -> None:
    """Random arrivals, aborts, errors, ends and depths, with the integrity check after every turn."""
    rng = random.Random(seed)
    windows = rng.choice([(None, 5), (None, 10, 30), (9,), (8, 40), (None, 1)])
    scheduler = make(
        windows,
        tuple(rng.choice([9, 17, 60]) for _ in windows),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.choice([5, 16, 64]),
        enable_prefix_caching=rng.random() < 0.7,
    )
    depth, flying, open_, next_id = rng.randint(1, 4), [], {}, 0
    for turn in range(200):
        if turn < 100 and rng.random() < 0.4:
            n, m = rng.randint(1, 60), rng.randint(1, 30)
            if n + m <= scheduler.blocks.longest:
                scheduler.refuse_what_never_fits(n, m)
                prompt = [rng.randint(2, 3)] * n
                scheduler.add(make_request(next_id, prompt, m, stop=(9,), streaming=rng.random() < 0.5))
                open_[next_id] = m
                next_id += 1
        if open_ and rng.random() < 0.1:
            scheduler.finish(rng.choice([*open_, 999]), FinishReason.ABORT)
        while len(flying) < depth and (plan := scheduler.schedule()) is not None:
            flying.append(plan)
        if flying:
            plan = flying.pop(0)
            drawn = [3, 3, 3, 4, 9, -1] if rng.random() < 0.1 else [3, 3, 3, 4]
            scheduler.commit(plan, np.array([rng.choice(drawn) for _ in plan.rows], np.int32))
        scheduler.check()
        message = scheduler.message()
        for f in message.finished if message else ():
            assert len(f.token_ids) <= open_.pop(f.id)
    while open_:
        while len(flying) < depth and (plan := scheduler.schedule()) is not None:
            flying.append(plan)
        assert flying, "requests wait and nothing is planned"
        plan = flying.pop(0)
        scheduler.commit(plan, answer(plan, 3))
        scheduler.check()
        message = scheduler.message()
        for f in message.finished if message else ():
            open_.pop(f.id)
    for plan in flying:
        scheduler.commit(plan, answer(plan, 3))
    scheduler.check()
    assert all(pool.available == pool.capacity for pool in scheduler.blocks.pools)
    assert scheduler.stats.requests_finished == next_id


def masked_only(jobs: list[Job], model: FastWindowModel) -> dict[int, list[int]]:
    """All layers in one group that keeps everything."""
    scheduler, runner = make_parts(model, CpuDevice(), depth=1, groups=False)
    return SteppedEngine(jobs, scheduler, runner, 1, check=True).run().tokens()


@pytest.mark.parametrize("model", [BOTH, ALONE, THREE, VECTORS], ids=["both", "window", "two windows", "vectors"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_do_not_depend_on_groups_or_depth(model: FastWindowModel, seed: int) -> None:
    rng = random.Random(seed)
    tight = rng.choice([17, 30])
    budget = rng.choice([7, 32])

    def jobs() -> list[Job]:
        return random_jobs(random.Random(seed), model.vocab_size, eos=1, longest=50)

    want = masked_only(jobs(), model)
    for depth in (1, 2, 3, 4):
        got = run_jobs(jobs(), model, depth=depth, num_blocks=tight, max_num_batched_tokens=budget)
        assert got.tokens() == want, (seed, depth)
