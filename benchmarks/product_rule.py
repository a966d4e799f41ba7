"""The rule for products of decode steps beside cuBLAS, on shapes that were not tuned, on one GPU.

    python benchmarks/product_rule.py --jobs 14 --out benchmarks/results/h200-product-rule.json
    python benchmarks/product_rule.py --fit benchmarks/results/h200-product-rule.json      # needs no GPU

The first compiles all recipes in parallel, times each beside cuBLAS, and prints where the choice loses more than 3 % to
it. The second prints `gapless.model.products.rule.BANDS` anew from such results, and what a layer gains by it: for each
operation and bucket of tokens, bands of weights by size, each with the recipe that is quickest in it on the whole among
those that are at least as quick as cuBLAS on every measured shape in it, else cuBLAS.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gapless.bench.environment import environment
from gapless.bench.products import Trial, weights_of
from gapless.bench.products import measure as time_us
from gapless.bench.table import grid
from gapless.device.dependent_launch import LATE
from gapless.model.ops import triton as ops
from gapless.model.products.choice import TABLE, default
from gapless.model.products.rule import BANDS, BUCKETS, RECIPES, Bands, Product, bucket, named, recipes

START = time.time()
CUBLAS, TABLED = "cuBLAS", "table"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LOSS = 1.03
"""What loses more than this is shown."""
SURE = 1.0
"""A recipe's time over that of cuBLAS, at most, on every shape of its band."""
BAND = 0.02
"""What another band must gain, as a share of the time of all shapes, so that noise does not make bands."""

MODELS = {  # hidden, outputs of q, k and v, inputs of the output product, width, vocabulary
    "Llama-3.2-1B": (2048, 3072, 2048, 8192, 128256),
    "Llama-3.2-3B": (3072, 5120, 3072, 8192, 128256),
    "Qwen3-4B": (2560, 6144, 4096, 9728, 151936),
    "Qwen2.5-0.5B": (896, 1152, 896, 4864, 151936),
    "Qwen2.5-7B": (3584, 4608, 3584, 18944, 152064),
    "Gemma-2-2B": (2304, 4096, 2048, 9216, 256000),
    "Phi-4-mini": (3072, 5120, 3072, 8192, 200064),
    "Mistral-Nemo-12B": (5120, 6144, 4096, 14336, 131072),
    "OLMo-2-7B": (4096, 12288, 4096, 11008, 100352),
    "GLM-4-9B": (4096, 4608, 4096, 13696, 151552),
}
Row = dict[str, Any]


def products(model: str, m: int) -> dict[str, Product]:
    """Those of a layer, and the head."""
    hidden, qkv, heads, width, vocabulary = MODELS[model]
    return {
        "qkv": Product("plain", m, qkv, hidden),
        "out": Product("residual", m, hidden, heads),
        "gate_up": Product("glu", m, 2 * width, hidden),
        "down": Product("residual", m, hidden, width),
        "head": Product("plain", m, vocabulary, hidden),
    }


def shapes(models: list[str]) -> list[Product]:
    """All products of some models once, for one token; the small ones first."""
    found = dict.fromkeys(p for model in models for p in products(model, 1).values())
    return sorted(found, key=lambda p: p.mib)


# ---- measuring ----------------------------------------------------------------------------------------------------


def compile_one(task: tuple[Product, str]) -> tuple[tuple[Product, str], str]:
    product, name = task
    try:
        weight = torch.zeros(product.n, product.k, dtype=torch.bfloat16, device="cuda")
        config = default(product) if name == TABLED else RECIPES[name].config(product)
        Trial(product, config, weight.device, LATE)(weight)
        torch.cuda.synchronize()
        del weight
        torch.cuda.empty_cache()
    except Exception as error:
        return task, f"{type(error).__name__}: {error}"[:200]
    return task, ""


