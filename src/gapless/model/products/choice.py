# mypy: disable-error-code="no-untyped-call"
"""Which kernel computes a product of a decode step: by table, by rule, or measured at start.

cuBLAS is a candidate too, as None: for a product with a norm or a residual add it stands for the product and the
separate kernel that then follows it.

Measured means: a graph of the product over different layers' weights, which together exceed the second-level cache, so
that what counts is reading them from memory, as in a step.
"""

from __future__ import annotations

import json
import logging
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch.nn import functional

from gapless.model.ops import triton as ops_triton
from gapless.model.products.config import GemmConfig, Workspace, workspace_size
from gapless.model.products.few_tokens import glu, plain, residual
from gapless.model.products.gated import Gated, gated

SMS = 132
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Product:
    """``op`` of `gapless.model.products.fusion.OPS`, ``m`` tokens, ``n`` rows of weights, ``k`` inputs."""

    op: str
    m: int
    n: int
    k: int


def bucket(m: int) -> int:
    """Products of so many tokens share their kernel."""
    return 1 if m == 1 else max(16, triton.next_power_of_2(m))


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
    """The table's entry, or a guess by rule."""
    key = (product.op, bucket(product.m), product.n, product.k)
    if key in TABLE:
        return TABLE[key]
    return candidates(product)[0]


def candidates(product: Product) -> list[GemmConfig | None]:
    """A handful worth measuring, the likeliest first; cuBLAS last."""
    n = product.n // 2 if product.op == "glu" else product.n
    k = product.k
    small = product.n * k * 2 < 16 * 2**20  # latency, not bandwidth
    found: list[GemmConfig | None] = []
    if product.m == 1:
        wide = min(2048, triton.next_power_of_2(k))
        tall = 2 if product.op == "glu" else 4
        # The sums of squares are read by every program of the product that follows: fewer tiles there.
        if product.op == "residual" and n >= 4096:
            tall = 8
        found += [
            GemmConfig(False, tall, min(1024, wide), preload=True, prefetch=0),
            GemmConfig(False, tall, wide, preload=True, prefetch=0),
            GemmConfig(False, 2 * tall, min(1024, wide), preload=True, prefetch=0),
            GemmConfig(True, 64, 128, _split(n, k, 64, 128, 2), stages=4, prefetch=256),
        ]
    else:
        rows = bucket(product.m)
        if rows > 128:
            found += [GemmConfig(True, 128, 64, _split(n, k, 128, 64, 1), warps=8, stages=4, block_m=128)]
        elif rows > 64:
            tall = 64 if product.op == "glu" else 128
            found += [GemmConfig(True, tall, 64, _split(n, k, tall, 64, 1), warps=8, stages=4, prefetch=256)]
        else:
            tall = 64 if small or product.op == "glu" else 128
            # With 64 tokens the tiles of both halves of a gated product leave no room for a block ahead.
            ahead = small and not (product.op == "glu" and rows > 32)
            found += [
                GemmConfig(True, tall, 64, _split(n, k, tall, 64, 2), stages=5, prefetch=256),
                GemmConfig(True, tall, 128, _split(n, k, tall, 128, 1), stages=4, prefetch=512),
                GemmConfig(True, 64, 128, _split(n, k, 64, 128, 2), stages=4, preload=ahead, prefetch=256),
            ]
    return [*found, None]


def _split(n: int, k: int, block_n: int, block_k: int, waves: int) -> int:
    """Parts of the inputs with which the programs fill ``waves`` of the multiprocessors, each with some work."""
    tiles = -(-n // block_n)
    return max(1, min(waves * SMS // tiles, k // (2 * block_k), 8))


class Chooser:
    """Picks a kernel for each product.

    Args:
        device: where to measure.
        seconds: time for measuring in all, compiling included; afterwards, and if 0, `default` decides.
        cache: a file that keeps what was measured.
    """

    def __init__(self, device: torch.device, seconds: float = 0.0, cache: Path | None = None) -> None:
        self._device = device
        self._left = seconds
        self._file = cache
        self._lock = threading.Lock()
        self._known: dict[Product, GemmConfig | None] = {}
        if cache is not None and cache.exists():
            self._known = _load(cache, _name(device))

    def choose(self, product: Product, weights: Sequence[torch.Tensor]) -> GemmConfig | None:
        """``weights``: of all layers, alike in shape."""
        product = Product(product.op, bucket(product.m), product.n, product.k)
        with self._lock:
            if product in self._known:
                return self._known[product]
            if self._left <= 0:
                return default(product)
            start = time.perf_counter()
            times: dict[GemmConfig | None, float] = {}
            for config in dict.fromkeys([default(product), *candidates(product), None]):
                if times and time.perf_counter() - start > self._left:
                    break
                try:
                    times[config] = measure(product, config, weights)
                except Exception:  # a candidate that does not compile or fit here is none
                    continue
            self._left -= time.perf_counter() - start
            best = min(times, key=times.__getitem__) if times else None
            self._known[product] = best
            if self._file is not None:
                _save(self._file, _name(self._device), self._known)
            return best


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


def runner(
    product: Product, config: GemmConfig | None, weights: Sequence[torch.Tensor], pdl: int = 0
) -> Callable[[], None]:
    """A call that computes the product once with each of the weights, on random input; ``m`` may be any."""
    m, n, k = product.m, product.n, product.k
    device, dtype = weights[0].device, weights[0].dtype
    inputs = [torch.randn(m, k, device=device).to(dtype) for _ in range(2)]
    before = torch.randn(m, n, device=device).to(dtype) if product.op == "residual" else inputs[0]
    norm = torch.ones(max(n, k), device=device, dtype=dtype)[: n if product.op == "residual" else k]
    tiles = 512 if m == 1 else 32
    squares = torch.full((m, tiles), k / tiles, device=device)
    space = Workspace(device)
    if config is not None:
        space.reserve(*workspace_size(product.op, m, n, config.fit(k)))

    def run() -> None:
        for i, weight in enumerate(weights):
            x = inputs[i % 2]
            if config is None:
                y = functional.linear(x, weight)
                if product.op == "residual":
                    ops_triton.add_rms_norm(y, before, norm, 1e-6)
                elif product.op == "glu":
                    ops_triton.act_mul(y)
            elif product.op == "residual":
                residual(x, weight, config, space, before, norm, pdl=pdl)
            elif product.op == "glu":
                glu(x, weight, config, space, squares=squares, eps=1e-6, pdl=pdl)
            else:
                plain(x, weight, config, space, squares=squares, eps=1e-6, pdl=pdl)

    return run


def measure(
    product: Product, config: GemmConfig | None, weights: Sequence[torch.Tensor], pdl: int = 0, replays: int = 4
) -> float:
    """Microseconds of one product, the median of graph replays."""
    run = runner(product, config, weights, pdl)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()  # sync-ok: at start, while kernels are measured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for _ in range(replays + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:]) / len(weights) * 1e3


def _name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"


def _load(path: Path, name: str) -> dict[Product, GemmConfig | None]:
    """Entries of another device or another file format are not used."""
    try:
        stored = json.loads(path.read_text())
        return {
            Product(**entry["product"]): None if entry["config"] is None else GemmConfig(**entry["config"])
            for entry in stored.get(name, [])
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _save(path: Path, name: str, known: dict[Product, GemmConfig | None]) -> None:
    try:
        stored = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError):
        stored = {}
    stored[name] = [
        {"product": asdict(p), "config": None if c is None else asdict(c)} for p, c in known.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stored, indent=1))
