"""Models with windows through the whole engine equal ``transformers``: in chunks, preempted, and after prefix hits."""

from __future__ import annotations

import random

import pytest
import torch

from gapless import LLM, SamplingParams
from models import VOCAB_SIZE, tiny

OPTIONS = {
    "device": "cpu",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 20,
    "max_model_len": 96,
    "block_size": 8,
    "check_model": False,
}

LAYERS = {"gemma3": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}}


def prompts() -> list[list[int]]:
    """Two pairs with a long common prefix."""
    rng = random.Random(7)
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(41)]
    other = [rng.randrange(2, VOCAB_SIZE) for _ in range(25)]
    return [[*shared, 5], [*shared, 6, 7], other, [*other, 9, 9]]


def expected(model: torch.nn.Module, prompt: list[int], steps: int) -> list[int]:
    result = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=steps,
        min_new_tokens=steps,
        eos_token_id=-1,
    )
    new: list[int] = result[0, len(prompt) :].tolist()
    return new


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gpt_oss", "mistral"])
def test_equals_transformers(kind: str) -> None:
    """14 blocks: four requests of up to eight blocks preempt each other, or wait; then each is asked for again."""
    model = tiny(kind, **LAYERS.get(kind, {}))
    want = [expected(model, prompt, 20) for prompt in prompts()]
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for depth in (1, 2) if kind == "gemma2" else (2,):
        with LLM(model, tokenizer=None, num_kv_blocks=14, pipeline_depth=depth, **OPTIONS) as llm:
            windows = llm._client._built.layout.windows
            assert windows == ((12,) if kind == "mistral" else (None, 10))
            for _ in range(2):
                outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], greedy, use_tqdm=False)
                assert [list(o.outputs[0].token_ids) for o in outputs] == want
            (again,) = llm.generate([{"prompt_token_ids": prompts()[1]}], greedy, use_tqdm=False)
            assert list(again.outputs[0].token_ids) == want[1]
            stats = llm._client.stats()[1]
            assert stats.prefix_hit_tokens >= 40
            assert stats.preemptions > 0 or kind == "mistral"
            assert stats.blocks_used == 0


def test_many_samples_share_a_prompt() -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    found = []
    for caching in (True, False):
        with LLM(tiny("gemma3"), tokenizer=None, enable_prefix_caching=caching, **OPTIONS) as llm:
            (output,) = llm.generate([{"prompt_token_ids": prompts()[0]}], params, use_tqdm=False)
            found.append([list(o.token_ids) for o in output.outputs])
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0]}) == 3


def test_a_window_model_is_not_bounded_by_its_pool() -> None:
    """60 + 30 tokens through 5 blocks of 8; without max_tokens a request may fill max_model_len."""
    model = tiny("mistral")
    prompt = [3 + i % 90 for i in range(60)]
    with LLM(model, tokenizer=None, num_kv_blocks=6, **OPTIONS) as llm:
        for new in (30, None):
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            got = list(output.outputs[0].token_ids)
            assert got == expected(model, prompt, new or 36)