def tasks(models: list[str], tokens: list[int]) -> list[tuple[Product, str]]:
    """What has to be compiled: today's choice of each product first."""
    order: list[tuple[Product, str]] = []
    for m, shape in ((m, s) for m in sorted({bucket(m) for m in tokens}) for s in shapes(models)):
        product = replace(shape, m=m)
        own = [TABLED] if tabled(product) and default(product) is not None else []
        first = named(product)
        order += [(product, name) for name in dict.fromkeys([*own, first, *recipes(product)]) if name is not None]
    return sorted(order, key=lambda t: chosen(t[0]) != t[1])


def tabled(product: Product) -> bool:
    return (product.op, bucket(product.m), product.n, product.k) in TABLE


def chosen(product: Product) -> str:
    """The name under which the choice of today is measured."""
    if tabled(product):
        return CUBLAS if default(product) is None else TABLED
    return named(product) or CUBLAS


def compile_all(models: list[str], tokens: list[int], jobs: int, seconds: float) -> set[tuple[Product, str]]:
    """What compiled within the time. Workers share Triton's cache with this process."""
    pool = multiprocessing.get_context("spawn").Pool(jobs)
    todo, done = tasks(models, tokens), set[tuple[Product, str]]()
    print(f"{len(todo)} kernels to compile by {jobs} processes", flush=True)
    results = pool.imap_unordered(compile_one, todo)
    for _ in todo:
        try:
            task, problem = results.next(max(0.1, START + seconds - time.time()))
        except multiprocessing.TimeoutError:
            print("out of time for compiling: what is left is not measured", flush=True)
            break
        if problem:
            print("left out:", task, problem, flush=True)
        else:
            done.add(task)
    pool.terminate()
    print(f"[{time.time() - START:.0f} s] {len(done)} compiled", flush=True)
    return done


@torch.no_grad()
def measure(models: list[str], tokens: list[int], compiled: set[tuple[Product, str]], seconds: float) -> Iterator[Row]:
    """One row a product and number of tokens: microseconds by name."""
    for shape in shapes(models):
        weights = weights_of(shape, torch.device("cuda"))
        for m in tokens:
            product = replace(shape, m=m)
            if time.time() - START > seconds:
                print("out of time for", product, flush=True)
                continue
            plain = Trial(product, None, weights[0].device)
            want, us = plain(weights[0]), {CUBLAS: time_us(plain, weights)}
            for name in (n for p, n in compiled if p == replace(product, m=bucket(m))):
                config = default(product) if name == TABLED else RECIPES[name].config(product)
                try:
                    trial = Trial(product, config, weights[0].device, LATE)
                    if wrong := trial.wrong(weights[0], want):
                        print("left out:", product, name, wrong, flush=True)
                    else:
                        us[name] = time_us(trial, weights)
                except Exception as error:  # what does not fit here is no candidate
                    print("left out:", product, name, type(error).__name__, str(error)[:100], flush=True)
            yield {"op": product.op, "m": m, "n": product.n, "k": product.k, "chosen": chosen(product),
                   "us": {name: round(t, 2) for name, t in us.items()}}  # fmt: skip
        del weights
        torch.cuda.empty_cache()


def norms(models: list[str], tokens: list[int]) -> Iterator[Row]:
    """A norm alone: what cuBLAS costs besides, where the product before it left its norm unfinished."""
    for hidden in sorted({MODELS[model][0] for model in models}):
        for m in tokens:
            norm, x = torch.ones(hidden, device="cuda").bfloat16(), torch.randn(m, hidden, device="cuda").bfloat16()
            us = time_us(partial(ops.rms_norm, weight=norm, eps=1e-6), [x] * 64)
            yield {"op": "norm", "m": m, "n": hidden, "us": round(us, 2)}


# ---- what follows from it -----------------------------------------------------------------------------------------


def product_of(row: Row) -> Product:
    return Product(row["op"], row["m"], row["n"], row["k"])


