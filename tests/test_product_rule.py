"""The rule for products of decode steps, and how benchmarks/product_rule.py makes it from measured times."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from gapless.model.products.rule import BANDS, RECIPES, Product, bucket, named, recipes
from test_speed_benchmarks import BENCHMARKS, script

RESULTS = BENCHMARKS / "results" / "h200-product-rule.json"


def times(rng: random.Random) -> list[dict[str, Any]]:
    """Made-up results: each recipe is quicker than cuBLAS above a size, or below it, and there is noise."""
    rows = []
    for op in ("plain", "residual", "glu"):
        for m in (1, 2, 8, 16, 64):
            for n, k in [(2 * rng.randrange(100, 20000), 8 * rng.randrange(30, 1500)) for _ in range(12)]:
                product, base = Product(op, m, n, k), rng.uniform(5, 50)
                us = {"cuBLAS": base}
                for i, name in enumerate(recipes(product)):
                    better = (product.mib > 4 ** (i + 1)) == (i % 2 == 0)
                    us[name] = base * (0.9 if better else 1.1) * rng.uniform(0.93, 1.07)
                    if rng.random() < 0.05:
                        del us[name]
                rows.append({"op": op, "m": m, "n": n, "k": k, "chosen": named(product) or "cuBLAS", "us": us})
    return rows


@pytest.mark.parametrize("case", range(5))
def test_fitted_bands_lose_nowhere(case: int) -> None:
    seed = random.randrange(2**31)
    print(f"case {case}: seed={seed}")
    benchmark = script("product_rule")
    rows = times(random.Random(seed))
    bands = benchmark.fit(rows)
    assert benchmark.losses(rows, bands) == [], seed
    assert bands.keys() == BANDS.keys()
    for key, found in bands.items():
        limits = [limit for limit, _ in found]
        assert limits == sorted(set(limits)), (seed, key)
        assert limits[-1] == math.inf
    gain = sum(math.log(row["us"][named(p, bands) or "cuBLAS"] / row["us"]["cuBLAS"])
               for row in rows if not benchmark.tabled(p := benchmark.product_of(row)))  # fmt: skip
    assert gain <= 0, seed


def test_a_recipe_that_is_better_for_large_weights_gets_a_band() -> None:
    benchmark = script("product_rule")
    rows = [
        {"op": "plain", "m": 32, "n": n, "k": 1000, "chosen": "cuBLAS",
         "us": {"cuBLAS": 10.0, "64x64": 8.0 if n >= 5000 else 12.0, "128x64": 9.0 if n != 7000 else 10.5}}
        for n in range(1000, 9000, 1000)
    ]  # fmt: skip
    found = benchmark.fit(rows)["plain", 32]
    assert found == ((pytest.approx(math.sqrt(4000 * 5000) * 2000 / 2**20, rel=1e-2), "128x64"), (math.inf, "64x64"))
    rows[0]["us"]["64x128"] = math.nan
    rows[2]["us"]["128x64"] = 10.4  # slower on one shape: not in its band
    assert named(Product("plain", 32, 3000, 1000), benchmark.fit(rows)) != "128x64"


def test_a_printed_table_reads_back() -> None:
    benchmark = script("product_rule")
    scope: dict[str, Any] = {"inf": math.inf, "Bands": dict}
    exec(benchmark.shown(BANDS), scope)
    assert scope["BANDS"] == BANDS


def test_losses_name_the_worst_first() -> None:
    benchmark = script("product_rule")
    rows = [
        {"op": "plain", "m": 32, "n": 1000, "k": 1000, "chosen": "64x64", "us": {"cuBLAS": 10.0, "64x64": us}}
        for us in (10.2, 11.0, 12.0)
    ]
    assert [round(share, 2) for _, _, share in benchmark.losses(rows)] == [1.2, 1.1]
    assert benchmark.losses([{**rows[0], "us": {"cuBLAS": 10.0}}])  # not measured: nobody knows


def test_bands_name_recipes() -> None:
    for (op, m), found in BANDS.items():
        assert found[-1][0] == math.inf
        for _, name in found:
            assert name is None or name in recipes(Product(op, m, 4096, 4096))
            assert bucket(m) == m
    assert len(RECIPES) == len({*RECIPES.values()})


@pytest.mark.skipif(not RESULTS.exists(), reason="not measured yet")
def test_no_measured_shape_loses_to_cublas() -> None:
    benchmark = script("product_rule")
    rows = benchmark.behind_norms(json.loads(RESULTS.read_text())["rows"])
    assert benchmark.losses(rows, BANDS) == []
