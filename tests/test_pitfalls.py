"""Faults that engines like this one had, where no other file has the test; docs/pitfalls.md lists them all."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engines import check_idle, options
from gapless import LLM, SamplingParams
from proof.harness import Job, make_request, run_jobs
from proof.hash_model import EOS, HashModel
from test_loop import greedy

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_missed_steps(depth: int) -> None:
    """Prompts take many steps of five tokens, and blocks run out: rows draw nothing for a while, and go on from their
    own last token, whatever place they had in the step before."""
    model = HashModel()
    jobs = [Job(make_request(i, [2 + i] * (1 + 23 * (i % 3)), 25, stop=(EOS,)), at_step=3 * i) for i in range(7)]
    outcome = run_jobs(jobs, model, depth=depth, max_num_batched_tokens=5, num_blocks=20, max_num_seqs=4)
    assert outcome.tokens() == {job.request.id: greedy(model, job) for job in jobs}
    drawn = [set(plan.rows[plan.draws].tolist()) for plan in outcome.plans]
    named = [set(plan.rows.tolist()) for plan in outcome.plans]
    assert sum(d < n for d, n in zip(drawn, named, strict=True)) > 10
    assert sum(f.num_preemptions for f in outcome.finished.values()) > 0


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_row_reuse(depth: int) -> None:
    """There is one row. Its request ends by a token while later steps that name it are in flight; a longer prompt gets
    the row as soon as they are over."""
    model = HashModel()
    first = make_request(0, [5, 6], 40)
    ends_with = greedy(model, Job(first))[3]
    jobs = [
        Job(make_request(0, [5, 6], 40, stop=(ends_with,))),
        Job(make_request(1, list(range(2, 50)), 9)),
        Job(make_request(2, [7], 9)),
    ]
    outcome = run_jobs(jobs, model, depth=depth, max_num_seqs=1, enable_prefix_caching=False)
    assert outcome.tokens() == {job.request.id: greedy(model, job) for job in jobs}
    assert len(outcome.tokens()[0]) <= 4


def test_only_rows_that_sample_have_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of a hundred tokens in one step: its logits are those of one token, in memory too."""
    seen: list[tuple[int, int, int]] = []
    with LLM(**options(max_num_seqs=3, max_num_batched_tokens=128)) as llm:
        client = llm._client
        forward: Callable[..., None] = client.model.forward

        def watched(ids: Any, positions: Any, context: Any, index: Any, out: Any) -> None:
            seen.append((len(ids), len(index), len(out)))
            forward(ids, positions, context, index, out)

        monkeypatch.setattr(client.model, "forward", watched)
        llm.generate({"prompt_token_ids": [5] * 100}, PARAMS, use_tqdm=False)
        assert len(client._built.runner.state.logits) == 3
        check_idle(llm)
    assert seen[0] == (100, 1, 1)
    assert set(seen[1:]) == {(1, 1, 1)}


def surroundings() -> dict[str, Any]:
    """What a program shares with its libraries."""
    signals = {s: signal.getsignal(s) for s in signal.valid_signals()}
    torches = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_device())
    return {
        "signals": signals,
        "torch": torches,
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "logging": (list(logging.getLogger().handlers), logging.getLogger().level),
        "random": (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()),  # noqa: NPY002
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }


def test_an_engine_changes_nothing_around_it() -> None:
    """Neither handlers of signals nor defaults of torch, seeds, logging or the environment."""
    made = options()  # what it is made of exists already
    before = surroundings()
    with LLM(**made) as llm:
        during = surroundings()
        llm.generate(["hello", "world"], SamplingParams(temperature=1.0, max_tokens=4, seed=3), use_tqdm=False)
        after = surroundings()
    for found in (during, after, surroundings()):
        for name, value in before.items():
            assert found[name] == value, name


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preemptions_are_counted_for_the_request_and_not_for_its_row(depth: int) -> None:
    """Later requests have the rows of earlier ones that were preempted."""
    jobs = [Job(make_request(i, [3 + i] * 15, 12)) for i in range(3)]
    jobs += [Job(make_request(i, [3 + i], 3), at_step=60 + 10 * i) for i in range(3, 6)]
    outcome = run_jobs(jobs, HashModel(), depth=depth, num_blocks=8, max_num_seqs=3, block_size=8)
    counts = [end.num_preemptions for _, end in sorted(outcome.finished.items())]
    assert sum(counts[:3]) == outcome.stats.preemptions > 0
    assert counts[3:] == [0, 0, 0]
