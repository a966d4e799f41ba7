"""Which kernel computes a product of a decode step: by table, else by rule. Nothing is measured at start.

cuBLAS is a choice too, as None: for a product with a residual add or an activation it stands for the product and the
separate kernel that then follows it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch.nn import functional

from gapless.model.ops import triton as ops_triton
from gapless.model.products.config import GemmConfig
from gapless.model.products.gated import Gated, gated
from gapless.model.products.rule import Product, bucket, rule

logger = logging.getLogger(__name__)

# Found by benchmarks/gemm_kernels.py on an H200; (op, bucket, n, k). None is cuBLAS.
TABLE: dict[tuple[str, int, int, int], GemmConfig | None] = {
    ("plain", 1, 4096, 1024): GemmConfig(False, 8, 1024, 1, 8, stages=4, preload=True),
    ("residual", 1, 1024, 2048): GemmConfig(False, 4, 2048, 1, 4, stages=4, preload=True),
    ("glu", 1, 6144, 1024): GemmConfig(False, 2, 512, 1, 4, stages=4, preload=True),
    ("residual", 1, 1024, 3072): GemmConfig(False, 4, 2048, 1, 4, stages=4, preload=True),
    ("plain", 1, 151936, 1024): GemmConfig(False, 8, 1024, 1, 4, stages=4, preload=True),
    ("plain", 16, 4096, 1024): GemmConfig(True, 32, 256, 1, 4, stages=3, preload=True, prefetch=1024),
    ("residual", 16, 1024, 2048): GemmConfig(True, 64, 256, 8, 8, stages=1, preload=True),
    ("glu", 16, 6144, 1024): GemmConfig(True, 64, 256, 4, 8, stages=1, preload=True),
    ("residual", 16, 1024, 3072): GemmConfig(True, 64, 256, 12, 8, stages=1, preload=True),
    ("plain", 16, 151936, 1024): GemmConfig(True, 64, 64, 1, 4, stages=5, prefetch=256),
    ("plain", 32, 4096, 1024): GemmConfig(True, 64, 128, 2, 4, stages=3, preload=True, prefetch=512),
    ("residual", 32, 1024, 2048): GemmConfig(True, 32, 256, 4, 4, stages=3, preload=True, prefetch=512),
    ("glu", 32, 6144, 1024): GemmConfig(True, 64, 64, 2, 4, stages=6, prefetch=512),
    ("residual", 32, 1024, 3072): GemmConfig(True, 32, 256, 4, 4, stages=3, preload=True, prefetch=768),
    ("plain", 32, 151936, 1024): GemmConfig(True, 64, 64, 1, 4, stages=5, prefetch=256),
    ("plain", 64, 4096, 1024): GemmConfig(True, 64, 128, 2, 4, stages=4, prefetch=512),
    ("residual", 64, 1024, 2048): GemmConfig(True, 64, 256, 8, 8, stages=1, preload=True),
    ("glu", 64, 6144, 1024): GemmConfig(True, 64, 128, 2, 4, stages=4, prefetch=512),
    ("residual", 64, 1024, 3072): GemmConfig(True, 64, 128, 8, 4, stages=4, prefetch=384),
    ("plain", 64, 151936, 1024): GemmConfig(True, 128, 64, 1, 4, stages=8, prefetch=512),
    ("plain", 128, 4096, 1024): None,
    ("residual", 128, 1024, 2048): None,
    ("glu", 128, 6144, 1024): None,
    ("residual", 128, 1024, 3072): None,
    ("plain", 128, 151936, 1024): None,
    ("plain", 256, 4096, 1024): None,
    ("residual", 256, 1024, 2048): None,
    ("glu", 256, 6144, 1024): None,
    ("residual", 256, 1024, 3072): None,
    ("plain", 256, 151936, 1024): None,
    ("plain", 1, 6144, 4096): GemmConfig(False, 8, 512, 1, 4, stages=4, preload=True),
    ("residual", 1, 4096, 4096): GemmConfig(False, 16, 256, 1, 4, stages=4, preload=True),
    ("glu", 1, 28672, 4096): GemmConfig(False, 4, 1024, 1, 4, stages=4, preload=True),
    ("residual", 1, 4096, 14336): GemmConfig(False, 8, 2048, 1, 4, stages=4, preload=True),
    ("plain", 1, 128256, 4096): GemmConfig(True, 64, 128, 1, 4, stages=4, prefetch=256),
    ("plain", 16, 6144, 4096): None,
    ("residual", 16, 4096, 4096): GemmConfig(True, 64, 128, 4, 4, stages=4, prefetch=256),
    ("glu", 16, 28672, 4096): None,
    ("residual", 16, 4096, 14336): GemmConfig(True, 64, 128, 4, 4, stages=4, prefetch=256),
    ("plain", 16, 128256, 4096): GemmConfig(True, 128, 64, 1, 4, stages=5, prefetch=256),
    ("plain", 32, 6144, 4096): GemmConfig(True, 128, 64, 5, 4, stages=5, prefetch=256),
    ("residual", 32, 4096, 4096): GemmConfig(True, 64, 128, 4, 4, stages=4, prefetch=256),
    ("glu", 32, 28672, 4096): GemmConfig(True, 64, 128, 1, 4, stages=4, prefetch=256),
    ("residual", 32, 4096, 14336): GemmConfig(True, 64, 128, 4, 4, stages=4, prefetch=256),
    ("plain", 32, 128256, 4096): GemmConfig(True, 128, 64, 1, 4, stages=5, prefetch=256),
    ("plain", 64, 6144, 4096): None,
    ("residual", 64, 4096, 4096): None,
    ("glu", 64, 28672, 4096): GemmConfig(True, 64, 128, 1, 4, stages=4, prefetch=512),
    ("residual", 64, 4096, 14336): GemmConfig(True, 128, 128, 4, 8, stages=4, prefetch=512),
    ("plain", 64, 128256, 4096): GemmConfig(True, 256, 64, 1, 8, stages=4, prefetch=256),
    ("plain", 128, 6144, 4096): None,
    ("residual", 128, 4096, 4096): None,
    ("glu", 128, 28672, 4096): GemmConfig(True, 64, 64, 1, 8, stages=3, prefetch=128),
    ("residual", 128, 4096, 14336): None,
    ("plain", 128, 128256, 4096): GemmConfig(True, 128, 64, 1, 8, stages=3, prefetch=128),
    ("plain", 256, 6144, 4096): None,
    ("residual", 256, 4096, 4096): None,
    ("glu", 256, 28672, 4096): None,
    ("residual", 256, 4096, 14336): None,
    ("plain", 256, 128256, 4096): None,
}

GATED: dict[tuple[int, int, int, int], Gated] = {
    (65, 128, 28672, 4096): Gated(128, 128, 64, stages=4, warps=8),
    (241, 256, 28672, 4096): Gated(128, 128, 64, stages=4, warps=8),
}
"""Gated products of more tokens than the kernels above are for: (least tokens, most tokens, n, k). Where
``benchmarks/gemm_wide.py --only silu`` found them quicker on an H200, at 80, 96, 128 and 256 tokens: with tiles of 128,
where one holds all tokens, or two are full. Captured steps have such sizes; in between it was not measured. What is not
here is left to cuBLAS and the SiLU kernel."""


def default(product: Product) -> GemmConfig | None:
    """The table's entry, else the rule's."""
    key = (product.op, bucket(product.m), product.n, product.k)
    if key in TABLE:
        return TABLE[key]
    return rule(product)


class GatedProducts:
    """Gate, up and SiLU in one kernel, for the shapes and numbers of tokens that were measured to gain by it.

    Each kernel is first compared with the two that it replaces, on random input: one that differs, or cannot run here,
    is left out. Make it before graphs are captured, as it compiles and waits.

    Args:
        weights: ``[2 N, K]`` of all layers, alike in shape; they may change in place.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.chosen: list[tuple[range, Gated]] = []
        first = weights[0]
        if first.dtype not in (torch.bfloat16, torch.float16):
            return
        if not all(w.is_contiguous() and w.data_ptr() % 16 == 0 for w in weights):  # a caller's model may lie anywhere
            return
        for (least, most, n, k), config in GATED.items():
            if tuple(first.shape) == (n, k):
                wrong = _differs(config, least, first) or _differs(config, most, first)
                if wrong:
                    logger.warning("gate, up and SiLU of %d to %d tokens stay two kernels: %s", least, most, wrong)
                else:
                    self.chosen.append((range(least, most + 1), config))

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """``[M, N]``; None where two kernels are quicker. ``x``: contiguous ``[M, K]``."""
        for tokens, config in self.chosen:
            if len(x) in tokens:
                return gated(x, weight, config)
        return None


@torch.no_grad()
def _differs(config: Gated, tokens: int, weight: torch.Tensor) -> str:
    """What is wrong with the kernel for so many tokens, in words. Each element counts, so that no tile is missed."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    x = torch.randn(tokens, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    theirs = ops_triton.act_mul(functional.linear(x, weight)).float()
    try:
        ours = gated(x, weight, config).float()
    except Exception as error:  # of another Triton, or another device than the measured one
        return f"{type(error).__name__}: {error}"
    usual = float(theirs.square().mean().sqrt())  # sync-ok: at load
    gap = float((ours - theirs).abs().max())  # sync-ok: at load
    same = torch.allclose(ours, theirs, rtol=5e-2, atol=5e-2 * usual)
    return "" if same else f"the one differs by up to {gap:.1e}, where {usual:.1e} is usual"
