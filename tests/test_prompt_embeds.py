"""Prompts some tokens of which are given by their embeddings, against ``transformers`` with ``inputs_embeds``."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import gapless
from engines import check_idle, wait_until
from gapless import ConfigError, RequestError, SamplingParams
from gapless.batch.plan import EmbedUpload
from gapless.device.cpu import CpuDevice
from gapless.engine import build
from gapless.engine.client import Submission
from gapless.model.adapter import TransformersModel
from gapless.model.parts.decoder import Embedding
from gapless.request.prompt_embeds import OVERRIDDEN, PromptEmbeds
from models import VOCAB_SIZE, tiny
from paged import greedy
from proof.hash_model import HashModel
from test_fused import fused

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_prompt_embeds": 48,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 96,
    "block_size": 8,
    "num_kv_blocks": 49,
}
STEPS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)


def scale(model: Any) -> float:
    """Of what the model's own embedding gives, so that random rows weigh as much as tokens do."""
    with torch.no_grad():
        return float(model.get_input_embeddings()(torch.arange(3, VOCAB_SIZE, device=model.device)).std())


def make_prompt(model: Any, seed: int, length: int, count: int) -> dict[str, Any]:
    """Random ids, ``count`` of which random rows replace."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    return {
        "prompt_token_ids": [rng.randrange(3, VOCAB_SIZE) for _ in range(length)],
        "prompt_embeds_positions": sorted(rng.sample(range(length), count)),
        "prompt_embeds": scale(model) * torch.randn(count, model.config.hidden_size, generator=generator),
    }


def oracle(model: Any, prompt: dict[str, Any], steps: int = STEPS) -> list[int]:
    """Greedy tokens of ``transformers`` over ``inputs_embeds``."""
    table = model.get_input_embeddings()
    with torch.no_grad():
        if "prompt_token_ids" in prompt:
            rows = table(torch.tensor([prompt["prompt_token_ids"]], device=model.device)).clone()
            if "prompt_embeds" in prompt:
                rows[0, prompt["prompt_embeds_positions"]] = prompt["prompt_embeds"].to(rows)
        else:
            rows = prompt["prompt_embeds"][None].to(table.weight)
        made = []
        for _ in range(steps):
            made.append(int(model(inputs_embeds=rows, use_cache=False).logits[0, -1].argmax()))
            rows = torch.cat([rows, table(torch.tensor([made[-1:]], device=model.device))], 1)
    return made


def tokens(llm: gapless.LLM, prompts: list[dict[str, Any]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(r.outputs[0].token_ids) for r in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3", "granite", "qwen3_moe", "lfm2"])
def test_random_rows_are_inputs_embeds_of_transformers(kind: str) -> None:
    """Chunks, decodes of others beside them, embeddings of the whole prompt, and none; gemma's embedding is scaled."""
    model = tiny(kind)
    prompts = [make_prompt(model, i, length, count) for i, (length, count) in enumerate([(30, 9), (5, 1), (41, 40)])]
    prompts.append({"prompt_embeds": make_prompt(model, 7, 19, 19)["prompt_embeds"]})
    prompts.append({"prompt_token_ids": prompts[0]["prompt_token_ids"]})
    prompts.append(make_prompt(model, 8, 1, 1))  # computed in a decode step
    expected = [oracle(model, p) for p in prompts]
    assert expected[0] != expected[4]
    for depth in (1, 2, 4):
        with gapless.LLM(model, pipeline_depth=depth, **OPTIONS) as llm:
            assert tokens(llm, prompts) == expected
            assert tokens(llm, prompts) == expected  # now with what the prefix cache holds
            check_idle(llm)
            assert llm._client._scheduler.states.embeds.num_free == 48


