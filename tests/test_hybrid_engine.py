"""Whole engines on models with convolutions, recurrences and sparse attention: tokens are those of ``transformers``."""

from __future__ import annotations

import copy
import gc
import logging
import random
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen4ExpConfig, Qwen4ExpForConditionalGeneration

from gapless import LLM, SamplingParams
from gapless.errors import ConfigError
from gapless.model.adapter import TransformersModel
from gapless.model.load.loading import load_model, move_but_tables
from models import HYBRID_KINDS, VOCAB_SIZE, tiny, tiny_config
from proof.harness import Job, Outcome, make_request, run_jobs

EOS = 1
each_kind = pytest.mark.parametrize("kind", HYBRID_KINDS)


@cache
def own(kind: str) -> Any:
    return tiny(kind)


@cache
def wrapped(kind: str) -> TransformersModel:
    return TransformersModel(own(kind), max_model_len=128)


@cache
def logits(kind: str, tokens: tuple[int, ...]) -> torch.Tensor:
    """``[n, vocab_size]`` by the model's own forward over the whole sequence."""
    with torch.no_grad():
        result: torch.Tensor = own(kind)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return result


def assert_greedy(kind: str, prompt: list[int], tokens: list[int]) -> None:
    """Each of ``tokens`` is the most likely one after all before it."""
    best = logits(kind, (*prompt, *tokens[:-1]))[len(prompt) - 1 :].argmax(-1)
    assert tokens == best.tolist()


