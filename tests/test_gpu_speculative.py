"""On a GPU: steps with drafts are captured, copy once each way, wait for nothing, and change no token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gapless import LLM, SamplingParams
from models import VOCAB_SIZE, tiny
from step_watch import mixed_traffic, no_sync, watch_loops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

OPTIONS: dict[str, Any] = {
    "device": "cuda", "max_num_seqs": 16, "max_num_batched_tokens": 96, "max_model_len": 200, "num_kv_blocks": 400,
}  # fmt: skip
NGRAM = {"num_speculative_tokens": 4, "min_ngram": 1, "min_accepted": 0}


def requests() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    prompts, params = [], []
    for i in range(24):
        prompts.append({"prompt_token_ids": [5 + i, 6, 7] * (1 + i % 9)})
        chosen: dict[str, Any] = {"temperature": 0, "max_tokens": 10 + 3 * i}
        if i % 5 == 1:
            chosen |= {"temperature": 0.8, "top_k": 20, "seed": i}
        if i % 5 == 2:
            chosen |= {"logprobs": 2, "repetition_penalty": 1.2}
        if i % 5 == 3:
            chosen |= {"speculative": False, "min_tokens": 5}
        params.append(SamplingParams(**chosen))
    return prompts, params


def run(model: Any, **options: Any) -> list[list[int]]:
    with LLM(model, **{**OPTIONS, **options}) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(*requests(), use_tqdm=False)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_change_no_token_in_fp32(method: str, depth: int) -> None:
    model = tiny("llama").cuda()
    config = NGRAM if method == "ngram" else {
        "method": method, "model": tiny("qwen3", 3).cuda(), "num_speculative_tokens": 3, "min_accepted": 0,
    }  # fmt: skip
    plain = run(model, pipeline_depth=1)
    assert run(model, pipeline_depth=depth, speculative=config) == plain
    assert run(model, pipeline_depth=depth, speculative=config, enforce_eager=True) == plain


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_small_batches_take_drafts_in_bf16(kind: str) -> None:
    """The path of few tokens, on Hopper: each token is among the best of the plain engine at its place."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = tiny(kind, hidden_size=128, intermediate_size=256, **heads).cuda().bfloat16()
    prompts = [{"prompt_token_ids": [5, 6, 7, 8] * 6}, {"prompt_token_ids": [9, 3]}]
    params = SamplingParams(temperature=0, max_tokens=60, logprobs=1)
    with LLM(model, **OPTIONS, speculative=NGRAM) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        _, stats = llm.stats()
    assert stats.drafts is not None
    assert sum(stats.drafts.proposed) > 0
    whole = [
        {"prompt_token_ids": p["prompt_token_ids"] + o.outputs[0].token_ids}
        for p, o in zip(prompts, outputs, strict=True)
    ]
    with LLM(model, **OPTIONS) as llm:
        scored = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    for prompt, output, again in zip(prompts, outputs, scored, strict=True):
        assert again.prompt_logprobs is not None
        entries = again.prompt_logprobs[len(prompt["prompt_token_ids"]) :]
        for token, entry in zip(output.outputs[0].token_ids, entries, strict=True):
            assert entry is not None
            best = max(found.logprob for found in entry.values())
            assert entry[token].logprob > best - 0.1


@pytest.mark.parametrize("depth", [1, 3])
def test_200_mixed_steps_with_drafts_without_a_wait_or_a_pageable_copy(depth: int) -> None:
    model = tiny("llama").cuda()
    with watch_loops() as watch, LLM(model, pipeline_depth=depth, **OPTIONS, speculative=NGRAM) as llm:
        mixed_traffic(llm, 20, VOCAB_SIZE, seed=1)
        copies = llm._client._built.runner.device.copies
        before, seen = (copies.h2d, copies.d2h), watch.copies
        with no_sync():
            steps = mixed_traffic(llm, 200, VOCAB_SIZE)["steps"]
        assert (copies.h2d - before[0], copies.d2h - before[1]) == (steps, steps)
        assert watch.copies - seen == 2 * steps
        drafts = llm.stats()[1].drafts
        assert drafts is not None
        assert sum(drafts.accepted) > 0
