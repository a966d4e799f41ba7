"""The fused operations: the reference against modules of transformers, Triton against the reference.

Without a GPU the file runs once more in a child process in which Triton interprets the kernels on the CPU.
"""

from __future__ import annotations

import pytest
import torch

from gapless.model.ops import reference

pytest.importorskip("triton", reason="Triton is not installed")

from interpreted import CHILD, run_in_the_interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
runs_kernels = pytest.mark.skipif(not GPU and not CHILD, reason="runs in the interpreter, in a child process")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


@pytest.mark.skipif(GPU or CHILD, reason="the kernels run in this process")
def test_all_cases_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__, "-k", "triton")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def close(got: torch.Tensor, expected: torch.Tensor, rounding_steps: int = 1) -> None:
    """Equal but for the order of sums, which may move a value to the next one of its dtype."""
    assert got.dtype == expected.dtype
    steps = 8 if got.dtype == torch.float32 or truncates(got) else rounding_steps
    error = torch.finfo(got.dtype).eps * steps
    torch.testing.assert_close(got, expected, rtol=error, atol=error / 4)
    if got.dtype != torch.float32 and not truncates(got) and got.numel() > 500:
        assert (got == expected).float().mean() > 0.98


def truncates(x: torch.Tensor) -> bool:
    """The interpreter cuts bits off where a GPU rounds to nearest."""
    return x.dtype == torch.bfloat16 and not GPU


# ---- the reference against transformers --------------------------


@dtypes
def test_norm_and_mlp_are_llamas(dtype: torch.dtype) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    norm = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    norm.weight.data = randn(48, dtype=dtype).cpu()
    x, residual = randn(7, 48, dtype=dtype).cpu(), randn(7, 48, dtype=dtype, seed=1).cpu()
    assert torch.equal(reference.rms_norm(x, norm.weight, 1e-5), norm(x))
    normed, total = reference.add_rms_norm(x, residual, norm.weight, 1e-5)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, norm(residual + x))

    mlp = LlamaMLP(LlamaConfig(hidden_size=48, intermediate_size=64, num_attention_heads=4)).to(dtype)
    gate_up = torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), -1)
    assert torch.equal(mlp.down_proj(reference.act_mul(gate_up)), mlp(x))


@dtypes
def test_offset_norm_is_gemmas(dtype: torch.dtype) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    norm = Gemma2RMSNorm(48, eps=1e-5).to(dtype)
    norm.weight.data = randn(48, dtype=dtype).cpu()
    x = randn(7, 48, dtype=dtype).cpu()
    assert torch.equal(reference.rms_norm(x, norm.weight, 1e-5, 1), norm(x))


@dtypes
def test_attention_input_is_qwen3s(dtype: torch.dtype) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import (
        Qwen3RMSNorm,
        Qwen3RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    rotary = Qwen3RotaryEmbedding(Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=16))
    q_norm, k_norm = Qwen3RMSNorm(16).to(dtype), Qwen3RMSNorm(16).to(dtype)
    q_norm.weight.data, k_norm.weight.data = (randn(16, dtype=dtype, seed=s).cpu() for s in (1, 2))
    qkv, positions = randn(5, (4 + 2 + 2) * 16, dtype=dtype).cpu(), torch.tensor([0, 3, 9, 9, 60])
    heads = qkv.view(1, 5, 8, 16)
    cos, sin = rotary(qkv, positions[None])
    q, k = apply_rotary_pos_emb(q_norm(heads[:, :, :4]), k_norm(heads[:, :, 4:6]), cos, sin, unsqueeze_dim=2)

    table_cos, table_sin = rotary(qkv, torch.arange(64)[None])
    cache = torch.zeros(2, 3, 4, 2, 16, dtype=dtype)
    slots = torch.tensor([4, 5, 11, 9, 7])
    got = reference.rope_qk_norm_kv_write(
        qkv, positions, table_cos[0], table_sin[0], cache, slots, 4, 2, q_norm.weight, k_norm.weight
    )
    assert torch.equal(got, q[0])
    flat = cache.view(2, 12, 2, 16)
    assert torch.equal(flat[0, slots], k[0])
    assert torch.equal(flat[1, slots], heads[0, :, 6:])
    assert flat[:, [0, 1, 2, 3, 6, 8, 10]].count_nonzero() == 0


