# mypy: disable-error-code="no-untyped-call"
"""How long one product of a decode step takes on this GPU, by a kernel of ours or by cuBLAS.

Measured is a graph of the product over several weights, which together exceed the second-level cache, so that what
counts is reading them from memory, as in a step. cuBLAS is timed with the separate kernel that then does what ours
does besides: residual add and norm, or activation and gate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from gapless.device.dependent_launch import OFF, supports_pdl
from gapless.model.ops import triton as ops
from gapless.model.products.config import GemmConfig, Workspace, workspace_size
from gapless.model.products.few_tokens import glu, plain, residual
from gapless.model.products.rule import Product

LEAST_BYTES = 250e6
LEAST_LAUNCHES = 12


def weights_of(product: Product, device: torch.device) -> list[torch.Tensor]:
    """Random bf16 weights, enough to exceed the second-level cache together."""
    count = max(2, math.ceil(LEAST_BYTES / (2 * product.n * product.k)))
    shape, scale = (product.n, product.k), product.k**-0.5
    return [torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0, scale) for _ in range(count)]


class Trial:
    """One product by one kernel, None for cuBLAS, on random input that is normed already; ``m`` may be any."""

    def __init__(self, product: Product, config: GemmConfig | None, device: torch.device, pdl: int = OFF) -> None:
        m, n, k = product.m, product.n, product.k
        generator = torch.Generator(device).manual_seed(0)
        self._op, self._config = product.op, config
        self._pdl = pdl if config is not None and supports_pdl(device) else OFF
        self._x = torch.randn(m, k, device=device, generator=generator).bfloat16()
        hidden = n if product.op == "residual" else 1
        self._before = torch.randn(m, hidden, device=device, generator=generator).bfloat16()
        self._norm = torch.ones(n, device=device, dtype=torch.bfloat16)
        tiles = 512 if m == 1 else 32
        self._squares = torch.full((m, tiles), k / tiles, device=device)
        self._space = Workspace(device)
        if config is not None:
            self._space.reserve(*workspace_size(product.op, m, n, config.fit(k)))

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """``[m, n]`` (of a gated product, half of it)."""
        x, config, space, pdl = self._x, self._config, self._space, self._pdl
        if config is None:
            y = functional.linear(x, weight)
            if self._op == "residual":
                return ops.add_rms_norm(y, self._before, self._norm, 1e-6)[1]
            return ops.act_mul(y) if self._op == "glu" else y
        if self._op == "residual":
            return residual(x, weight, config, space, self._before, self._norm, pdl=pdl).residual
        if self._op == "glu":
            return glu(x, weight, config, space, squares=self._squares, eps=1e-6, pdl=pdl)
        return plain(x, weight, config, space, squares=self._squares, eps=1e-6, pdl=pdl)

    def wrong(self, weight: torch.Tensor, want: torch.Tensor) -> str:
        """What is wrong with the result, in words; ``want`` is that of cuBLAS."""
        gap = float((self(weight).float() - want.float()).norm() / want.float().norm())
        return "" if gap < 1e-2 else f"differs from cuBLAS by {gap:.1e}"


def measure(call: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor], replays: int = 4) -> float:
    """Microseconds of one call, the median of graph replays."""
    turns = [*weights] * math.ceil(LEAST_LAUNCHES / len(weights))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in turns:
            call(weight)
    times: list[float] = []
    for _ in range(replays + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:]) / len(turns) * 1e3