def some_jobs(count: int = 5, seed: int = 0, steps: int = 9) -> list[Job]:
    """Prompts of all lengths, half of them with a common start, ends of sequence inside, arriving little by little."""
    rng = random.Random(seed)
    shared = [rng.randrange(1, 12) for _ in range(24)]
    jobs = []
    for i in range(count):
        prompt = [rng.randrange(1, VOCAB_SIZE) for _ in range((1, 29, 7, 40, 18, 33)[i % 6])]
        for at in range(3, len(prompt), 5):
            prompt[at] = EOS  # within reach of the n-grams after it
        if i % 2:
            prompt[: len(shared)] = shared[: len(prompt)]
        jobs.append(Job(make_request(i, prompt, steps), at_step=2 * (i // 2)))
    return jobs


def check(kind: str, jobs: list[Job], outcome: Outcome) -> None:
    for job in jobs:
        tokens = outcome.tokens()[job.request.id]
        assert len(tokens) == job.request.max_tokens
        assert_greedy(kind, job.request.prompt_token_ids.tolist(), tokens)


@each_kind
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_tokens_at_any_depth(kind: str, depth: int) -> None:
    """Prompts together and in chunks of up to 13 tokens, mixed with decoding."""
    jobs = some_jobs()
    prefix = all(spec.paged for spec in wrapped(kind).kv_specs)
    options = {"max_num_batched_tokens": 13, "enable_prefix_caching": prefix}
    check(kind, jobs, run_jobs(some_jobs(), wrapped(kind), depth=depth, delays=depth, **options))


@each_kind
def test_preempted_rows_begin_again(kind: str) -> None:
    jobs = some_jobs(6, seed=1, steps=12)
    prefix = all(spec.paged for spec in wrapped(kind).kv_specs)
    outcome = run_jobs(
        some_jobs(6, seed=1, steps=12), wrapped(kind), depth=3, num_blocks=12, enable_prefix_caching=prefix
    )
    check(kind, jobs, outcome)
    assert sum(finished.num_preemptions for finished in outcome.finished.values()) > 0


@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe"])
def test_prefix_hits_bring_the_convolutions_past(kind: str) -> None:
    """The same prompt twice in one step, and later: from the second time on only its last tokens are computed."""
    prompt = [5, 9, 1, 7, 3, 2, 8, 4, 6, 5, 9, 1, 7, 3, 2, 8, 4, 6, 11, 13, 12, 10, 9, 8, 40]
    jobs = [Job(make_request(i, prompt[: 25 - i % 2], 6), at_step=12 * (i // 2)) for i in range(4)]
    outcome = run_jobs(jobs, wrapped(kind), depth=2)
    check(kind, jobs, outcome)
    began = [plan.starts.tolist() for plan in outcome.plans if plan.num_tokens > 4]
    assert began == [[0, 16], [24, 16]]


@pytest.mark.parametrize("kind", ["lfm2", "qwen4_exp"])
def test_nothing_undeclared_is_touched(kind: str) -> None:
    """Bytes that an operation did not declare are poisoned while it runs."""
    jobs = some_jobs(3, steps=3)
    prefix = all(spec.paged for spec in wrapped(kind).kv_specs)
    check(kind, jobs, run_jobs(some_jobs(3, steps=3), wrapped(kind), depth=2, debug=True, enable_prefix_caching=prefix))


@each_kind
def test_llm(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Through the public interface, with the probe; scores of a prompt come as sequences of one token each."""
    prompts = [[5, 6, 1, 7, 8, 9, 10, 11, 3], [12, 13, 14]]
    caplog.set_level(logging.INFO, logger="gapless")
    with LLM(own(kind), device="cpu", max_model_len=128, max_num_seqs=4, block_size=8, num_kv_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=1, logprobs=1)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(kind, prompt, list(output.outputs[0].token_ids))
        expected = logits(kind, tuple(prompt)).log_softmax(-1)
        assert output.prompt_logprobs is not None
        for at in range(1, len(prompt)):
            record = output.prompt_logprobs[at]
            assert record is not None
            assert record[prompt[at]].logprob == pytest.approx(float(expected[at - 1, prompt[at]]), abs=1e-4)
    said = "prefix caching is off" in caplog.text
    assert said == (kind == "qwen4_exp")


def test_tables_on_host(tmp_path: Path) -> None:
    """On a CPU the option changes nothing; a model without tables, and tables of an object elsewhere, are refused."""
    prompt = [5, 6, 1, 7, 8, 9]
    own("qwen4_exp").save_pretrained(tmp_path)
    options = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 4, "num_kv_blocks": 20, "ple_tables_on_host": True}
    with LLM(str(tmp_path), tokenizer=None, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=4))
    assert_greedy("qwen4_exp", prompt, list(outputs[0].outputs[0].token_ids))
    with pytest.raises(ConfigError, match="Lfm2ForCausalLM has no per-layer embeddings"):
        LLM(own("lfm2"), **options)


def test_the_text_part_of_a_model_of_text_and_images_is_read(tmp_path: Path) -> None:
    """As its checkpoint is published."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
    name, options = HYBRID_KINDS["qwen4_exp"]
    text = tiny_config(name, **options).to_dict()
    config = Qwen4ExpConfig(text_config=text, vision_config={**vision, "out_hidden_size": 48})
    whole = Qwen4ExpForConditionalGeneration._from_config(config, dtype=torch.float32)
    whole.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, device=torch.device("cpu"))
    assert type(loaded.model.module).__name__ == "Qwen4ExpForCausalLM"
    assert torch.equal(loaded.model.module.lm_head.weight, whole.lm_head.weight)


@each_kind
def test_weights_change_under_a_running_engine(kind: str) -> None:
    """The names are the model's own, and an update reaches the parts that replace its layers."""
    model, other = tiny(kind), tiny(kind, seed=1)
    prompt = {"prompt_token_ids": [5, 6, 1, 7, 8, 9]}
    params = SamplingParams(temperature=0, max_tokens=8)
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 4, "num_kv_blocks": 40}
    with LLM(other, **options) as llm:
        expected = llm.generate([prompt], params)[0].outputs[0].token_ids
    with LLM(model, **options) as llm:
        assert llm.generate([prompt], params)[0].outputs[0].token_ids != expected
        llm.update_weights(other.state_dict())
        assert llm.generate([prompt], params)[0].outputs[0].token_ids == expected


def test_a_closed_engine_leaves_no_cycle() -> None:
    wrapped = TransformersModel(tiny("qwen4_exp"))
    layer = weakref.ref(wrapped.hybrid_layers[0].layer)
    gc.disable()
    try:
        del wrapped
        assert layer() is None
    finally:
        gc.enable()


def test_only_the_tables_stay() -> None:
    model = tiny("qwen4_exp")
    moved = move_but_tables(model, torch.device("meta"))
    stay = [name for name, parameter in moved.named_parameters() if parameter.device.type == "cpu"]
    assert stay == [f"model.layers.{i}.ple.ple_embedding.ngram_embedding.weight" for i in (0, 3)]
    assert {buffer.device.type for buffer in moved.buffers()} == {"meta"}


@pytest.mark.gpu
def test_tables_on_host_on_a_gpu() -> None:
    model = own("qwen4_exp")
    prompts = [{"prompt_token_ids": [5, 6, 1, 7, 8, 9] * n} for n in (1, 4)]
    params = SamplingParams(temperature=0, max_tokens=12)

    def run(**options: Any) -> list[list[int]]:
        with LLM(moved, max_model_len=64, max_num_seqs=4, num_kv_blocks=40, **options) as llm:
            return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    moved = move_but_tables(copy.deepcopy(model), torch.device("cuda"))
    kept = run(ple_tables_on_host=True)
    moved = moved.cuda()
    assert run() == kept
