"""On a GPU: kernels that only wait, put before chosen operations of each stream, change no token.

A placement says for every operation whether a delay comes before it and how long; each is seeded. A pipeline without
one of its events fails here as well, which the last test shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gapless import LLM, EngineDeadError, SamplingParams
from models import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WORDS = 199
PLACEMENTS = 200
CYCLES = 1_500_000
"""Longest delay, in cycles of the GPU's clock: a little less than a millisecond, several steps of this model."""


def workload() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Ragged prompts, some with a common beginning; greedy and sampled; more requests than rows."""
    rng = random.Random(5)
    shared = [rng.randrange(2, WORDS) for _ in range(20)]
    prompts, params = [], []
    for i in range(12):
        own = [rng.randrange(2, WORDS) for _ in range(rng.randint(1, 30))]
        prompts.append({"prompt_token_ids": shared[: 20 * (i % 2)] + own})
        draw = {"temperature": 0.9, "top_k": 5} if i % 3 == 0 else {"temperature": 0}
        params.append(SamplingParams(max_tokens=rng.randint(1, 14), seed=i, **draw))
    return prompts, params


class Delays:
    """Stands before the device's three calls; ``rng`` decides, None means no delays."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.rng: random.Random | None = None
        self.share = {"h2d": 0.0, "compute": 0.0, "d2h": 0.0}
        self.placed = 0
        device.copy_h2d = self._before(device.copy_h2d, "h2d", device._h2d)
        device.launch = self._before(device.launch, "compute", device._compute)
        device.copy_d2h = self._before(device.copy_d2h, "d2h", device._d2h)

    def place(self, seed: int) -> None:
        """Another placement: each stream has its own share of delayed operations, often none or all."""
        self.rng = random.Random(seed)
        self.share = {name: self.rng.choice([0.0, 0.1, 0.5, 1.0]) for name in self.share}

    def _before(self, inner: Callable[..., None], name: str, stream: torch.cuda.Stream) -> Callable[..., None]:
        def delayed(*arguments: Any) -> None:
            if self.rng is not None and self.rng.random() < self.share[name]:
                self.placed += 1
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(self.rng.randint(1, CYCLES))
            inner(*arguments)

        return delayed


@contextmanager
def engine(depth: int, **options: Any) -> Iterator[tuple[LLM, Delays]]:
    defaults = {"device": "cuda", "max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 128}
    with LLM(tiny("llama").cuda(), pipeline_depth=depth, **{**defaults, "num_kv_blocks": 60, **options}) as llm:
        yield llm, Delays(llm._client._built.runner.device)


def tokens(llm: LLM) -> list[list[int]]:
    prompts, params = workload()
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    with engine(1) as (llm, _):
        return tokens(llm)


@pytest.mark.parametrize("depth", [2, 3])
def test_no_placement_of_delays_changes_a_token(truth: list[list[int]], depth: int) -> None:
    with engine(depth) as (llm, delays):
        for seed in range(PLACEMENTS // 2):
            delays.place(seed * 2 + depth % 2)
            if seed % 3:
                llm.reset_prefix_cache()
            assert tokens(llm) == truth, f"depth {depth}, placement {seed * 2 + depth % 2}"
        assert delays.placed > PLACEMENTS


def test_delays_show_a_missing_event(truth: list[list[int]]) -> None:
    """Without the wait for compute_done, some placement gives other tokens: so those above could have failed."""

    class NoWait:
        def __init__(self, inner: Any) -> None:
            self.record, self.synchronize = inner.record, inner.synchronize

        def wait(self, stream: Any) -> None:
            """Nothing is ordered."""

    with engine(2) as (llm, delays):
        for slot in llm._client._built.runner._ring.slots:
            slot.compute_done = NoWait(slot.compute_done)
        wrong = 0
        for seed in range(20):
            delays.rng = random.Random(seed)
            delays.share = {"h2d": 0.0, "compute": 0.5, "d2h": 0.0}
            try:
                wrong += tokens(llm) != truth
                llm.reset_prefix_cache()
            except EngineDeadError:  # the loop saw that a step was not over
                wrong += 1
                break
        assert wrong > 0
