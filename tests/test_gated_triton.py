"""Gate, up and SiLU in one kernel against the two that it replaces: equal bits, on numbers whose sums are exact in any
order; and where it is used.

Without a GPU the file runs once more in a child process whose Triton interprets the kernels on the CPU, in fp16.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed")

from gapless.model.adapter import TransformersModel
from gapless.model.ops import reference as ops_reference
from gapless.model.ops import triton as ops_triton
from gapless.model.products import choice as gemm_choice
from gapless.model.products.choice import GATED, GatedProducts
from gapless.model.products.gated import Gated, gated
from interpreted import CHILD, run_in_the_interpreter
from models import tiny
from paged import greedy
from test_fused import described

GPU = torch.cuda.is_available()
SMALL = Gated(16, 32, 32, stages=3, warps=4, programs=3)
interpreted = pytest.mark.skipif(not CHILD, reason="runs in the interpreter, in a child process")


@pytest.mark.skipif(GPU or CHILD, reason="the real tile runs in this process, or these cases do already")
def test_all_cases_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def operands(m: int, n: int, k: int, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    seed = random.randrange(2**31)
    print(f"seed={seed} m={m} n={n} k={k}")
    gen = torch.Generator().manual_seed(seed)
    # Sums below 2^24, but beyond what the dtype holds, so that each rounding shows.
    x = torch.randint(-30, 31, (m, k), generator=gen).to(dtype)
    w = torch.randint(-30, 31, (2 * n, k), generator=gen).to(dtype).mul_(2.0 ** -round(math.log2(155 * k**0.5)))
    return x, w


def separate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ops_triton.act_mul(functional.linear(x.float(), w.float()).to(x.dtype))


@interpreted
@pytest.mark.parametrize(("m", "n", "k"), [(40, 112, 64), (33, 48, 72), (16, 32, 24)])
def test_one_kernel_equals_two(m: int, n: int, k: int) -> None:
    """Also where tokens, outputs and inputs do not fill the tiles, and a program has several of them."""
    x, w = operands(m, n, k)
    assert torch.equal(gated(x, w, SMALL), separate(x, w))


@pytest.mark.gpu
@pytest.mark.parametrize("config", sorted(set(GATED.values()), key=str))
def test_the_tiles_in_use_equal_two_kernels_in_a_graph(config: Gated) -> None:
    """Fewer outputs and inputs than a model has, on fewer programs; new values at the same addresses are seen."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    config = replace(config, programs=5)
    for m in (65, 200):
        x, w = (t.cuda() for t in operands(m, 1040, 1088, torch.bfloat16))
        assert torch.equal(gated(x, w, config), separate(x, w))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gated(x, w, config)
        for old, new in zip((x, w), operands(m, 1040, 1088, torch.bfloat16), strict=True):
            old.copy_(new)
        graph.replay()
        assert torch.equal(out, separate(x, w))


@interpreted
def test_it_is_used_where_it_was_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """For the right numbers of tokens and shapes; a kernel that cannot run is left out."""
    x, w = operands(40, 48, 64)
    broken = replace(SMALL, outputs=33)
    monkeypatch.setattr(gemm_choice, "GATED", {
        (3, 20, 96, 64): SMALL, (21, 30, 96, 64): broken, (31, 40, 96, 64): SMALL, (1, 40, 96, 128): SMALL,
    })  # fmt: skip
    products = GatedProducts([w, w])
    assert products.chosen == [(range(3, 21), SMALL), (range(31, 41), SMALL)]
    assert "21 to 30 tokens stay two kernels" in caplog.text
    for m in (1, 2, 3, 20, 21, 30, 31, 40):
        got = products(x[:m], w)
        if m in (1, 2, 21, 30):
            assert got is None
        else:
            assert got is not None
            assert torch.equal(got, separate(x[:m], w))
    odd = torch.empty(96 * 64 + 1, dtype=w.dtype)[1:].view(96, 64)  # no descriptor can begin here
    assert not GatedProducts([w, odd]).chosen
    assert not GatedProducts([w.float()]).chosen


@interpreted
@pytest.mark.parametrize("tokens", [3, 20])
def test_one_wrong_tile_at_load_leaves_two_kernels(
    tokens: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At either end of the numbers of tokens."""
    _, w = operands(1, 48, 64)

    def wrong(x: torch.Tensor, weight: torch.Tensor, config: Gated) -> torch.Tensor:
        y = gated(x, weight, config)
        if len(x) == tokens:
            y[-1, -16:] = 0
        return y

    monkeypatch.setattr(gemm_choice, "GATED", {(3, 20, 96, 64): SMALL})
    assert GatedProducts([w]).chosen
    assert not caplog.text
    monkeypatch.setattr(gemm_choice, "gated", wrong)
    assert not GatedProducts([w]).chosen
    assert "differs" in caplog.text


def test_the_decoder_uses_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of prompts, and a batch of three: some by one kernel, some by two."""
    plain = TransformersModel(tiny("llama"))
    decoder = described(plain)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [9, 9, 4]]
    tokens, logits = greedy(decoder, prompts, 4)
    before = decoder.summary()
    decoder.enable_gated()
    assert decoder.gated is not None
    assert decoder.summary() == before  # of fp32 nothing was measured
    used: set[int] = set()

    def one(x: torch.Tensor, w: torch.Tensor, config: Gated) -> torch.Tensor:
        used.add(len(x))
        return ops_reference.act_mul(functional.linear(x, w))

    monkeypatch.setattr(gemm_choice, "gated", one)
    decoder.gated.chosen = [(range(3, 10), SMALL)]
    assert decoder.summary()[-1][0] == "gate, up, SiLU of 3 to 9 tokens"
    again, same = greedy(decoder, prompts, 4)
    assert again == tokens
    assert torch.equal(same, logits)
    assert 3 in used
    assert used <= set(range(3, 10))