def test_preemption_computes_from_the_same_rows() -> None:
    model = tiny("llama")
    prompts = [make_prompt(model, 20 + i, 26, 10) for i in range(4)]
    expected = [oracle(model, p) for p in prompts]
    for depth in (1, 3):
        for caching in (True, False):
            options = {**OPTIONS, "num_kv_blocks": 14, "enable_prefix_caching": caching}
            with gapless.LLM(model, pipeline_depth=depth, **options) as llm:
                assert tokens(llm, prompts) == expected
                assert llm.stats()[1].preemptions > 0
                assert llm._client._scheduler.states.embeds.num_free == 48


def test_rows_of_the_table_have_new_owners_while_steps_are_in_flight() -> None:
    """A table for one and a half requests, in random order of lengths; most finish while others wait for their rows."""
    model = tiny("llama", num_hidden_layers=2)
    rng = random.Random(11)
    prompts = [make_prompt(model, 40 + i, rng.randrange(12, 24), rng.randrange(4, 12)) for i in range(14)]
    params = [SamplingParams(temperature=0, max_tokens=rng.randrange(1, 9), ignore_eos=True) for _ in prompts]
    expected = [oracle(model, p, int(s.max_tokens or 0)) for p, s in zip(prompts, params, strict=True)]
    for depth in (1, 2, 4):
        with gapless.LLM(model, pipeline_depth=depth, **{**OPTIONS, "max_prompt_embeds": 16}) as llm:
            results = llm.generate(prompts, params, use_tqdm=False)
            assert [list(r.outputs[0].token_ids) for r in results] == expected
            assert llm._client._scheduler.states.embeds.num_free == 16


def test_a_prefix_is_found_again_with_equal_embeddings_only() -> None:
    model = tiny("llama")
    first = make_prompt(model, 60, 40, 3)
    first["prompt_embeds_positions"] = [17, 18, 25]
    changed = {**first, "prompt_embeds": first["prompt_embeds"].clone()}
    changed["prompt_embeds"][2, 0] += 1e-3  # in the fourth block
    moved = {**first, "prompt_embeds_positions": [16, 18, 25]}
    plain = {"prompt_token_ids": first["prompt_token_ids"]}
    other_ids = {**first, "prompt_token_ids": list(first["prompt_token_ids"])}
    other_ids["prompt_token_ids"][18] = 3  # replaced anyway
    with gapless.LLM(model, **OPTIONS) as llm:
        hits = []
        for prompt in (first, first, changed, moved, plain, other_ids):
            before = llm.stats()[1].prefix_hit_tokens
            assert tokens(llm, [prompt]) == [oracle(model, prompt)]
            hits.append(llm.stats()[1].prefix_hit_tokens - before)
    assert hits == [0, 32, 24, 16, 16, 32]
    fresh = make_prompt(model, 61, 40, 30)
    with gapless.LLM(model, **{**OPTIONS, "max_prompt_embeds": 60}) as llm:  # two at once, in different rows
        assert tokens(llm, [fresh, fresh]) == [oracle(model, fresh)] * 2
        assert llm.stats()[1].prefix_hit_tokens == 32


def test_a_prefix_hit_after_the_rows_have_gone_to_another() -> None:
    """The second request finds what the first one computed; between them a third had the first one's rows."""
    model = tiny("llama")
    a, b = make_prompt(model, 70, 33, 16), make_prompt(model, 71, 33, 16)
    with gapless.LLM(model, **{**OPTIONS, "max_prompt_embeds": 16}) as llm:
        assert tokens(llm, [a, b, a]) == [oracle(model, p) for p in (a, b, a)]
        assert llm.stats()[1].prefix_hit_tokens == 32


def test_an_abort_gives_the_rows_back() -> None:
    model = tiny("llama")
    prompts = [make_prompt(model, 80 + i, 20, 20) for i in range(4)]
    with gapless.LLM(model, **OPTIONS) as llm:
        client = llm._client
        done: list[Any] = []
        groups = client.submit(
            [
                Submission(client.encode(p), replace(GREEDY, max_tokens=70), done.append, done.append) for p in prompts
            ]
        )
        wait_until(lambda: client._scheduler.stats.generated_tokens > 5, "some tokens")
        for group in groups:
            client.abort_group(group)
        wait_until(lambda: len(done) == 4, "the ends")
        check_idle(llm)
        assert client._scheduler.states.embeds.num_free == 48
        assert tokens(llm, prompts[:1]) == [oracle(model, prompts[0])]