def behind_norms(rows: list[Row]) -> list[Row]:
    """The products, where cuBLAS takes the norm's kernel too before products that bring it along; but for the head,
    which few steps' time hangs on, so that it is judged by itself."""
    alone = {(row["m"], row["n"]): row["us"] for row in rows if row["op"] == "norm"}
    vocabularies = {model[-1] for model in MODELS.values()}
    found = []
    for row in rows:
        if row["op"] == "norm":
            continue
        norm = alone.get((row["m"], row["k"]), 0.0)
        if row["op"] in ("plain", "glu") and row["n"] not in vocabularies:
            row = {**row, "us": {**row["us"], CUBLAS: row["us"][CUBLAS] + norm}}
        found.append(row)
    return found


def losses(rows: list[Row], bands: Bands | None = None) -> list[tuple[Row, str, float]]:
    """Rows whose choice (today's, or by such bands) takes over `LOSS` times what cuBLAS takes, the worst first."""
    found = []
    for row in rows:
        name = _choice(row, bands)
        share = row["us"].get(name, math.nan) / row["us"][CUBLAS]
        if not share <= LOSS:  # nor is what could not be measured a good choice
            found.append((row, name, share))
    return sorted(found, key=lambda f: -f[2] if f[2] == f[2] else -math.inf)


def _choice(row: Row, bands: Bands | None) -> str:
    if bands is None or tabled(product_of(row)):
        return str(row["chosen"])
    return named(product_of(row), bands) or CUBLAS


