"""A slot's pinned region against one that is written anew."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from gapless.batch.plan import StepPlan
from gapless.batch.row_params import Feature
from gapless.batch.slot_layout import slot_layout, step_inputs
from gapless.device.cpu import CpuDevice
from gapless.runner.slot import Slot

SEQS, TOKENS, UPDATES = 6, 24, 8


def plan(rng: random.Random, step: int, drafts: bool) -> StepPlan:
    """Any plan that fits."""
    n = rng.randint(1, SEQS)
    lens = np.array([rng.randint(1, TOKENS // SEQS) for _ in range(n)], np.int32)

    def flags(count: int) -> np.ndarray:
        return np.array([rng.random() < 0.5 for _ in range(count)], np.bool_)

    t, carry = int(lens.sum()), flags(int(lens.sum())) | (rng.random() < 0.5)
    return StepPlan(
        step, np.array(rng.sample(range(SEQS), n), np.int32), numbers(rng, n), lens,
        np.array([rng.randrange(16 if drafts else 4) for _ in range(n)], np.int32),
        np.where(carry, np.int32(0), numbers(rng, t)), carry, updates(rng), Feature.GREEDY,
        query_width=3 if drafts else 1, carried=bool(carry.all()),
    )  # fmt: skip


def updates(rng: random.Random) -> np.ndarray:
    return numbers(rng, 2 * rng.randint(0, UPDATES)).reshape(-1, 2)


def numbers(rng: random.Random, count: int) -> np.ndarray:
    return np.array([rng.randrange(1000) for _ in range(count)], np.int32)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_left_as_it_was_is_what_would_be_written(seed: int) -> None:
    """Plans that are the last one moved on, with ids that the host knows or not, at paddings that change; each of one
    to three slots gets its turn, as in a ring."""
    print("seed", seed)
    rng = random.Random(seed)
    with_device = CpuDevice()
    depth = rng.randint(1, 3)
    ring = [Slot(with_device, i, TOKENS, SEQS, UPDATES) for i in range(depth)]
    now = plan(rng, 0, False)
    full = rng.random() < 0.5
    for number in range(120):
        if number and rng.random() < 0.8:
            now = now.moved_on(updates(rng), numbers(rng, now.num_tokens) if rng.random() < 0.3 else None)
        elif number:
            now = plan(rng, number, rng.random() < 0.3)
            full = rng.random() < 0.5
        if rng.random() < 0.1:
            full = not full
        slot = ring[number % depth]
        padded = slot_layout(TOKENS if full else now.num_tokens, SEQS if full else now.num_seqs)
        fresh = Slot(with_device, depth + number, TOKENS, SEQS, UPDATES)
        used = slot.fill(now, padded, SEQS)
        assert used == fresh.fill(now, padded, SEQS)
        found, expected = step_inputs(slot.host, padded), step_inputs(fresh.host, padded)
        for field in dataclasses.fields(found):  # the words between the parts are nobody's
            ours, theirs = getattr(found, field.name), getattr(expected, field.name)
            end = len(now.updates) if field.name == "updates" else len(ours)
            assert torch.equal(ours[:end], theirs[:end]), (number, field.name)
    with_device.close()
