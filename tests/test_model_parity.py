"""Greedy generation through TransformersModel and a paged cache equals ``transformers``' own generate."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from transformers import PreTrainedModel

from gapless.cache.spec import StateSpec
from gapless.model.adapter import TransformersModel
from gapless.model.load.loading import load_model, load_tokenizer
from gapless.model.load.smollm2 import smollm2_folder
from gapless.model.probe import probe_parity
from models import FOUR_KINDS, HYBRID_KINDS, MORE_KINDS, VOCAB_SIZE, tiny
from paged import PagedDriver, greedy


def generate(model: PreTrainedModel, prompt: list[int], steps: int) -> tuple[list[int], torch.Tensor]:
    """Tokens and logits of ``transformers``, which is told not to stop early."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=steps,
        min_new_tokens=steps,
        eos_token_id=-1,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits)


def check_greedy(model: PreTrainedModel, steps: int, pad: int = 0) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (23, 1, 9)]
    wrapped = TransformersModel(model)
    assert probe_parity(wrapped) < 1e-4
    tokens, logits = greedy(wrapped, prompts, steps, pad)
    for row, prompt in enumerate(prompts):
        expected, expected_logits = generate(model, prompt, steps)
        assert tokens[row] == expected
        torch.testing.assert_close(logits[row], expected_logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", FOUR_KINDS)
def test_greedy_equals_transformers(kind: str) -> None:
    check_greedy(tiny(kind), 64)


def test_padding_changes_nothing() -> None:
    check_greedy(tiny("mistral"), 6, pad=3)


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_greedy_equals_transformers_more(kind: str) -> None:
    check_greedy(tiny(kind), 24)


@pytest.mark.parametrize("kind", HYBRID_KINDS)
@pytest.mark.parametrize("pad", [0, 3])
def test_greedy_equals_transformers_hybrid(kind: str, pad: int) -> None:
    check_greedy(tiny(kind), 24, pad)


@pytest.mark.parametrize("kind", ["llama", *HYBRID_KINDS])
def test_tokens_that_are_taken_back_leave_nothing_behind(kind: str) -> None:
    """Steps of a token and three more, of which only the first ones are right; the next step begins after those."""
    model, rng, most = tiny(kind), random.Random(7), 3
    rows = [[rng.randrange(1, VOCAB_SIZE) for _ in range(n)] for n in (61, 44)]
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    driver = PagedDriver(TransformersModel(model, num_drafts=most), 2, 72)
    driver.tokens = [list(row) for row in rows]
    driver.step([(0, 19), (1, 2)])
    while any(done < len(row) for done, row in zip(driver.done, rows, strict=True)):
        plan, right = [], []
        for row in (0, 1):
            done, left = driver.done[row], len(rows[row]) - driver.done[row]
            if left:
                right.append(min(rng.randint(1, most + 1), left))
                wrong = [rng.randrange(1, VOCAB_SIZE) for _ in range(most + 1 - right[-1])]
                driver.tokens[row] = rows[row][: done + right[-1]] + wrong
                plan.append((row, most + 1))
        logits = driver.step(plan, every=True)
        for i, (row, _) in enumerate(plan):
            first, count = driver.done[row] - most - 1, right[i]
            got = logits[i * (most + 1) :][:count]
            torch.testing.assert_close(got, expected[row][first : first + count], atol=1e-4, rtol=1e-4)
            driver.done[row] = first + count


def test_kv_specs_name_the_windows() -> None:
    specs = TransformersModel(tiny("gemma2")).kv_specs
    assert [spec.window for spec in specs] == [10, None, 10]
    assert {(spec.num_kv_heads, spec.head_dim_k, spec.dtype) for spec in specs} == {(2, 8, "float32")}
    assert [spec.window for spec in TransformersModel(tiny("mistral")).kv_specs] == [12] * 3
    hybrid = TransformersModel(tiny("qwen4_exp"), num_drafts=3).kv_specs
    assert {spec.window for spec in hybrid} == {None, 10}  # one table for all convolutions
    assert [spec.slots for spec in hybrid if isinstance(spec, StateSpec)] == [4, 4, 4]
    wide = tiny("mistral", sliding_window=4096)  # wider than any context: no window
    assert [spec.window for spec in TransformersModel(wide).kv_specs] == [None] * 3


def test_callers_model_is_not_changed_and_weights_are_shared() -> None:
    model = tiny("llama")
    model.train()
    before = model.config.to_dict(), model.config._attn_implementation
    keys = [sorted(vars(module)) for module in model.modules()]
    wrapped = TransformersModel(model)
    probe_parity(wrapped)
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    assert [sorted(vars(module)) for module in model.modules()] == keys
    assert all(module.training for module in model.modules())
    pairs = list(zip(model.parameters(), wrapped.module.parameters(), strict=True))
    # One storage, so that a trainer's updates are seen; two parameters, so that moving one model leaves the other.
    assert all(a.data_ptr() == b.data_ptr() and a is not b for a, b in pairs)
    assert not any(b.requires_grad for _, b in pairs)
    assert wrapped.weight_bytes == sum(p.numel() * 4 for p in model.parameters())
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():  # what a trainer does
            parameter.mul_(0.9)
    prompt = [5, 6, 7, 8]
    assert greedy(wrapped, [prompt], 8)[0][0] == generate(model, prompt, 8)[0]


def test_gradients_still_flow_through_the_callers_model() -> None:
    model = tiny("llama")
    logits = greedy(TransformersModel(model), [[3, 4, 5]], 2)[1]
    assert not logits.requires_grad
    assert not logits.is_inference()
    loss = model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_two_models_in_two_threads() -> None:
    """Nothing of a step is kept outside of it."""
    models = [tiny("llama"), tiny("mistral", seed=1)]
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2]]
    expected = [generate(model, prompt, 40)[0] for model, prompt in zip(models, prompts, strict=True)]
    wrapped, got = [TransformersModel(model) for model in models], [[], []]

    def work(i: int) -> None:
        for _ in range(3):
            got[i] = greedy(wrapped[i], [prompts[i]], 40)[0][0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected


def test_attention_backend_is_called_for_every_layer() -> None:
    from gapless.attention import reference

    calls = []

    def backend(*args: object) -> torch.Tensor:
        calls.append(args)
        return reference.attend_brute(*args)  # type: ignore[arg-type]

    model = tiny("qwen3")
    assert (
        greedy(TransformersModel(model, attention=backend), [[3, 4, 5]], 3)[0][0]
        == generate(model, [3, 4, 5], 3)[0]
    )
    assert len(calls) == 3 * 3


def test_longrope_is_fixed_by_the_longest_context() -> None:
    """Short factors equal transformers within the original context; long ones do not change with the
    batch."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 64,
    }
    model = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=64, sliding_window=None)
    short = TransformersModel(model)
    assert short.max_position == 64
    prompt = list(range(5, 35))
    assert greedy(short, [prompt], 20)[0][0] == generate(model, prompt, 20)[0]

    long = TransformersModel(model, max_model_len=256)
    assert long.max_position == 512
    probe_parity(long)
    alone = PagedDriver(long, 1, 200)
    alone.tokens = [[7] * 30]
    both = PagedDriver(long, 2, 200)
    both.tokens = [[7] * 30, [9] * 120]
    torch.testing.assert_close(
        both.step([(0, 30), (1, 120)])[0], alone.step([(0, 30)])[0], atol=1e-4, rtol=1e-4
    )
    over = [
        3 + i % 90 for i in range(100)
    ]  # beyond the original context, transformers takes the long factors too
    assert greedy(long, [over], 8)[0][0] == generate(model, over, 8)[0]
    assert (
        greedy(short, [prompt], 5)[0][0] == generate(model, prompt, 5)[0]
    )  # the long copy changed nothing here


@pytest.mark.model
def test_smollm2_equals_transformers() -> None:
    if not smollm2_folder().exists():
        pytest.skip("SmolLM2 is not in the cache; run: python -m gapless.model.load.smollm2")
    loaded = load_model(smollm2_folder(), device=torch.device("cpu"))
    tokenizer = load_tokenizer(loaded.tokenizer_source)
    assert tokenizer is not None
    questions = [
        "What is 2+2?",
        "Name a colour.",
        "Why is the sky blue?",
        "Hi",
        "Write a haiku.",
        "Who wrote Hamlet?",
    ]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True
        )
        for q in questions
    ] + ["The capital of France is", "1, 2, 3, 4,"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    tokens, _ = greedy(loaded.model, prompts, 16)
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)
    for row, prompt in enumerate(prompts):
        assert tokens[row] == generate(own, prompt, 16)[0], texts[row]
    assert "Paris" in tokenizer.decode(tokens[6])
