"""What steps read, counted from their plans, against counting position by position."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from gapless.batch.plan import StepPlan
from gapless.batch.row_params import Feature
from gapless.scheduler.read_counters import ReadCounters


def plan(starts: list[int], lens: list[int]) -> StepPlan:
    tokens = sum(lens)
    return StepPlan(
        0, np.arange(len(starts), dtype=np.int32), np.array(starts, np.int32), np.array(lens, np.int32),
        np.ones(len(starts), np.int32), np.zeros(tokens, np.int32), np.zeros(tokens, np.bool_),
        np.zeros((0, 2), np.int32), Feature.GREEDY,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_as_counted_one_by_one(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    windows = rng.choice([(None,), (None, 5), (3, 17), (1,)])
    found = ReadCounters()
    sequences, keys, pairs = 0, [0] * len(windows), [0] * len(windows)
    for _ in range(20):
        count, most = rng.randint(1, 6), rng.choice([1, 1, 40])
        starts = [rng.randrange(60) for _ in range(count)]
        lens = [rng.randint(1, most) for _ in range(count)]
        found.count(plan(starts, lens), windows)
        sequences += count
        for i, window in enumerate(windows):
            for start, length in zip(starts, lens, strict=True):
                seen = [set(range(max(0, p + 1 - (window or p + 1)), p + 1)) for p in range(start, start + length)]
                keys[i] += len(set().union(*seen))
                pairs[i] += sum(map(len, seen))
    assert (found.sequences, found.keys, found.pairs) == (sequences, keys, pairs)


@pytest.mark.parametrize("windows", [(None,), (None, 5)], ids=str)
def test_a_batch_that_goes_on_is_counted_as_any_other(windows: tuple[int | None, ...]) -> None:
    long, short = ReadCounters(), ReadCounters()
    for step in range(20):
        now = plan([3 + step, 9 + step, step], [1, 1, 1])
        long.count(now, windows)
        short.count(dataclasses.replace(now, repeats=step), windows)
        assert (long.sequences, long.keys, long.pairs) == (short.sequences, short.keys, short.pairs)


def test_sums_of_long_contexts_do_not_overflow() -> None:
    found = ReadCounters()
    found.count(plan([2**31 - 3] * 3, [2] * 3), (None,))
    assert found.keys == [3 * (2**31 - 1)]
    assert found.pairs == [3 * (2 * 2**31 - 3)]