# ---- Triton against the reference --------------------------


@runs_kernels
@dtypes
@pytest.mark.parametrize("size", [1, 48, 640])
def test_triton_rms_norm(dtype: torch.dtype, size: int) -> None:
    from gapless.model.ops import triton as ops_triton

    x = randn(6, 2 * size, dtype=dtype)[:, :size]  # a row stride of its own
    residual, weight = randn(6, size, dtype=dtype, seed=1), randn(size, dtype=dtype, seed=2)
    before = residual.clone()
    for scaling in (0, 1, 2):
        close(ops_triton.rms_norm(x, weight, 1e-6, scaling), reference.rms_norm(x, weight, 1e-6, scaling), 2)
        behind = ops_triton.norm_add_rms_norm(x, residual, weight, weight, 1e-6, scaling)
        for ours, theirs in zip(
            behind, reference.norm_add_rms_norm(x, residual, weight, weight, 1e-6, scaling), strict=True
        ):
            # A sum of two may be a small difference of large ones, and keeps their rounding.
            error = 4 * max(torch.finfo(dtype).eps, 1e-6) * float(theirs.float().abs().max())
            torch.testing.assert_close(ours, theirs, rtol=0.0, atol=error if not truncates(x) else 4 * error)
        got = ops_triton.add_rms_norm(x, residual, weight, 1e-6, scaling)
        expected = reference.add_rms_norm(x, residual, weight, 1e-6, scaling)
        assert truncates(x) or torch.equal(got[1], expected[1])
        close(got[1], expected[1])
        close(got[0], expected[0], 2)
    assert torch.equal(residual, before)
    three = x.reshape(1, 6, size)
    assert torch.equal(ops_triton.rms_norm(three, weight, 1e-6)[0], ops_triton.rms_norm(x, weight, 1e-6))


@runs_kernels
@dtypes
@pytest.mark.parametrize("size", [1, 40, 1500])
def test_triton_act_mul(dtype: torch.dtype, size: int) -> None:
    from gapless.model.ops import triton as ops_triton

    gate_up = randn(3, 2 * size, dtype=dtype) * 4
    close(ops_triton.act_mul(gate_up), reference.act_mul(gate_up), 2)
    error = max((32 if truncates(gate_up) else 8) * torch.finfo(dtype).eps, 1e-5)  # far from zero a gelu cancels
    for activation in (1, 2):
        ours, theirs = ops_triton.act_mul(gate_up, activation), reference.act_mul(gate_up, activation)
        torch.testing.assert_close(ours, theirs, rtol=error, atol=error)


