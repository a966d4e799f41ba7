"""Formats of the cache: what is kept of a number, and attention that reads it, by brute force; then whole engines whose
cache is fp8, against ``transformers`` with the same rounding in its own attention."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import repeat_kv

import gapless
from gapless import ConfigError, SamplingParams
from gapless.attention import reference
from gapless.attention.context import AttentionParams
from gapless.attention.kv_format import LARGEST, decode, encode, put, scale_of
from gapless.cache.spec import KVSpec, VectorSpec, format_key, kept_as
from gapless.model.adapter import TransformersModel
from models import tiny
from test_attention_reference import make_step

FLOAT8 = torch.float8_e4m3fn
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "kv_cache_dtype": "fp8_e4m3",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": 96,
    "block_size": 8,
    "num_kv_blocks": 49,
}


# ---- one number ---------------------------------------------------------------------------------------------------


def nearest(x: float) -> float:
    """The number of e4m3 nearest to ``x``, of two equally near the one with an even mantissa."""
    codes = torch.arange(127, dtype=torch.uint8).view(FLOAT8).double().tolist()
    value = min((abs(min(abs(x), 448.0) - v), code % 2, v) for code, v in enumerate(codes))[2]
    return -value if x < 0 else value


def test_what_is_kept_is_the_nearest_number_of_the_format() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, generator=generator) * 2.0 ** torch.randint(-12, 10, (400,), generator=generator)
    x[:8] = torch.tensor([0.0, 448.0, 464.0, -1e30, torch.inf, 1.0625, 1.1875, 2.0**-10])  # 3 ties
    kept = encode(x[:, None, None], FLOAT8, None)
    assert kept.dtype == FLOAT8
    assert decode(kept, torch.float64, None).flatten().tolist() == [nearest(v) for v in x.tolist()]
    assert encode(torch.tensor([[torch.nan]]), FLOAT8, None).isnan().all()

    scale = torch.tensor([0.125, 3.0])
    pairs = x.view(-1, 2, 1)
    scaled = decode(encode(pairs, FLOAT8, scale), torch.float64, scale).view(-1, 2)
    expected = [[nearest(float(a / 0.125)) * 0.125, nearest(float(b / 3.0)) * 3.0] for a, b in x.view(-1, 2)]
    assert scaled.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_format_nothing_happens(dtype: torch.dtype) -> None:
    x = (torch.randn(5, 2, 3) * 1000).to(dtype)
    assert encode(x, dtype, None) is x
    assert decode(x, dtype, None) is x
    flat = torch.zeros(9, 2, 3, dtype=dtype)
    put(flat, torch.tensor([8, 1, 3, 2, 0]), x)
    assert torch.equal(flat[[8, 1, 3, 2, 0]], x)


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(30))
def test_attention_equals_brute(case: int) -> None:
    seed = 7000 + case
    rng = random.Random(seed)
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2])
    lengths = []
    for _ in range(rng.randint(1, 5)):
        length = rng.randint(1, 40)
        lengths.append((rng.choice([1, rng.randint(1, length), length]), length))
    params = AttentionParams(
        scale=0.3,
        window=rng.choice([None, 1, 5, 16]),
        softcap=rng.choice([None, 2.0]),
        sinks=rng.choice([None, torch.linspace(-2, 3, kv_heads * group)]),
    )
    scales = rng.choice([None, 0.001 + torch.rand(2, kv_heads, generator=torch.Generator().manual_seed(seed))])
    kept = rng.choice([FLOAT8, torch.bfloat16, torch.float32])
    print(f"seed={seed} {lengths=} {kv_heads=} {group=} {params=} {scales=} {kept=}")
    q, k, v, cache, context = make_step(
        rng, lengths, heads=kv_heads * group, kv_heads=kv_heads, size=8, block=rng.choice([1, 4, 8]),
        pad_sequences=rng.choice([0, 2]), pad_tokens=rng.choice([0, 3]), dtype=torch.float32,
    )  # fmt: skip
    cache = encode(cache, kept, None)
    brute = cache.clone()
    expected = reference.attend_brute(q, k, v, brute, context, params, scales)
    got = reference.attend(q, k, v, cache, context, params, scales)
    real = int(context.query_start_loc[-1])
    torch.testing.assert_close(got[:real], expected[:real], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(cache[:, 1:].float(), brute[:, 1:].float(), rtol=0, atol=0)


def test_brute_reads_what_is_kept() -> None:
    """One token that sees itself alone: its output is its own value, rounded."""
    q, k, v, cache, context = make_step(
        random.Random(3), [(1, 1)], heads=2, kv_heads=2, size=8, block=4, dtype=torch.float32
    )
    scales = torch.tensor([[1.0, 1.0], [0.7, 0.02]])
    out = reference.attend_brute(q, k, v, cache.to(FLOAT8), context, AttentionParams(1.0), scales)
    expected = [[nearest(float(x / s)) * float(s) for x in head] for head, s in zip(v[0], scales[1], strict=True)]
    torch.testing.assert_close(out[0], torch.tensor(expected))
    assert (v[0] / scales[1][:, None]).abs().max() > LARGEST / 8


# ---- engines ------------------------------------------------------------------------------------------------------


def rounding_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *, scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Eager attention over keys and values that went through e4m3, with the module's ``kv_scales`` if it has any."""
    scales = getattr(module, "kv_scales", torch.ones(2, key.shape[1], device=key.device))[:, :, None, None]
    key, value = ((x / s).clamp(-448, 448).to(FLOAT8).float() * s for x, s in zip((key, value), scales, strict=True))
    groups = query.shape[1] // key.shape[1]
    scores = query @ repeat_kv(key, groups).mT * scaling + attention_mask
    return (scores.softmax(-1) @ repeat_kv(value, groups)).transpose(1, 2), None