def test_sampling_parameters_that_count_tokens_pass_over_embeddings() -> None:
    """A repetition penalty is of ids; what has none is not counted, and n completions share one prompt."""
    model = tiny("llama")
    prompt = make_prompt(model, 90, 20, 6)
    params = SamplingParams(
        temperature=1.0, seed=4, n=3, max_tokens=10, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=2,
        ignore_eos=True,
    )  # fmt: skip
    made = []
    for depth in (1, 3):
        with gapless.LLM(model, pipeline_depth=depth, **OPTIONS) as llm:
            for _ in range(2):
                (result,) = llm.generate([prompt], params, use_tqdm=False)
                made.append([list(c.token_ids) for c in result.outputs])
                assert result.prompt_token_ids == prompt["prompt_token_ids"]
    assert all(m == made[0] for m in made)
    assert len(set(map(tuple, made[0]))) == 3


def test_new_weights_and_sleep_keep_the_rows() -> None:
    model, other = tiny("llama"), tiny("llama", seed=1)
    prompt = make_prompt(model, 95, 30, 12)
    with gapless.LLM(model, **OPTIONS) as llm:
        assert tokens(llm, [prompt]) == [oracle(model, prompt)]
        llm.update_weights(other.state_dict())
        llm.sleep()
        llm.wake()
        assert tokens(llm, [prompt]) == [oracle(other, prompt)]


def test_the_numbers_are_the_caller_s_until_it_submits() -> None:
    """What the caller does to its tensor afterwards changes nothing; other dtypes and gradients are taken."""
    model = tiny("llama")
    prompt = make_prompt(model, 97, 18, 5)
    expected = oracle(model, prompt)
    with gapless.LLM(model, **OPTIONS) as llm:
        rows = prompt["prompt_embeds"].double().requires_grad_()
        encoded = llm._client.encode({**prompt, "prompt_embeds": rows})
        with torch.no_grad():
            rows.zero_()
        assert encoded.embeds is not None
        assert tokens(llm, [{**prompt, "prompt_embeds": prompt["prompt_embeds"].double()}]) == [expected]
        assert torch.equal(torch.from_numpy(encoded.embeds.data.copy()).view(torch.float32), prompt["prompt_embeds"])


@pytest.mark.parametrize("kept", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("device", [{"debug": True}, {"delays": 3}, {"delays": 4}])
def test_nothing_undeclared_is_touched_and_pauses_of_the_streams_change_nothing(
    device: dict[str, Any], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", num_hidden_layers=1)
    prompts = [make_prompt(model, 100 + i, 14 + i, 6) for i in range(5)]
    options = {**OPTIONS, "max_prompt_embeds": 12, "num_kv_blocks": 10, "kv_cache_dtype": kept}
    with gapless.LLM(model, pipeline_depth=1, **options) as llm:
        expected = tokens(llm, prompts)
    assert kept != "auto" or expected == [oracle(model, p) for p in prompts]
    monkeypatch.setattr(build, "CpuDevice", partial(CpuDevice, **device))
    with gapless.LLM(model, pipeline_depth=3, **options) as llm:
        assert tokens(llm, prompts) == expected


class WithRows:
    """A model every step of which has these embeddings."""

    def __init__(self, model: Any, rows: torch.Tensor) -> None:
        self.model, self.rows = model, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, context: Any, *rest: Any) -> None:
        context.prompt_embeds = self.rows
        self.model.forward(ids, positions, context, *rest)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "granite"])