@runs_kernels
@dtypes
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotary", "norm", "scaling", "table"),
    [
        (4, 2, 16, 16, False, 0, None),
        (4, 4, 16, 16, True, 2, None),
        (9, 3, 8, 8, True, 1, torch.float32),
        (14, 2, 24, 24, False, 0, torch.float32),
        (6, 1, 20, 12, True, 2, None),
        (3, 1, 32, 8, False, 0, None),
    ],
)
def test_triton_rope(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    rotary: int,
    norm: bool,
    scaling: int,
    table: torch.dtype | None,
    pairs: bool,
) -> None:
    from gapless.model.ops import triton as ops_triton

    tokens, block = 7, 4
    width = (heads + 2 * kv_heads) * size
    qkv = randn(tokens, width + 8, dtype=dtype)[:, :width]
    positions = torch.tensor([0, 1, 2, 30, 7, 0, 0], device=DEVICE)
    slots = torch.tensor([12, 13, 4, 23, 9, 0, 1], device=DEVICE)
    angle = torch.arange(32)[:, None] * 0.3 ** torch.arange(rotary // 2)
    cos, sin = (f(angle).repeat(1, 2).to(table or dtype).to(DEVICE) for f in (torch.cos, torch.sin))
    weights = [randn(size, dtype=dtype, seed=s) if norm else None for s in (1, 2)]
    caches = [torch.full((2, 6, block, kv_heads, size), 9.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    got, expected = (
        module.rope_qk_norm_kv_write(
            qkv, positions, cos, sin, cache, slots, heads, kv_heads, *weights, eps=1e-6, scaling=scaling,
            pairs=pairs,
        )
        for module, cache in zip((ops_triton, reference), caches, strict=True)
    )
    assert got.shape == (tokens, heads, size)
    # A value that is a small difference of large ones keeps the rounding of these.
    error = (16 if truncates(qkv) else 4) * torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, rtol=error, atol=error * 4)
    torch.testing.assert_close(caches[0], caches[1], rtol=error, atol=error * 4)
    assert torch.equal(caches[0][1], caches[1][1])
    # Not so on a GPU, whose compiler joins a product and a sum without rounding in between.
    if not norm and table is None and dtype != torch.float32 and not truncates(qkv) and DEVICE == "cpu":
        assert torch.equal(got, expected)
        assert torch.equal(caches[0], caches[1])


@runs_kernels
def test_triton_writes_a_cache_of_another_dtype_and_stride() -> None:
    from gapless.model.ops import triton as ops_triton

    qkv = randn(2, 3 * 16)
    cos, sin = randn(4, 16).cos(), randn(4, 16).sin()
    cos[:, 8:], sin[:, 8:] = cos[:, :8], sin[:, :8]
    where = torch.tensor([3, 6], device=DEVICE)
    results = []
    for module in (ops_triton, reference):
        cache = torch.zeros(2, 4, 3, 2, 16, dtype=torch.bfloat16, device=DEVICE)
        module.rope_qk_norm_kv_write(qkv, where // 2, cos, sin, cache[:, :, :, 1:], where, 1, 1)
        results.append(cache)
    torch.testing.assert_close(results[0], results[1])
    assert results[0][:, :, :, 0].count_nonzero() == 0
    assert results[0].count_nonzero() == 64


@runs_kernels
@dtypes
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("size", "rotary", "norm"), [(16, 16, True), (20, 12, False)])
def test_triton_writes_an_fp8_cache(dtype: torch.dtype, scaled: bool, size: int, rotary: int, norm: bool) -> None:
    from gapless.model.ops import triton as ops_triton

    heads, kv_heads, tokens = 10, 9, 7  # of both more than a program takes
    qkv = randn(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    qkv[0, heads * size], qkv[1, -1], qkv[2, -2] = 2e4, -3e4, float("nan")
    positions, slots = torch.arange(tokens, device=DEVICE), torch.tensor([12, 13, 4, 23, 9, 7, 1], device=DEVICE)
    angle = torch.arange(32)[:, None] * 0.3 ** torch.arange(rotary // 2)
    cos, sin = (f(angle).repeat(1, 2).to(dtype).to(DEVICE) for f in (torch.cos, torch.sin))
    weights = [randn(size, dtype=dtype, seed=s) if norm else None for s in (1, 2)]
    scales = (0.1 + randn(2, kv_heads).abs()) if scaled else None
    results = []
    for module in (ops_triton, reference):
        cache = torch.zeros(2, 6, 4, kv_heads, size, device=DEVICE).to(torch.float8_e4m3fn)
        module.rope_qk_norm_kv_write(
            qkv, positions, cos, sin, cache, slots, heads, kv_heads, *weights, kv_scales=scales
        )
        results.append(cache.view(2, 24, kv_heads, size).float())
    got, expected = results
    assert expected[0, 12, 0].abs().max() == 448 or norm
    assert expected[1, 13, -1, -1] == -448
    assert expected[1, 4, -1, -2].isnan()
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=0, equal_nan=True)
    # One step of e4m3 where the keys themselves differ by their rounding: a compiler may join a product and a sum.
    torch.testing.assert_close(got[0], expected[0], rtol=0.125, atol=2**-9)
    assert (got[0] == expected[0]).float().mean() > (0.9 if truncates(qkv) else 0.99)


@runs_kernels
def test_triton_nothing_to_do() -> None:
    from gapless.model.ops import triton as ops_triton

    assert ops_triton.rms_norm(randn(0, 8), randn(8), 1e-6).shape == (0, 8)
    assert ops_triton.act_mul(randn(0, 8)).shape == (0, 4)
