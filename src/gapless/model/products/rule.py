"""The rule for products that nobody measured: a recipe, by operation, number of tokens and bytes of the weight.

Where `benchmarks/product_rule.py` has measured shapes of many models, `BANDS` is what it found, and cuBLAS (None)
stands wherever no recipe was at least as quick on every one of them: ``--fit`` prints the table anew from its results.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import triton

from gapless.model.products.config import GemmConfig

SMS = 132
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Product:
    """``op`` of `gapless.model.products.fusion.OPS`, ``m`` tokens, ``n`` rows of weights, ``k`` inputs."""

    op: str
    m: int
    n: int
    k: int

    @property
    def mib(self) -> float:
        """Size of the weight in 16 bits."""
        return self.n * self.k * 2 / MIB


def bucket(m: int) -> int:
    """Products of so many tokens share their kernel."""
    return 1 if m == 1 else max(16, triton.next_power_of_2(m))


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way to cut up products of any shape; fields as of `GemmConfig`.

    Attributes:
        waves: the inputs are shared by so many programs that they fill this many times the multiprocessors.
    """

    dot: bool
    block_n: int
    block_k: int
    waves: int = 0
    warps: int = 4
    stages: int = 4
    preload: bool = False
    prefetch: int = 0
    block_m: int = 0

    def config(self, product: Product) -> GemmConfig:
        n = product.n // 2 if product.op == "glu" else product.n
        tall = self.block_n
        if not self.dot and product.op == "glu":
            tall //= 2  # two rows of weights an output
        elif not self.dot and product.op == "residual" and n >= 4096:
            tall *= 2  # every program of the product that follows reads the sums of squares: fewer tiles
        tiles = -(-n // tall)
        split = max(1, min(self.waves * SMS // tiles, product.k // (2 * self.block_k), 8))
        return GemmConfig(
            self.dot, tall, self.block_k, split, self.warps, self.stages, self.preload, self.prefetch, self.block_m
        )


FEW = {
    "64x64": Recipe(True, 64, 64, 2, stages=5, prefetch=256),
    "64x128": Recipe(True, 64, 128, 2, prefetch=256),
    "64x128 one wave": Recipe(True, 64, 128, 1, prefetch=512),
    "64x128 ahead": Recipe(True, 64, 128, 2, preload=True, prefetch=256),
    "128x64": Recipe(True, 128, 64, 2, stages=5, prefetch=256),
    "128x128 one wave": Recipe(True, 128, 128, 1, prefetch=512),
}
ONE_TOKEN = {
    "4x1024": Recipe(False, 4, 1024, preload=True),
    "4x2048": Recipe(False, 4, 2048, preload=True),
    "8x1024": Recipe(False, 8, 1024, preload=True),
    "64x128": FEW["64x128"],
}
MORE = {
    "64x64 of 8 warps": Recipe(True, 64, 64, 1, warps=8, prefetch=256),
    "128x64 of 8 warps": Recipe(True, 128, 64, 1, warps=8, prefetch=256),
}
MANY = {"128x64 of 128 tokens": Recipe(True, 128, 64, 1, warps=8, block_m=128)}
RECIPES = ONE_TOKEN | FEW | MORE | MANY

BUCKETS = (1, 16, 32, 64, 128, 256)
"""Those of the rule; what has more tokens goes by the last."""

Bands = dict[tuple[str, int], tuple[tuple[float, str | None], ...]]

BANDS: Bands = {
    ("plain", 1): ((158, "8x1024"), (inf, None)),
    ("residual", 1): ((inf, "4x2048"),),
    ("glu", 1): ((87.7, "4x1024"), (inf, "8x1024")),
    ("plain", 16): ((inf, "64x64"),),
    ("residual", 16): ((inf, "64x128 ahead"),),
    ("glu", 16): ((72, "64x128 one wave"), (inf, None)),
    ("plain", 32): ((33.7, "64x128 one wave"), (inf, None)),
    ("residual", 32): ((inf, "64x128"),),
    ("glu", 32): ((72, "64x128 one wave"), (inf, None)),
    ("plain", 64): ((23.2, "64x128 one wave"), (inf, None)),
    ("residual", 64): ((35.8, "64x128 one wave"), (40.2, None), (135, "64x128 one wave"), (inf, "128x128 one wave")),
    ("glu", 64): ((inf, None),),
    ("plain", 128): ((inf, "128x64 of 8 warps"),),
    ("residual", 128): ((inf, "128x64 of 8 warps"),),
    ("glu", 128): ((inf, "64x64 of 8 warps"),),
    ("plain", 256): ((inf, "128x64 of 128 tokens"),),
    ("residual", 256): ((inf, "128x64 of 128 tokens"),),
    ("glu", 256): ((inf, "128x64 of 128 tokens"),),
}
"""By operation and bucket: weights of less than so many MiB (in 16 bits) take that recipe; None is cuBLAS.

Up to 64 tokens from `benchmarks/results/h200-product-rule.json`; for more, where nothing takes the rule today, an
estimate from the two models of `gapless.model.products.choice.TABLE`."""


def named(product: Product, bands: Bands = BANDS) -> str | None:
    """The recipe's name."""
    found = bands[product.op, min(bucket(product.m), BUCKETS[-1])]
    return next(name for limit, name in found if product.mib < limit)


def rule(product: Product) -> GemmConfig | None:
    name = named(product)
    return None if name is None else RECIPES[name].config(product)


def recipes(product: Product) -> dict[str, Recipe]:
    """Those worth measuring for a product."""
    rows = bucket(product.m)
    if rows == 1:
        return ONE_TOKEN
    found = FEW if rows <= 64 else MORE if rows <= 128 else MANY
    if product.op != "glu" or rows > 128:
        return found
    # The tiles of both halves leave no room for 128 outputs, nor with 64 tokens for a block ahead.
    return {name: r for name, r in found.items() if r.block_n == 64 and not (r.preload and rows > 32)}