def fit(rows: list[Row]) -> Bands:
    """See the module."""
    groups: dict[tuple[str, int], dict[float, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        product = product_of(row)
        groups[product.op, min(bucket(product.m), BUCKETS[-1])][product.mib].append(row)
    return {**BANDS, **{key: _bands(dict(sorted(sizes.items()))) for key, sizes in groups.items()}}


def _bands(sizes: dict[float, list[Row]]) -> tuple[tuple[float, str | None], ...]:
    """The cheapest cut of the sizes into bands: the least sum of logarithms of time over cuBLAS, and of bands."""
    names = [CUBLAS, *RECIPES]
    cost = [{name: _cost(rows, name) for name in names} for rows in sizes.values()]
    price = BAND * len(cost)
    best: list[tuple[float, int, str]] = [(0.0, 0, "")]  # of the first so many sizes: cost, begin of the last band
    for end in range(1, len(cost) + 1):
        options = (
            (best[begin][0] + price + sum(c[name] for c in cost[begin:end]), begin, name)
            for begin in range(end)
            for name in names
        )
        best.append(min(options, key=lambda o: o[0]))
    found: list[tuple[float, str | None]] = []
    mib, end = list(sizes), len(cost)
    while end:
        _, begin, name = best[end]
        limit = math.inf if end == len(cost) else float(f"{math.sqrt(mib[end - 1] * mib[end]):.3g}")
        if end < len(cost) and not mib[end - 1] < limit < mib[end]:
            limit = mib[end]
        if not found or found[0][1] != (None if name == CUBLAS else name):
            found.insert(0, (limit, None if name == CUBLAS else name))
        end = begin
    return tuple(found)


def _cost(rows: list[Row], name: str) -> float:
    """Mean logarithm of the recipe's time over that of cuBLAS; infinite where it is not surely better."""
    if name == CUBLAS:
        return 0.0
    shares = [row["us"].get(name, math.inf) / row["us"][CUBLAS] for row in rows]
    return math.inf if max(shares) > SURE else sum(map(math.log, shares)) / len(shares)


def layers(rows: list[Row], bands: Bands | None) -> list[tuple[str, list[float]]]:
    """By model, for each number of tokens: a layer's products as chosen over all of them by cuBLAS, norms included."""
    times = {product_of(row): row for row in rows if row["op"] != "norm"}
    alone = {(row["m"], row["n"]): row["us"] for row in rows if row["op"] == "norm"}
    found = []
    for model in MODELS:
        shares = []
        for m in TOKENS:
            own = list(products(model, m).values())[:4]
            if not all(p in times for p in own):
                continue
            names = [_choice(times[p], bands) for p in own]
            ours = sum(times[p]["us"].get(name, math.nan) for p, name in zip(own, names, strict=True))
            before = [names[3], names[1]]  # of qkv and of gate and up
            ours += sum(
                alone.get((m, own[0].k), 0.0)
                for this, last in zip((names[0], names[2]), before, strict=True)
                if this == CUBLAS and last != CUBLAS
            )
            shares.append(ours / sum(times[p]["us"][CUBLAS] for p in own))
        if shares:
            found.append((model, shares))
    return found


def report(rows: list[Row], bands: Bands | None) -> None:
    matrix = behind_norms(rows)
    bad = losses(matrix, bands)
    print(f"\n{len(bad)} of {len(matrix)} products lose more than {100 * LOSS - 100:.0f} % to cuBLAS")
    if bad:
        body = [
            [r["op"], str(r["m"]), str(r["n"]), str(r["k"]), name, f"{r['us'].get(name, math.nan):.2f}",
             f"{r['us'][CUBLAS]:.2f}", f"{share:.3f}"]
            for r, name, share in bad
        ]  # fmt: skip
        print(grid(("op", "tokens", "n", "k", "choice", "us", "cuBLAS us", "of cuBLAS"), body))
    whole = [(model, shares) for model, shares in layers(rows, bands) if len(shares) == len(TOKENS)]
    if whole:
        print("\nA layer's products over the same by cuBLAS:")
        print(grid(("tokens", *map(str, TOKENS)), [[model, *(f"{s:.3f}" for s in shares)] for model, shares in whole]))


def shown(bands: Bands) -> str:
    """`BANDS` as it stands in the rule's module."""

    def line(found: tuple[tuple[float, str | None], ...]) -> str:
        each = (f"({limit:g}, {'None' if name is None else f'{chr(34)}{name}{chr(34)}'})" for limit, name in found)
        return f"({', '.join(each)}{',' if len(found) == 1 else ''})"

    body = "".join(f'    ("{op}", {m}): {line(found)},\n' for (op, m), found in bands.items())
    return "BANDS: Bands = {\n" + body + "}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile beforehand")
    parser.add_argument("--compile-seconds", type=float, default=150.0, help="what is not compiled by then is left out")
    parser.add_argument("--seconds", type=float, default=240.0, help="nothing more is measured after so many")
    parser.add_argument("--fit", type=Path, help="results from which the bands are made")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.fit:
        rows = json.loads(arguments.fit.read_text())["rows"]
        bands = fit(behind_norms(rows))
        report(rows, bands)
        print("\n" + shown(bands))
        return
    models, tokens = arguments.models.split(","), [int(m) for m in arguments.tokens.split(",")]
    compiled = compile_all(models, tokens, arguments.jobs, arguments.compile_seconds)
    about, rows = json.dumps(environment()), list(norms(models, tokens))
    for row in measure(models, tokens, compiled, arguments.seconds):
        rows.append(row)
        best = min(row["us"], key=row["us"].__getitem__)
        print(f"[{time.time() - START:3.0f} s] {row['op']:8} {row['m']:3} x {row['n']:6} x {row['k']:5}: "
              f"cuBLAS {row['us'][CUBLAS]:.1f}, {row['chosen']} {row['us'].get(row['chosen'], math.nan):.1f}, "
              f"best {best} {row['us'][best]:.1f} us", flush=True)  # fmt: skip
        if arguments.out:  # each time, so that a run that is cut off leaves what it found
            found = ",\n".join(map(json.dumps, rows))
            arguments.out.write_text(f'{{"environment": {about},\n"rows": [\n{found}\n]}}\n')
    report(rows, None)


if __name__ == "__main__":
    main()
