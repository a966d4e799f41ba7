"""On a GPU: penalties, masks and log-probabilities give the same at every depth, captured or not, and on the CPU."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from gapless import LLM, SamplingParams
from models import VOCAB_SIZE, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(count)]


def requests(count: int = 14) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Mixed in one batch: each parameter in about a third of the rows, some with none; prompts that share blocks."""
    rng = random.Random(5)
    shared = ids(rng, 40)
    prompts, params = [], []
    for i in range(count):
        every: dict[str, Any] = {
            "repetition_penalty": 1.3,
            "presence_penalty": rng.uniform(-1, 2),
            "frequency_penalty": rng.uniform(-1, 2),
            "logit_bias": {t: rng.uniform(-5, 5) for t in ids(rng, 20)},
            "allowed_token_ids": ids(rng, 60),
            "bad_words": [ids(rng, 1), ids(rng, 1), ids(rng, 2)],
            "logprobs": rng.choice([0, 5]),
            "prompt_logprobs": 2,
        }
        chosen = {k: v for k, v in every.items() if rng.random() < 0.35}
        if i % 2:
            chosen |= {"temperature": 0.9, "top_k": rng.choice([0, 20]), "top_p": rng.choice([1.0, 0.9])}
        prompts.append({"prompt_token_ids": shared[: rng.choice([0, 16, 40])] + ids(rng, rng.randint(1, 40))})
        base = {"temperature": 0, "max_tokens": rng.randint(1, 40), "seed": i, "min_tokens": 1}
        params.append(SamplingParams(**{**base, **chosen}))
    return prompts, params


def run(model: torch.nn.Module, **options: Any) -> list[Any]:
    defaults = {"device": "cuda", "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 160}
    with LLM(model, **{**defaults, "num_kv_blocks": 200, **options}) as llm:
        return llm.generate(*requests(), use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def check_logprobs(found: list[Any], expected: list[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        for entries, wanted in (
            (a.outputs[0].logprobs, b.outputs[0].logprobs),
            (a.prompt_logprobs, b.prompt_logprobs),
        ):
            assert (entries is None) == (wanted is None)
            for entry, want in zip(entries or [], wanted or [], strict=True):
                if want is not None:
                    assert next(iter(entry)) == next(iter(want))
                    values = sorted(e.logprob for e in entry.values())
                    assert values == pytest.approx(sorted(e.logprob for e in want.values()), abs=1e-3)


def test_everything_mixed_at_every_depth_captured_or_not() -> None:
    model = tiny("llama").cuda()
    truth = run(model, pipeline_depth=1, enforce_eager=True)
    for depth, eager in itertools.product((1, 2, 4), (False, True)):
        got = run(model, pipeline_depth=depth, enforce_eager=eager)
        assert tokens(got) == tokens(truth), (depth, eager)
        check_logprobs(got, truth)
    assert tokens(run(model, num_kv_blocks=19, pipeline_depth=3)) == tokens(truth)
    assert tokens(run(model, enable_prefix_caching=False)) == tokens(truth)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_the_cpu_agrees(mode: str) -> None:
    model = tiny("qwen3")
    expected = run(model, device="cpu", logprobs_mode=mode, check_model=False)
    got = run(model.cuda(), logprobs_mode=mode)
    assert tokens(got) == tokens(expected)
    check_logprobs(got, expected)
