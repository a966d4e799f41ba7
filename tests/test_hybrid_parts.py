"""Parts that keep a past, packed and in pieces, against ``transformers``' own modules over each whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4

from gapless.model.parts.delta_net import gated_delta_rule
from gapless.model.parts.ple import NGramHash, ngram_ids
from gapless.model.parts.short_conv import short_conv
from gapless.model.parts.sparse_attention import SparseParams, sparse_attend, write_index_keys
from models import HYBRID_KINDS, tiny_config
from ragged import Ragged, Step, drive

LENGTHS = (23, 1, 90, 6)
STYLES = [("whole", 0), ("chunks", 0), ("steps", 0), ("ones", 0), ("chunks", 3), ("steps", 3)]
CASES = [(style, drafts, seed) for seed, (style, drafts) in enumerate(STYLES)]
each_style = pytest.mark.parametrize(("style", "drafts", "seed"), CASES, ids=[f"{s}-{d}" for s, d, _ in CASES])


def random_inputs(seed: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, *shape, generator=generator) for n in LENGTHS]


def close(got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 2e-5) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@each_style
@pytest.mark.parametrize("bias", [False, True])
def test_lfm2_short_conv(style: str, drafts: int, seed: int, bias: bool) -> None:
    torch.manual_seed(seed)
    module = modeling_lfm2.Lfm2ShortConv(tiny_config("Lfm2", layer_types=["conv"] * 3, conv_bias=bias), 0)
    inputs = random_inputs(seed, 48)
    ragged = Ragged(len(LENGTHS), 96, seed)
    cache = ragged.cache(48)

    def part(hidden: torch.Tensor, s: Step) -> torch.Tensor:
        b, c, x = module.in_proj(hidden).chunk(3, -1)
        mixed = short_conv(
            b * x, cache, s.block_tables, s.slot_mapping, s.token_rows, s.positions, module.conv.weight[:, 0],
            module.conv.bias,
        )  # fmt: skip
        return module.out_proj(c * mixed)

    with torch.no_grad():
        close(drive(ragged, inputs, part, style=style, drafts=drafts, seed=seed), [module(x[None])[0] for x in inputs])


@each_style
def test_dilated_short_conv(style: str, drafts: int, seed: int) -> None:
    """Against a plain convolution with dilation 3, as PLE has it."""
    weight = torch.randn(10, 4, generator=torch.Generator().manual_seed(seed))
    inputs = random_inputs(seed, 10)
    ragged = Ragged(len(LENGTHS), 96, seed)
    cache = ragged.cache(10)

    def part(x: torch.Tensor, s: Step) -> torch.Tensor:
        return short_conv(
            x, cache, s.block_tables, s.slot_mapping, s.token_rows, s.positions, weight, dilation=3, silu=True
        )

    expected = [
        torch.nn.functional.silu(
            torch.nn.functional.conv1d(
                torch.nn.functional.pad(x.t()[None], (9, 0)), weight[:, None], groups=10, dilation=3
            )
        )[0].t()
        for x in inputs
    ]
    close(drive(ragged, inputs, part, style=style, drafts=drafts, seed=seed), expected)


@each_style
def test_gated_delta_rule(style: str, drafts: int, seed: int) -> None:
    """Against both forms of ``transformers``: recurrent and chunked."""
    heads, key_heads, dk, dv = 4, 2, 6, 5
    generator = torch.Generator().manual_seed(seed)
    sizes = [key_heads * dk, key_heads * dk, heads * dv, heads, heads]
    inputs = [torch.randn(n, sum(sizes), generator=generator) for n in LENGTHS]
    ragged = Ragged(len(LENGTHS), 96, seed)
    states = torch.full((len(LENGTHS) + 1, 1 + drafts, heads, dk, dv), float("nan"))

    def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, g, beta = x.split(sizes, -1)
        q, k, v = q.unflatten(-1, (-1, dk)), k.unflatten(-1, (-1, dk)), v.unflatten(-1, (-1, dv))
        return q, k, v, -torch.nn.functional.softplus(g), beta.sigmoid()

    def part(x: torch.Tensor, s: Step) -> torch.Tensor:
        return gated_delta_rule(*split(x), states, s.query_start_loc, s.seq_lens, s.rows).flatten(1)

    got = drive(ragged, inputs, part, style=style, drafts=drafts, seed=seed)
    for form in (qwen4.torch_recurrent_gated_delta_rule, qwen4.torch_chunk_gated_delta_rule):
        expected = []
        for x in inputs:
            q, k, v, g, beta = split(x[None])
            q, k = q.repeat_interleave(2, 2), k.repeat_interleave(2, 2)  # 5.17 leaves it to the caller
            expected.append(form(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0][0].flatten(1))
        close(got, expected)
    assert torch.isnan(states[-1]).all()  # the null row


def qwen4_config(**changes: Any) -> Any:
    name, options = HYBRID_KINDS["qwen4_exp"]
    return tiny_config(name, **{**options, **changes})


@each_style
def test_ngram_ids(style: str, drafts: int, seed: int) -> None:
    """Ends of sequence at every distance; the table keeps what rejected drafts left behind."""
    for size in (2, 3, 4):
        module = qwen4.Qwen4ExpTextNGramEmbedding(qwen4_config(ngram_size=size, ple_embed_dim=12), 12, 0, 1)
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randint(1, 6, (n,), generator=generator) for n in LENGTHS]  # 1 ends a sequence
        ragged = Ragged(len(LENGTHS), 96, seed)
        table = torch.full((len(LENGTHS) + 1, 96), 10**6, dtype=torch.int32)
        spec = NGramHash(size, 1, module.layer_multipliers, module.ngram_heads_vocab_sizes, module.ngram_heads_offsets)

        def part(ids: torch.Tensor, s: Step, table: torch.Tensor = table, spec: NGramHash = spec) -> torch.Tensor:
            table[s.token_rows, s.positions] = ids.int()
            return ngram_ids(table, s.token_rows, s.positions, spec)

        got = drive(ragged, inputs, part, style=style, drafts=drafts, seed=seed)
        with torch.no_grad():
            for ids, rows in zip(got, inputs, strict=True):
                assert torch.equal(module.ngram_embedding(ids).flatten(-2), module(rows[None], None)[0])


@each_style
def test_sparse_attention(style: str, drafts: int, seed: int) -> None:
    """The whole attention layer, indexer and all; contexts below and far above the budget of 9 tokens."""
    torch.manual_seed(seed)
    config = qwen4_config()
    config._attn_implementation = "eager"
    module = qwen4.Qwen4ExpTextAttention(config, 1)
    for norm in (module.indexer.q_layernorm, module.indexer.k_layernorm, module.q_norm):
        torch.nn.init.normal_(norm.weight, std=0.3)
    rotary = qwen4.Qwen4ExpTextRotaryEmbedding(config)
    inputs = random_inputs(seed, 48)
    ragged = Ragged(len(LENGTHS), 96, seed)
    index_cache = ragged.cache(16)
    kv_cache = torch.full((2, ragged.num_blocks, 4, 2, 8), 1e3)
    params = SparseParams(3, 3, module.scaling)
    rotate = qwen4.apply_rotary_pos_emb

    def embed(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rotary(torch.zeros(1), positions.view(1, 1, -1).expand(3, 1, -1))
        return cos[0], sin[0]

    def part(x: torch.Tensor, s: Step) -> torch.Tensor:
        cos, sin = embed(s.positions)
        starts_cos, starts_sin = embed((s.positions - 2).clamp_min(0))
        index_q, index_k = module.indexer.index_qk_proj(x).split([48, 8], -1)
        index_q = rotate(module.indexer.q_layernorm(index_q.unflatten(-1, (6, 8))), None, cos, sin)

        def finish(means: torch.Tensor) -> torch.Tensor:
            return rotate(module.indexer.k_layernorm(means)[:, None], None, starts_cos, starts_sin)[:, 0]

        write_index_keys(index_k, index_cache, s.block_tables, s.slot_mapping, s.token_rows, s.positions, 3, finish)
        q, gate = module.q_proj(x).view(len(x), 6, 16).chunk(2, -1)
        k, v = module.k_proj(x).view(len(x), 2, 8), module.v_proj(x).view(len(x), 2, 8)
        q, k = rotate(module.q_norm(q), module.k_norm(k), cos, sin)
        for cache, value in zip(kv_cache, (k, v), strict=True):
            cache.view(-1, 2, 8)[s.slot_mapping] = value
        out = sparse_attend(
            q, index_q, kv_cache, index_cache, s.block_tables, s.query_start_loc, s.seq_lens, s.rows, params
        )
        return module.o_proj((out * gate.sigmoid()).flatten(1))

    with torch.no_grad():
        expected = []
        for x in inputs:
            mask = torch.full((len(x), len(x)), torch.finfo(torch.float32).min).triu(1)[None, None]
            cos, sin = embed(torch.arange(len(x)))
            keys = {"past_key_values": None} if "past_key_values" in module.indexer.forward.__code__.co_varnames else {}
            expected.append(module(x[None], (cos[None], sin[None]), mask, **keys)[0][0])
        close(drive(ragged, inputs, part, style=style, drafts=drafts, seed=seed), expected)
