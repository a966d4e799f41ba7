"""A slot's pinned region against one that is written anew."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from gapless.batch.plan import Feature, StepPlan
from gapless.batch.slot_layout import slot_layout, step_inputs
from gapless.device.cpu import CpuDevice
from gapless.runner.slot import Slot

SEQS, TOKENS, UPDATES = 6, 24, 8


def plan(rng: random.Random, drafts: bool) -> StepPlan:
    """Any plan that fits."""
    n = rng.randint(1, SEQS)
    lens = np.array([rng.randint(1, TOKENS // SEQS) for _ in range(n)], np.int32)

    def flags(count: int) -> np.ndarray:
        return np.array([rng.random() < 0.5 for _ in range(count)], np.bool_)

    t = int(lens.sum())
    return StepPlan(
        0, np.array(rng.sample(range(SEQS), n), np.int32), numbers(rng, n), lens, flags(n), numbers(rng, t), flags(t),
        numbers(rng, 2 * rng.randint(0, UPDATES)).reshape(-1, 2), Feature.GREEDY,
        scores=flags(n) if rng.random() < 0.3 else None,
        width=3 if drafts else 1, drafts=flags(n) if drafts else None, follows=flags(n) if drafts else None,
    )  # fmt: skip


def numbers(rng: random.Random, count: int) -> np.ndarray:
    return np.array([rng.randrange(1000) for _ in range(count)], np.int32)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_left_as_it_was_is_what_would_be_written(seed: int) -> None:
    """Plans that share some of their arrays, as those of a steady batch do, at paddings that change."""
    print("seed", seed)
    rng = random.Random(seed)
    with_device = CpuDevice()
    slot = Slot(with_device, 0, TOKENS, SEQS, UPDATES)
    now = plan(rng, False)
    for number in range(60):
        what = rng.random()
        if what < 0.6:  # the batch goes on
            now = dataclasses.replace(
                now, starts=now.starts + np.int32(1), updates=numbers(rng, 2 * rng.randint(0, UPDATES)).reshape(-1, 2)
            )
        elif what < 0.8:  # one of the arrays that mostly last is another one
            name = rng.choice(["samples", "input_ids", "carry"])
            old = getattr(now, name)
            now = dataclasses.replace(now, **{name: old[::-1].copy()})
        else:
            now = plan(rng, rng.random() < 0.3)
        padded = slot_layout(rng.choice([now.num_tokens, TOKENS]), rng.choice([now.num_seqs, SEQS]))
        fresh = Slot(with_device, 1 + number, TOKENS, SEQS, UPDATES)
        used = slot.fill(now, padded, SEQS)
        assert used == fresh.fill(now, padded, SEQS)
        found, expected = step_inputs(slot.host, padded), step_inputs(fresh.host, padded)
        for field in dataclasses.fields(found):  # the words between the parts are nobody's
            ours, theirs = getattr(found, field.name), getattr(expected, field.name)
            end = len(now.updates) if field.name == "updates" else len(ours)
            assert torch.equal(ours[:end], theirs[:end]), (number, field.name)
    with_device.close()