AttentionInterface.register("rounding", rounding_attention)
AttentionMaskInterface.register("rounding", eager_mask)


def oracle(model: Any, prompt: list[int], steps: int) -> list[int]:
    """Greedy tokens of ``transformers`` whose attention rounds."""
    before = model.config._attn_implementation
    model.set_attn_implementation("rounding")
    ids = list(prompt)
    try:
        with torch.no_grad():
            for _ in range(steps):
                given = torch.tensor([ids], device=model.device)
                ids.append(int(model(input_ids=given, use_cache=False).logits[0, -1].argmax()))
    finally:
        model.set_attn_implementation(before)
    return ids[len(prompt) :]


def prompts(seed: int, vocab: int, lengths: list[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]


GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


def tokens(llm: gapless.LLM, given: list[list[int]], **options: Any) -> list[list[int]]:
    results = llm.generate([{"prompt_token_ids": p} for p in given], GREEDY, use_tqdm=False, **options)
    return [list(r.outputs[0].token_ids) for r in results]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "qwen2_window"])
def test_an_fp8_engine_is_transformers_with_rounded_keys_and_values(kind: str) -> None:
    """Long prompts in chunks beside decodes, windows that are left, preemption (few blocks) and prefix hits."""
    model = tiny(kind)
    given = prompts(1, 199, [30, 3, 41, 17])
    given.append(given[0][:24] + given[1])  # a prefix of three blocks
    expected = [oracle(model, p, 14) for p in given]
    for depth in (1, 2, 4):
        with gapless.LLM(model, pipeline_depth=depth, **{**OPTIONS, "num_kv_blocks": 13}) as llm:
            assert tokens(llm, given) == expected
            assert tokens(llm, given[-1:]) == expected[-1:]
            if kind == "llama":
                assert llm.stats()[1].prefix_hit_tokens > 0
                assert llm.stats()[1].preemptions > 0
    with gapless.LLM(model, **{**OPTIONS, "kv_cache_dtype": "auto"}) as llm:
        assert tokens(llm, given) != expected, "rounding changes nothing here: the test proves nothing"


