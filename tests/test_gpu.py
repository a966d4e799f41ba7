"""On a GPU: the same tokens at every depth, captured or not, chunked or not, preempted or not, and as transformers'."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch

from gapless import LLM, SamplingParams
from models import KINDS, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WORDS = 199


def prompts(count: int = 12, seed: int = 0) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(2, WORDS) for _ in range(rng.randint(1, 70))]} for _ in range(count)]


def mixed_params(count: int = 12) -> list[SamplingParams]:
    rng = random.Random(1)
    made = []
    for i in range(count):
        options = {} if i % 2 else {"temperature": 0.9, "top_k": rng.choice([0, 5]), "top_p": rng.choice([1.0, 0.9])}
        made.append(SamplingParams(**{"temperature": 0, "max_tokens": rng.randint(1, 40), "seed": i, **options}))
    return made


def run(model: torch.nn.Module, params: list[SamplingParams], **options: object) -> list[list[int]]:
    defaults = {"device": "cuda", "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
    with LLM(model, **{**defaults, "num_kv_blocks": 200, **options}) as llm:
        outputs = llm.generate(prompts(len(params)), params, use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_fp32_tokens_do_not_depend_on_depth_graphs_chunks_or_memory(kind: str) -> None:
    model = tiny(kind).cuda()
    params = mixed_params()
    truth = run(model, params, pipeline_depth=1, enforce_eager=True)
    for depth, eager in itertools.product((1, 2, 3), (False, True)):
        assert run(model, params, pipeline_depth=depth, enforce_eager=eager) == truth, (depth, eager)
    assert run(model, params, max_num_batched_tokens=16) == truth
    assert run(model, params, num_kv_blocks=17, pipeline_depth=3) == truth
    assert run(model, params, enable_prefix_caching=False) == truth


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_fp32_greedy_equals_transformers(kind: str) -> None:
    model = tiny(kind).cuda()
    params = [SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)] * 6
    got = run(model, params)
    for prompt, tokens in zip(prompts(6), got, strict=True):
        ids = torch.tensor([prompt["prompt_token_ids"]], device="cuda")
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, min_new_tokens=32, do_sample=False, eos_token_id=None
        )
        assert tokens == expected[0, ids.shape[1] :].tolist()


def test_two_engines_in_two_threads() -> None:
    model = tiny("llama").cuda()
    params = mixed_params()
    truth = run(model, params, pipeline_depth=1)
    results: dict[int, list[list[int]]] = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: run(model, params)})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: truth, 1: truth}


def test_nothing_waits_for_the_device_in_200_mixed_steps() -> None:
    """PyTorch raises at any call that makes the host wait, on any thread, while this runs."""
    model = tiny("llama").cuda()
    rng = random.Random(2)
    shared = [rng.randrange(2, WORDS) for _ in range(40)]
    many = [{"prompt_token_ids": shared[: rng.randint(1, 40)] + [rng.randrange(2, WORDS)]} for _ in range(60)]
    params = [SamplingParams(temperature=i % 2, max_tokens=rng.randint(1, 40), seed=i) for i in range(60)]
    with LLM(model, device="cuda", max_num_seqs=8, max_num_batched_tokens=32, max_model_len=128) as llm:
        copies = llm._client._built.runner.device.copies
        before, steps = (copies.h2d, copies.d2h), llm.stats()[0].steps
        torch.cuda.set_sync_debug_mode("error")
        try:
            llm.generate(many, params, use_tqdm=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        engine, scheduler = llm.stats()
        assert engine.steps - steps >= 200
        assert scheduler.prefix_hit_tokens > 0
        assert (copies.h2d - before[0], copies.d2h - before[1]) == (engine.steps - steps,) * 2