def test_a_described_decoder_takes_the_same_rows(kind: str) -> None:
    """Gemma scales what it looks up, Granite what it is given too."""
    options = {"embedding_multiplier": 3.0} if kind == "granite" else {}
    model = tiny(kind, **options)
    decoder, plain = fused(kind, **options)
    assert decoder.decoder.embedding.given == (3.0 if kind == "granite" else 1.0)
    rows = scale(model) * torch.randn(4, 48, generator=torch.Generator().manual_seed(5))
    ids = [[5, -1, -4, 9, -2, 30, 31, -3, 8], [-3], [7, -2]]
    assert decoder.enable_prompt_embeds() == TransformersModel(model).enable_prompt_embeds() == 48
    made, logits = greedy(WithRows(decoder, rows), ids, 5)
    expected, wanted = greedy(WithRows(plain, rows), ids, 5)
    assert made == expected
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_embeds": torch.zeros(2, 47)}, r"shape \(2, 47\).*\[tokens, 48\]"),
        ({"prompt_embeds": torch.zeros(48)}, r"shape \(48,\)"),
        ({"prompt_embeds": torch.zeros(0, 48)}, "shape"),
        ({"prompt_embeds": [[0.0] * 48] * 2}, "of type list"),
        ({"prompt_embeds": torch.zeros(2, 48, dtype=torch.int64)}, "floating-point"),
        ({"prompt_embeds": torch.full((2, 48), torch.nan)}, "not finite"),
        ({"prompt_embeds": torch.zeros(49, 48)}, "49 rows, more than max_prompt_embeds=48"),
        ({"prompt_embeds_positions": [0]}, "1 entries and prompt_embeds 2 rows"),
        ({"prompt_embeds_positions": [2, 1]}, "must rise"),
        ({"prompt_embeds_positions": [1, 1]}, "must rise"),
        ({"prompt_embeds_positions": [0, 9]}, r"prompt_embeds_positions\[1\] = 9|9.*0 to 2"),
        ({"prompt_embeds_positions": [0, -1]}, "prompt_embeds_positions"),
        ({"prompt": "text"}, "unknown prompt field 'prompt'"),
        ({"prompt_embeds_position": [1]}, "prompt_embeds_positions"),
    ],
)
def test_bad_prompts_are_refused(changes: dict[str, Any], message: str) -> None:
    good = {
        "prompt_token_ids": [5, 6, 7], "prompt_embeds_positions": [0, 2], "prompt_embeds": torch.zeros(2, 48),
    }  # fmt: skip
    with shared_engine() as llm:
        with pytest.raises(RequestError, match=message):
            llm.generate([{**good, **changes}], GREEDY, use_tqdm=False)
        for name in ("prompt_token_ids", "prompt_embeds_positions"):
            with pytest.raises(RequestError, match="prompt_embeds_positions"):
                llm.generate([{k: v for k, v in good.items() if k != name}], GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match="prompt_logprobs=1"):
            llm.generate([good], SamplingParams(prompt_logprobs=1), use_tqdm=False)
        assert tokens(llm, [good])


def shared_engine() -> gapless.LLM:
    return gapless.LLM(tiny("llama", num_hidden_layers=1), check_model=False, **OPTIONS)


def test_an_engine_without_a_table_refuses_them() -> None:
    with gapless.LLM(tiny("llama"), **{**OPTIONS, "max_prompt_embeds": 0}) as llm:
        with pytest.raises(RequestError, match="max_prompt_embeds"):
            llm.generate([{"prompt_embeds": torch.zeros(2, 48)}], GREEDY, use_tqdm=False)
        assert llm._client._built.runner.state.embeds is None  # type: ignore[union-attr]


