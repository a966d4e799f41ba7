"""The fused decoder gives the logits of the modules that it replaces, and refuses what it would compute otherwise."""

from __future__ import annotations

import pytest
import torch

from gapless.attention import reference
from gapless.attention.context import AttentionContext, AttentionParams
from gapless.attention.kv_format import decode, scale_of
from gapless.model.adapter import TransformersModel
from gapless.model.describe import Unknown, describe
from gapless.model.ops import reference as ops_reference
from gapless.model.probe import probe_parity
from gapless.model.run.model import DecoderModel
from models import tiny
from paged import greedy


def attend_cached(
    q: torch.Tensor,
    cache: torch.Tensor,
    context: AttentionContext,
    params: AttentionParams,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reference writes k and v itself, so it is handed what the cache holds already."""
    flat = cache.flatten(1, 2)[:, context.slot_mapping]
    k, v = (decode(flat[i], q.dtype, scale_of(kv_scales, i)) for i in (0, 1))
    return reference.attend(q, k, v, cache, context, params, kv_scales)


def described(plain: TransformersModel, positions: int = 64) -> DecoderModel:
    """Run by the definition of each part."""
    return DecoderModel(plain, describe(plain, positions), ops_reference, attend_cached)


def fused(kind: str, **changes: object) -> tuple[DecoderModel, TransformersModel]:
    plain = TransformersModel(tiny(kind, **changes))
    return described(plain, 512), plain


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_same_tokens_and_logits(kind: str) -> None:
    decoder, plain = fused(kind)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [9, 9, 4]]
    tokens, logits = greedy(decoder, prompts, 20, pad=2)
    expected, expected_logits = greedy(plain, prompts, 20)
    assert tokens == expected
    assert torch.allclose(logits, expected_logits, atol=1e-4)
    assert probe_parity(plain, fast=decoder) < 1e-4


def test_an_update_in_place_of_the_caller_s_weights_is_seen() -> None:
    model = tiny("qwen3")
    plain = TransformersModel(model)
    decoder = described(plain)
    before, _ = greedy(decoder, [[5, 6, 7]], 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    after, logits = greedy(decoder, [[5, 6, 7]], 8)
    expected, expected_logits = greedy(plain, [[5, 6, 7]], 8)
    assert after == expected != before
    assert torch.allclose(logits, expected_logits, atol=1e-4)


@pytest.mark.parametrize(
    "kind",
    ["gemma2", "gemma3", "olmo2", "olmo3", "phi3", "granite", "smollm3", "gpt_oss", "qwen3_moe", "mixtral"],
)
def test_other_kinds_of_parts(kind: str) -> None:
    """Norms with offsets and behind parts, gelu, merged checkpoints, multipliers, soft caps, layers without rotary
    embedding, sinks, mixtures of experts as modules."""
    decoder, plain = fused(kind)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [9, 9, 4]]
    tokens, logits = greedy(decoder, prompts, 20, pad=2)
    expected, expected_logits = greedy(plain, prompts, 20)
    assert tokens == expected
    assert torch.allclose(logits, expected_logits, atol=1e-4)
    assert probe_parity(plain, fast=decoder) < 1e-4


@pytest.mark.parametrize("kind", ["lfm2", "qwen4_exp"])
def test_what_no_kind_fits_is_refused_by_name(kind: str) -> None:
    with pytest.raises(Unknown, match=r"layers"):
        fused(kind)