def test_scales_of_a_layer_and_a_head() -> None:
    """They come with the model's own specs, and are part of a prefix's key."""
    model = tiny("qwen3")
    adapted = TransformersModel(model)
    generator = torch.Generator().manual_seed(2)
    specs = []
    for spec, layer in zip(kept_as(adapted.kv_specs, "fp8_e4m3"), model.model.layers, strict=True):
        assert isinstance(spec, KVSpec)
        scales = 0.002 + 0.2 * torch.rand(2, 2, generator=generator)  # small: many numbers saturate
        layer.self_attn.kv_scales = scales
        specs.append(replace(spec, scales=tuple(map(tuple, scales.tolist()))))
    adapted.kv_specs = tuple(specs)
    given = prompts(4, 199, [30, 3, 26])
    expected = [oracle(model, p, 14) for p in given]
    options = {**OPTIONS, "kv_cache_dtype": "auto"}
    for depth in (1, 3):
        with gapless.LLM(adapted, pipeline_depth=depth, **options) as llm:
            assert tokens(llm, given) == expected
            assert tokens(llm, given) == expected  # from the prefix cache
    for layer in model.model.layers:
        del layer.self_attn.kv_scales
    assert expected != [oracle(model, p, 14) for p in given]


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_change_nothing(method: str) -> None:
    model = tiny("llama")
    given = [p * 3 for p in prompts(5, 199, [7, 4, 10])]
    expected = [oracle(model, p, 14) for p in given]
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "min_accepted": 0}
    speculative |= {"min_ngram": 1} if method == "ngram" else {"model": model}
    for depth in (1, 2):
        with gapless.LLM(model, pipeline_depth=depth, speculative=speculative, **OPTIONS) as llm:
            assert tokens(llm, given) == expected
            drafts = llm.stats()[1].drafts
            assert drafts is not None
            assert sum(drafts.proposed) > 0
            if method == "draft_model":
                assert sum(drafts.accepted) > 0
                pools = llm._client._built.runner.state.drafts.proposer.state  # type: ignore[union-attr]
                assert {p.dtype for p in pools if p.dim() == 5} == {FLOAT8}


def test_sleep_and_new_weights() -> None:
    model, other = tiny("llama"), tiny("llama", seed=1)
    given = prompts(6, 199, [20, 9])
    with gapless.LLM(model, **OPTIONS) as llm:
        expected = [oracle(model, p, 14) for p in given]
        assert tokens(llm, given) == expected
        llm.sleep()
        llm.wake()
        assert tokens(llm, given) == expected
        llm.update_weights(other.state_dict())
        assert tokens(llm, given) == [oracle(other, p, 14) for p in given]


def test_adapters(tmp_path: Path) -> None:
    from peft import PeftModel

    from peft_adapters import KINDS, save

    model = tiny("llama")
    folder = save(model, KINDS["a"], tmp_path / "a")
    given = prompts(8, 199, [20, 9])
    base = [oracle(model, p, 14) for p in given]
    adapted = PeftModel.from_pretrained(tiny("llama"), folder).eval().get_base_model()
    with gapless.LLM(model, enable_lora=True, max_lora_rank=8, **OPTIONS) as llm:
        llm.load_lora("a", folder)
        with_adapter = tokens(llm, given, lora="a")
        assert with_adapter == [oracle(adapted, p, 14) for p in given] != base
        assert tokens(llm, given) == base


@pytest.mark.parametrize("kind", ["lfm2", "qwen4_exp", "gemma2", "gpt_oss"])
def test_other_kinds_of_layers_beside_it_agree_at_all_depths(kind: str) -> None:
    """Convolutions, states and indexer keys keep their dtype; sparse attention, soft caps, sinks read what is kept."""
    model = tiny(kind)
    given = prompts(9, 199, [33, 5, 20])
    made = []
    for depth in (1, 2, 4):
        with gapless.LLM(model, pipeline_depth=depth, **{**OPTIONS, "num_kv_blocks": 17}) as llm:
            made.append(tokens(llm, given))
            pools = llm._client._built.runner.state.kv  # type: ignore[union-attr]
            assert {p.dtype for p in pools if p.dim() == 5 and len(p) == 2} >= {FLOAT8}
    with gapless.LLM(model, max_num_seqs=1, **{k: v for k, v in OPTIONS.items() if k != "max_num_seqs"}) as llm:
        made.append([tokens(llm, [p])[0] for p in given])
    assert all(m == made[0] for m in made)


def test_half_the_bytes_are_twice_the_blocks_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gapless")
    sizes = {}
    options = {k: v for k, v in OPTIONS.items() if k not in ("num_kv_blocks", "kv_cache_dtype", "max_num_seqs")}
    for kept in ("auto", "fp8_e4m3"):
        with gapless.LLM(
            tiny("llama").bfloat16(), max_num_seqs=24, kv_cache_dtype=kept, kv_cache_memory_bytes=40_000, **options
        ) as llm:
            assert ("KV cache in float8_e4m3fn: " in caplog.text) == (kept == "fp8_e4m3")
            sizes[kept] = llm._client._built.num_blocks[0]  # type: ignore[union-attr]
    assert sizes["fp8_e4m3"] in (2 * sizes["auto"], 2 * sizes["auto"] + 1)