def test_models_and_options_that_cannot_are_refused_by_name() -> None:
    with pytest.raises(gapless.UnsupportedModelError, match=r"Qwen4Exp.*cannot take embeddings for ids"):
        gapless.LLM(tiny("qwen4_exp"), **OPTIONS)
    with pytest.raises(ConfigError, match=r"max_prompt_embeds=48: .*HashModel.* takes ids only"):
        gapless.LLM(HashModel(), **OPTIONS)
    with pytest.raises(ConfigError, match=r"max_prompt_embeds=48 .*speculative='ngram'"):
        gapless.EngineConfig(max_prompt_embeds=48, speculative="ngram,num_speculative_tokens=2")  # type: ignore[arg-type]
    for bad in (-1, True, 1.5, None):
        with pytest.raises(ConfigError, match="max_prompt_embeds"):
            gapless.EngineConfig(max_prompt_embeds=bad)  # type: ignore[arg-type]


# ---- parts --------------------------------------------------------------------------------------------------------


def test_embeddings_of_ids_and_rows() -> None:
    table, overrides = torch.randn(7, 3), torch.randn(4, 3)
    ids = torch.tensor([0, -1, 6, -4, 0])
    embedding = Embedding(table, scale=4.0, given=2.0)
    made = embedding(ids, overrides)
    expected = torch.stack([4 * table[0], 2 * overrides[0], 4 * table[6], 2 * overrides[3], 4 * table[0]])
    assert torch.equal(made, expected)
    overrides[1:3] = torch.nan  # rows that nobody has
    assert torch.equal(embedding(ids, overrides), made)
    assert torch.equal(embedding(ids.abs(), None), 4 * table[ids.abs()])


def test_what_the_prefix_cache_goes_by() -> None:
    data = np.arange(12, dtype=np.uint8).reshape(3, 4)
    embeds = PromptEmbeds(np.array([1, 4, 5], np.int32), data)
    assert embeds.over(np.arange(6, dtype=np.int32)).tolist() == [0, OVERRIDDEN, 2, 3, OVERRIDDEN, OVERRIDDEN]
    a, b, c = embeds.digests
    assert len({a, b, c}) == 3
    assert [embeds.digests_of(*r) for r in ((0, 2), (2, 4), (4, 6), (0, 6))] == [a, b"", b + c, a + b + c]


def test_an_upload_is_plain_data() -> None:
    upload = EmbedUpload(np.zeros(1, np.int32), np.zeros((1, 4), np.uint8))
    with pytest.raises(AttributeError):
        upload.rows = np.zeros(2, np.int32)  # type: ignore[misc]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "granite", "qwen3_moe"])
def test_random_rows_on_a_gpu(kind: str) -> None:
    """fp32, captured and not, fused and not; the table has few rows, the cache few blocks; rows lie on the device."""
    model = tiny(kind).cuda()
    prompts = [make_prompt(model, 120 + i, 14 + 2 * i, 8) for i in range(8)]
    for prompt in prompts[::2]:
        prompt["prompt_embeds"] = prompt["prompt_embeds"].cuda()
    expected = [oracle(model, p) for p in prompts]
    options = {**OPTIONS, "device": "cuda", "max_prompt_embeds": 20, "num_kv_blocks": 14}
    for depth, eager in ((1, True), (1, False), (3, False)):
        with gapless.LLM(model, pipeline_depth=depth, enforce_eager=eager, **options) as llm:
            assert tokens(llm, prompts) == expected
            assert tokens(llm, prompts) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_in_steps_of_few_tokens_on_a_gpu() -> None:
    """bf16, where a prompt of one token is computed by the kernels for few tokens: depth 3 gives the tokens of depth 1,
    and another embedding other tokens."""
    model = tiny("llama", hidden_size=256, head_dim=64, num_attention_heads=4, intermediate_size=512).bfloat16().cuda()
    prompts = [make_prompt(model, 140 + i, 1, 1) for i in range(3)]
    options = {**OPTIONS, "device": "cuda", "max_num_seqs": 1}
    made = []
    for depth in (1, 3):
        with gapless.LLM(model, pipeline_depth=depth, **options) as llm:
            made.append([tokens(llm, [p])[0] for p in prompts])
    assert made[0] == made[1]
    assert len(set(map(tuple, made[0]))) == 3
