"""Products of 64 to 8,192 tokens: which library call or kernel is quickest for each matrix of a model.

    python benchmarks/gemm_wide.py --shape llama-8b --tokens 64,128,256,8192 --out wide.json
    python benchmarks/gemm_wide.py --only silu --tokens 80,96,128,144,160,192,224,256 --out silu.json

Each candidate runs over as many copies of the matrix as leave the second-level cache cold, from one CUDA graph.
Printed: microseconds a product, and the sums over a model's layers with cuBLAS as PyTorch calls it and with the best.
``--only silu``: the gate and up product and the SiLU kernel after it against one kernel for both, in turn, as the clock
drifts. That kernel must first equal the two, bit by bit, on numbers whose sums are exact in any order.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from gapless.bench.environment import environment
from gapless.bench.models import SHAPES
from gapless.device.dependent_launch import LATE
from gapless.model.ops import triton as ops_triton
from gapless.model.products.choice import default
from gapless.model.products.config import Workspace, workspace_size
from gapless.model.products.few_tokens import plain
from gapless.model.products.gated import Gated, gated
from gapless.model.products.rule import Product

CHECK = False  # add up the parts
BYTES_PER_S, FLOP_PER_S = 4.36e12, 790e12


@triton.jit
def _tma_kernel(
    x_desc, w_desc, out_desc, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    SPECIAL: tl.constexpr,
):  # fmt: skip
    """``out = x @ w.T`` by persistent programs that fetch tiles through tensor descriptors."""
    rows = tl.cdiv(M, BM)
    cols = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), rows * cols, PROGRAMS, flatten=True, warp_specialize=SPECIAL):
        group = tile // (GROUP * rows)
        first = group * GROUP
        size = min(cols - first, GROUP)
        col = first + (tile % (GROUP * rows)) % size
        row = (tile % (GROUP * rows)) // size
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(K, BK)):
            x = x_desc.load([row * BM, k * BK])
            w = w_desc.load([col * BN, k * BK])
            acc = tl.dot(x, w.T, acc)
        out_desc.store([row * BM, col * BN], acc.to(out_desc.dtype))


@triton.jit
def _few_kernel(
    x_desc, w_desc, part_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """For few tokens: weights are the tall side of the product, so that tensor cores are fed whole tiles. Sums of each
    part of the inputs ``[SPLIT, M, N]`` are left as they are: a lower bound, adding them up comes on top."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    acc = tl.zeros((BN, BM), tl.float32)
    blocks = tl.cdiv(K, BK)
    for k in range(part * blocks // SPLIT, (part + 1) * blocks // SPLIT):
        w = w_desc.load([tile * BN, k * BK])
        x = x_desc.load([0, k * BK])
        acc = tl.dot(w, x.T, acc)
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    at = part_ptr + (part.to(tl.int64) * M + m[None, :]) * N + n[:, None]
    tl.store(at, acc, mask=(n < N)[:, None] & (m < M)[None, :])


Config = tuple[int, int, int, int, int, int]
"""BM, BN, BK, stages, warps, columns of a group."""


def few_configs(m: int) -> list[Config]:
    """For up to 64 tokens; the last number is the parts of the inputs."""
    found = []
    for bn, bk, stages, split in itertools.product((64, 128), (64, 128, 256), (3, 4, 6, 8), (1, 2, 4)):
        if (bn + m) * bk * 2 * stages < 220_000 and bn * bk * 2 * stages >= 48_000:
            found.append((m, bn, bk, stages, 4, split))
    return found


def tma_configs(m: int) -> list[Config]:
    if m <= 64:
        return few_configs(max(16, m))
    tall = [64] if m <= 64 else [128, 64] if m <= 128 else [128, 256]
    found = []
    for bm, bn, bk, stages in itertools.product(tall, (64, 128, 256), (64, 128), (3, 4, 5)):
        warps = 8 if bm * bn >= 128 * 128 else 4
        room = (bm + bn) * bk * 2 * stages + bm * bn * 2
        if room < 225_000 and bm * bn <= 256 * 128 and not (bk == 128 and stages > 4):
            found += [(bm, bn, bk, stages, warps, group) for group in ((4,) if m <= 256 else (8, 16))]
    return found


def tma(x: torch.Tensor, w: torch.Tensor, config: Config, out: torch.Tensor) -> torch.Tensor:
    bm, bn, bk, stages, warps, group = config
    m, k = x.shape
    n = w.shape[0]
    if m <= 64:
        part = torch.empty(group, m, n, dtype=torch.float32, device=x.device)
        _few_kernel[(-(-n // bn), group)](
            TensorDescriptor.from_tensor(x, [bm, bk]), TensorDescriptor.from_tensor(w, [bn, bk]), part, m, n, k,
            BM=bm, BN=bn, BK=bk, SPLIT=group, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return part.sum(0) if CHECK else part
    programs = min(132, -(-m // bm) * -(-n // bn))
    _tma_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [bm, bk]), TensorDescriptor.from_tensor(w, [bn, bk]),
        TensorDescriptor.from_tensor(out, [bm, bn]), m, n, k, BM=bm, BN=bn, BK=bk, GROUP=group, PROGRAMS=programs,
        SPECIAL=False, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def compile_one(job: tuple[int, int, int, Config]) -> None:
    """In a process of its own, so that the cores of the host share the work; the result comes by Triton's cache."""
    m, n, k, config = job
    try:
        x, w = (torch.zeros(size, dtype=torch.bfloat16, device="cuda") for size in ((m, k), (n, k)))
        tma(x, w, config, torch.zeros(m, n, dtype=torch.bfloat16, device="cuda"))
    except Exception:  # what does not fit is no candidate
        return


def graph_us(work: Callable[[int], Any], copies: int) -> float:
    """Microseconds of one call, over ``copies`` calls in a graph; the median of five replays."""
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            work(i)
    times = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / copies)
    return statistics.median(times[1:])


def candidates(m: int, x: torch.Tensor, ws: list[torch.Tensor]) -> dict[str, Callable[[int], Any]]:
    n = ws[0].shape[0]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    turned = torch.empty(n, m, dtype=x.dtype, device=x.device)

    def library(name: str, work: Callable[[int], Any]) -> Callable[[int], Any]:
        def call(i: int) -> Any:
            torch.backends.cuda.preferred_blas_library(name)
            return work(i)

        return call

    found: dict[str, Callable[[int], Any]] = {
        "linear": library("cublas", lambda i: functional.linear(x, ws[i])),
        "linear, cublasLt": library("cublaslt", lambda i: functional.linear(x, ws[i])),
        "W @ x.T": library("cublas", lambda i: torch.mm(ws[i], x.t(), out=turned)),
        "W @ x.T, cublasLt": library("cublaslt", lambda i: torch.mm(ws[i], x.t(), out=turned)),
    }
    n, k = ws[0].shape
    op = "residual" if n == 4096 else "glu" if n > 20_000 else "plain"
    choice = default(Product(op, m, n, k)) if m <= 64 else None
    if choice is not None:  # its tiles and its split, without what is fused into it
        space = Workspace(x.device)
        space.reserve(*workspace_size("plain", m, n, choice.fit(k)))
        found[f"gapless {op}"] = lambda i: plain(x, ws[i], choice, space, pdl=LATE)
    for config in tma_configs(m):
        found[f"tma {config}"] = lambda i, config=config: tma(x, ws[i], config, out)
    return found


GATED = (Gated(128, 128, 64, 4, 8), Gated(128, 64, 64, 6, 4), Gated(64, 128, 64, 4, 4))


def silu(n: int, k: int, tokens: list[int]) -> list[dict[str, Any]]:
    """Gate and up of ``[n, k]`` with SiLU, for each number of tokens: microseconds, the median of turns."""
    gen = torch.Generator(device="cuda").manual_seed(0)
    copies = max(2, 600_000_000 // (n * k * 2))
    ws = [torch.randn(n, k, generator=gen, device="cuda").mul_(0.02).bfloat16() for _ in range(copies)]
    exact = torch.randint(-30, 31, (n, k), generator=gen, device="cuda").bfloat16().mul_(2.0**-13)
    rows: list[dict[str, Any]] = []
    for m in tokens:
        x = torch.randn(m, k, generator=gen, device="cuda").bfloat16()
        works: dict[str, Callable[[int], Any]] = {
            "cuBLAS, SiLU": lambda i, x=x: ops_triton.act_mul(functional.linear(x, ws[i]))
        }
        whole = torch.randint(-30, 31, (m, k), generator=gen, device="cuda").bfloat16()
        want = ops_triton.act_mul(functional.linear(whole, exact))
        for config in GATED:
            label = f"{config.tokens}x{config.outputs}x{config.inputs}, {config.stages} stages, {config.warps} warps"
            if wrong := int((gated(whole, exact, config) != want).sum()):
                print(f"  {label} is wrong in {wrong} places")
            else:
                works[label] = lambda i, x=x, config=config: gated(x, ws[i], config)
        turns: dict[str, list[float]] = {label: [] for label in works}
        for label in [*works] * 5:
            turns[label].append(graph_us(works[label], copies))
        times = {label: statistics.median(us) for label, us in turns.items()}
        floor = 1e6 * max((n * k + m * (n / 2 + k)) * 2 / BYTES_PER_S, 2 * m * n * k / FLOP_PER_S)
        measured = "; ".join(f"{label} {us:.1f}" for label, us in times.items())
        print(f"M={m:4} floor {floor:5.1f} us; {measured}", flush=True)
        rows.append({"tokens": m, "matrix": "gate_up", "floor_us": floor, "us": times})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--tokens", default="64,128,256,8192")
    parser.add_argument("--seconds", type=float, default=60, help="for measuring; what is not reached is left out")
    parser.add_argument("--compile-seconds", type=float, default=45)
    parser.add_argument("--only", choices=("silu",))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    h, f, d = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    hq, hk = shape["num_attention_heads"], shape["num_key_value_heads"]
    layers = shape["num_hidden_layers"]
    sizes = {"qkv": ((hq + 2 * hk) * d, h), "out": (h, hq * d), "gate_up": (2 * f, h), "down": (h, f)}
    tokens = [int(m) for m in args.tokens.split(",")]
    if args.only == "silu":
        save(args, silu(*sizes["gate_up"], tokens))
        return
    jobs = [(m, n, k, c) for m in tokens for n, k in sizes.values() for c in tma_configs(m)]
    start = time.perf_counter()
    pool = ProcessPoolExecutor(min(14, os.cpu_count() or 2), mp_context=torch.multiprocessing.get_context("spawn"))
    futures = [pool.submit(compile_one, job) for job in jobs]
    while time.perf_counter() - start < args.compile_seconds and not all(future.done() for future in futures):
        time.sleep(0.2)
    ready = {job for job, future in zip(jobs, futures, strict=True) if future.done()}
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"{len(ready)} of {len(jobs)} kernels compiled in {time.perf_counter() - start:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for m in tokens:
        sums = {"linear": 0.0, "best": 0.0}
        for name, (n, k) in sizes.items():
            gen = torch.Generator(device="cuda").manual_seed(0)
            copies = max(2, min(layers, 600_000_000 // (n * k * 2))) if m < 1024 else 4
            ws = [torch.randn(n, k, generator=gen, device="cuda").mul_(0.02).bfloat16() for _ in range(copies)]
            x = torch.randn(m, k, generator=gen, device="cuda").bfloat16()
            want = functional.linear(x, ws[0]).float()
            floor = 1e6 * max((n * k + m * (n + k)) * 2 / BYTES_PER_S, 2 * m * n * k / FLOP_PER_S)
            times: dict[str, float] = {}
            for label, work in candidates(m, x, ws).items():
                config = eval(label[4:]) if label.startswith("tma") else None
                if config is not None and (m, n, k, config) not in ready:
                    continue
                if times and time.perf_counter() - start > args.seconds:
                    break
                try:
                    if config is not None:
                        globals()["CHECK"] = True
                        gap = (work(0).float() - want).norm() / want.norm()
                        if not float(gap) < 0.01:
                            print(f"  {label} is wrong by {float(gap):.2e}")
                            continue
                    globals()["CHECK"] = False
                    times[label] = graph_us(work, copies)
                except Exception as error:
                    print(f"  {label}: {type(error).__name__} {str(error)[:80]}")
            ranked = sorted(times.items(), key=lambda item: item[1])
            best = next((item for item in ranked if not item[0].startswith("W")), ranked[0])
            sums["linear"] += layers * times["linear"] * 1e-3
            sums["best"] += layers * best[1] * 1e-3
            libraries = ", ".join(f"{label} {us:.1f}" for label, us in times.items() if not label.startswith("tma"))
            quickest = "; ".join(f"{label} {us:.1f}" for label, us in ranked if label.startswith("tma"))[:120]
            print(f"M={m:5} {name:8} floor {floor:7.1f} us; {libraries}; {quickest}", flush=True)
            rows.append({"tokens": m, "matrix": name, "floor_us": floor, "us": times})
            del ws
        print(f"M={m:5} layers in all: linear {sums['linear']:.3f} ms, best {sums['best']:.3f} ms", flush=True)
    save(args, rows)
    os._exit(0)  # compilations that were left behind do not hold the process


def save(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if args.out:
        args.out.write_text(json.dumps({"environment": environment(), "shape": args.shape, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