# ---- refusals and keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["fp16", "float8_e4m3fn", "", None, 8])
def test_another_name_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=.*auto, fp8_e4m3"):
        gapless.EngineConfig(kv_cache_dtype=bad)


def test_a_short_name() -> None:
    assert gapless.EngineConfig(kv_cache_dtype="fp8").kv_cache_dtype == "fp8_e4m3"


def test_a_model_with_specs_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp8_e4m3'.*kv_specs of its own"):
        gapless.LLM(TransformersModel(tiny("llama")), **OPTIONS)


def test_the_format_is_part_of_a_prefix_s_key() -> None:
    plain = (KVSpec(2, 8, 8, "bfloat16"), VectorSpec(8, "float32"))
    fp8 = kept_as(plain, "fp8_e4m3")
    assert fp8[1] == plain[1]
    first = fp8[0]
    assert isinstance(first, KVSpec)
    ones = replace(first, scales=((1.0, 1.0), (1.0, 1.0)))
    twos = replace(first, scales=((2.0, 1.0), (1.0, 1.0)))
    keys = [format_key(specs) for specs in (plain, fp8, (ones,), (twos,), (replace(ones, dtype="bfloat16"),))]
    assert keys[0] == b""
    assert len(set(keys)) == len(keys)
    with gapless.LLM(tiny("llama"), **OPTIONS) as llm:
        root = llm._client._scheduler.states.prefixes._root
        assert root == format_key(llm._client.model.kv_specs) != b""


# ---- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gpt_oss", "qwen4_exp"])
def test_fp8_on_a_gpu(kind: str) -> None:
    """fp32 with an fp8 cache, fused and not: captured or not, at all depths, and as `transformers` that rounds."""
    model = tiny(kind).cuda()
    given = prompts(1, 199, [30, 3, 41, 17])
    options = {**OPTIONS, "device": "cuda"}
    with gapless.LLM(model, pipeline_depth=1, enforce_eager=True, **options) as llm:
        truth = tokens(llm, given)
    for depth in (1, 3):
        with gapless.LLM(model, pipeline_depth=depth, **{**options, "num_kv_blocks": 17}) as llm:
            assert tokens(llm, given) == truth
            llm.sleep()
            llm.wake()
            assert tokens(llm, given) == truth
    if kind in ("llama", "qwen3", "mistral"):
        assert truth == [oracle(model, p, 14) for p in given]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scaled", [False, True])
def test_early_kernels_write_and_read_the_same(scaled: bool) -> None:
    from gapless.attention.triton import attend_cached
    from gapless.device.dependent_launch import LATE
    from gapless.model.ops.triton import rope_qk_norm_kv_write
    from gapless.model.run.few_tokens import early_attend, early_rope

    _, _, _, cache, context = make_step(
        random.Random(5), [(1, 900), (1, 40), (1, 1)], heads=8, kv_heads=2, size=128, block=16, dtype=torch.bfloat16
    )
    context = replace(
        context, **{name: getattr(context, name).cuda() for name in (
            "slot_mapping", "query_start_loc", "seq_lens", "rows", "block_tables")}, decode_only=True,
    )  # fmt: skip
    scales = (0.02 + torch.rand(2, 2, device="cuda")) if scaled else None
    qkv = torch.randn(3, 12 * 128, device="cuda", dtype=torch.bfloat16)
    angle = torch.rand(1000, 64, device="cuda").repeat(1, 2)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    positions = torch.tensor([899, 39, 0], device="cuda")
    caches = [encode(cache.clamp(-400, 400), FLOAT8, None).cuda() for _ in range(2)]
    asked = qkv, positions, cos, sin
    plain = rope_qk_norm_kv_write(*asked, caches[0], context.slot_mapping, 8, 2, kv_scales=scales)
    early = early_rope(*asked, caches[1], context.slot_mapping, 8, None, None, 1e-6, LATE, scales)
    assert torch.equal(plain, early)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
    params = AttentionParams(128**-0.5)
    want = attend_cached(plain, caches[0], context, params, scales)
    context.scratch.clear()
    assert torch.equal(early_attend(plain, caches[0], context, params, LATE, scales), want)
    k, v = (
        decode(half.flatten(0, 1), torch.float32, scale_of(scales, i))[context.slot_mapping]
        for i, half in enumerate(caches[0])
    )
    brute = reference.attend_brute(plain, k, v, caches[0].clone(), context, params, scales)
    torch.testing.assert_close(want.float(), brute.float(), rtol=2e-2, atol=2e-2)
