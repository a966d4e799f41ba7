"""Products of a decode step on one GPU: correctness, time by CUDA-graph replay, then whole forwards.

    PYTHONPATH=src python3 benchmarks/gemm_kernels.py --out gemm.json

Each graph runs one product over many layers' weights, with more bytes than the second-level cache has. Times are per
product (for cuBLAS with the kernel that fusion saves: residual add and norm, or SiLU) in microseconds, and TB/s counts
the weights once. The whole forward is timed as the decoder runs it: embedding to logits, over the paged cache.
Kernels are compiled ahead by worker processes, which share Triton's cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from gapless.attention import triton as attention
from gapless.attention.context import AttentionContext, AttentionParams
from gapless.bench.products import Trial, measure
from gapless.device.dependent_launch import EARLY, LATE, OFF
from gapless.model.ops import reference as ops_reference
from gapless.model.ops import triton as ops_triton
from gapless.model.parts.attention import Attention
from gapless.model.parts.decoder import Decoder, Embedding, Head, Layer
from gapless.model.parts.experts import Gate
from gapless.model.parts.feed_forward import FeedForward
from gapless.model.parts.norm import Norm
from gapless.model.parts.rotary import Rotary
from gapless.model.products.config import GemmConfig, Workspace, workspace_size
from gapless.model.products.few_tokens import glu, plain, residual
from gapless.model.products.rule import Product, bucket, recipes
from gapless.model.products.weight import Weight
from gapless.model.run.few_tokens import FewTokens
from gapless.model.run.model import DecoderModel
from gapless.model.run.walk import walk

START = time.time()
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
EPS = 1e-6
MS = (1, 16, 32, 64, 128, 256)
NAMES = ("qkv", "out", "gate_up", "down", "head")
OPS = {"qkv": "plain", "out": "residual", "gate_up": "glu", "down": "residual", "head": "plain"}
PDL = {OFF: "off", LATE: "late", EARLY: "early"}
RACES = 30
REPORT: dict[str, Any] = {}
Picks = dict[tuple[str, int, str], GemmConfig | None]


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    layers: int
    hq: int
    hk: int
    d: int
    width: int
    vocab: int
    qk_norm: bool
    tied: bool
    # (batch, context) of the whole forwards
    loads: tuple[tuple[int, int], ...]

    def product(self, name: str, m: int) -> Product:
        n, k = {
            "qkv": ((self.hq + 2 * self.hk) * self.d, self.hidden), "out": (self.hidden, self.hq * self.d),
            "gate_up": (2 * self.width, self.hidden), "down": (self.hidden, self.width),
            "head": (self.vocab, self.hidden),
        }[name]  # fmt: skip
        return Product(OPS[name], m, n, k)


SHAPES = (
    Shape("0.6B", 1024, 28, 16, 8, 128, 3072, 151936, True, True, ((1, 384), (32, 384), (64, 384), (256, 640))),
    Shape("8B", 4096, 32, 32, 8, 128, 14336, 128256, False, False,
          ((1, 256), (32, 512), (32, 3840), (64, 512), (256, 640))),
)  # fmt: skip


def sweep(product: Product, head: bool) -> list[GemmConfig]:
    """What is timed: the rule's recipes and some more."""
    n = product.n // 2 if product.op == "glu" else product.n
    k, rows, is_glu = product.k, bucket(product.m), product.op == "glu"

    def dot(tall: int, block_k: int, waves: float, warps: int, stages: int, **more: Any) -> GemmConfig:
        tiles = -(-n // tall)
        split = max(1, min(int(waves * 132 / tiles + 0.02), k // block_k, 12))
        return GemmConfig(True, tall, block_k, 1 if head else split, warps, stages, **more)

    found = [recipe.config(product) for recipe in recipes(product).values()]
    if product.m == 1:
        base = 2 if is_glu else 4
        found += [
            GemmConfig(False, base, 512, preload=True),
            GemmConfig(False, 8, 512, preload=True),
            GemmConfig(False, base, 1024, preload=True, prefetch=k),
            GemmConfig(False, 2 * base, 1024, warps=8, preload=True),
            GemmConfig(False, 16, 256, preload=True),
        ]
    elif rows <= 64:
        if is_glu:
            found += [
                dot(64, 64, 1, 4, 6, prefetch=512),
                dot(64, 128, 2, 4, 3, prefetch=256),
                dot(64, 64, 4, 4, 4, prefetch=256),
                dot(128, 64, 1, 8, 5, prefetch=256),
                dot(32, 128, 2, 4, 4, prefetch=256),
            ]
        else:
            found += [
                dot(128, 64, 1.1, 4, 8, prefetch=512),
                dot(64, 64, 4, 4, 5, prefetch=256),
                dot(128, 64, 2, 4, 4, preload=True, prefetch=256),
                dot(128, 128, 1, 8, 4, prefetch=512),
                dot(256, 64, 1, 8, 4, prefetch=256),
            ]
        if rows == 16:  # not on the list of loads: fewer
            found = found[:5]
        if n * k < 8 * 2**20 and not head:
            found += [
                dot(64, 256, 2, 8, 1, preload=True),
                dot(32, 256, 1, 4, 3, preload=True, prefetch=1024),
                dot(16, 256, 1, 4, 3, preload=True, prefetch=1024),
            ]
            if rows > 16:
                found += [
                    dot(64, 128, 1, 4, 3, preload=True, prefetch=1024),
                    dot(32, 128, 2, 4, 4, prefetch=1024),
                ]
    elif rows <= 128:
        tall = 64 if is_glu else 128
        found += [
            dot(tall, 64, 2, 8, 3, prefetch=128),
            dot(64, 64, 2, 4, 4, prefetch=128),
            dot(tall, 128, 1, 8, 3, prefetch=256),
        ]
    else:
        found += [dot(64, 64, 2, 4, 4, block_m=128)]
        if not is_glu:
            found += [dot(128, 64, 1, 8, 4), dot(128, 64, 1, 8, 3, block_m=128), dot(256, 64, 1, 8, 3, block_m=128)]
    unique: dict[GemmConfig, GemmConfig] = {c.fit(k): c.fit(k) for c in found}
    return list(unique)


# ---- compiling ahead ---------------------------------------------------------------------------------------------


Task = tuple[Product, GemmConfig, int]


def compile_one(task: Task) -> tuple[Task, str]:
    product, config, pdl = task
    try:
        weight = torch.zeros(product.n, product.k, dtype=DTYPE, device=DEVICE)
        call(product, config, weight, pdl=pdl)
        torch.cuda.synchronize()
        del weight
        torch.cuda.empty_cache()
    except Exception as error:
        return task, f"{product} {config}: {error!r}"[:300]
    return task, ""


def call(
    product: Product, config: GemmConfig | None, weight: torch.Tensor, pdl: int = OFF, inputs: Any = None
) -> list[torch.Tensor]:
    """Outputs of one product on ``inputs`` (x, residual, norm, squares)."""
    m, n, k = product.m, product.n, product.k
    x, before, norm, squares = inputs or make_inputs(product)
    if config is None:
        if squares is not None:
            x = ops_triton.rms_norm(x, torch.ones(k, dtype=DTYPE, device=DEVICE), EPS)
        y = functional.linear(x, weight)
        if product.op == "residual":
            normed, total = ops_triton.add_rms_norm(y, before, norm, EPS)
            return [total, normed]
        return [ops_triton.act_mul(y) if product.op == "glu" else y]
    space = Workspace(DEVICE)
    space.reserve(*workspace_size(product.op, m, n, config.fit(k)))
    if product.op == "residual":
        stream = residual(x, weight, config, space, before, norm, pdl=pdl)
        assert stream.squares is not None
        scale = torch.rsqrt(stream.squares.sum(1, keepdim=True) / n + EPS)
        return [stream.residual, stream.x.float() * scale]
    if product.op == "glu":
        return [glu(x, weight, config, space, squares=squares, eps=EPS, pdl=pdl)]
    return [plain(x, weight, config, space, squares=squares, eps=EPS, pdl=pdl)]


def make_inputs(product: Product) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    m, n, k = product.m, product.n, product.k
    x = torch.randn(m, k, device=DEVICE).to(DTYPE)
    before = torch.randn(m, n, device=DEVICE).to(DTYPE) if product.op == "residual" else x
    norm = (1 + 0.2 * torch.randn(n, device=DEVICE)).to(DTYPE)
    tiles = 512 if m == 1 else 32
    squares = None if product.op == "residual" else x.float().pow(2).reshape(m, tiles, -1).sum(2)
    return x, before, norm, squares


def exact(product: Product, weight: torch.Tensor, inputs: Any) -> list[torch.Tensor]:
    """The same in fp32 throughout."""
    x, before, norm, squares = inputs
    x, weight = x.float(), weight.float()
    if squares is not None:
        x = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS)
    y = x @ weight.t()
    if product.op == "residual":
        total = before.float() + y
        return [total, total * torch.rsqrt(total.pow(2).mean(1, keepdim=True) + EPS) * norm.float()]
    return [ops_reference.act_mul(y) if product.op == "glu" else y]


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(((g.float() - w).norm() / w.norm()).nan_to_num(9e9).item() for g, w in zip(got, want, strict=True))


# ---- one product -------------------------------------------------------------------------------------------------


def products(shape: Shape, picks: Picks, seconds: float, compiled: set[Task]) -> None:
    rows: list[dict[str, Any]] = REPORT.setdefault("products", [])
    deadline = time.time() + seconds
    for name in NAMES:
        p = shape.product(name, 1)
        count = 1 if name == "head" else min(shape.layers, max(2, int(1.5e9 / (2 * p.n * p.k))))
        weights = [torch.randn(p.n, p.k, device=DEVICE, dtype=DTYPE).mul_(p.k**-0.5) for _ in range(count)]
        if name == "head":  # 0.3 or 1 GB: more than the cache, alone
            weights = weights * 3
        for m in MS:
            if time.time() > deadline:
                print("out of time for", shape.name, name, m)
                continue
            product = replace(p, m=m)
            inputs = make_inputs(product)
            want = exact(product, weights[0], inputs)
            usual = error(call(product, None, weights[0], inputs=inputs), want)
            times: dict[GemmConfig | None, float] = {}
            for config in [None, *sweep(product, name == "head")]:
                if config is not None and (product, config, LATE) not in compiled:
                    continue
                row: dict[str, Any] = {"shape": shape.name, "product": name, "m": m,
                                       "config": None if config is None else asdict(config)}  # fmt: skip
                try:
                    if config is not None:
                        poison = [torch.full_like(t, float("nan"), dtype=DTYPE) for t in (*want, *want)]
                        del poison
                        row["error"] = error(call(product, config, weights[0], LATE, inputs), want)
                        if row["error"] > 1.5 * usual + 2e-4:
                            raise ArithmeticError(f"error {row['error']:.2e}, cuBLAS {usual:.2e}")
                    us = measure(Trial(product, config, DEVICE, LATE), weights)
                    row |= {"us": us, "tb_s": 2 * p.n * p.k / us / 1e6}
                    times[config] = us
                except Exception as problem:
                    row["failed"] = repr(problem)[:300]
                    print("  FAILED", shape.name, name, m, config, row["failed"][:160], flush=True)
                rows.append(row)
            order = sorted(times, key=times.__getitem__)
            picks[shape.name, m, name] = order[0]
            ranks[shape.name, m, name] = order[:3]
            gb = 2 * p.n * p.k / 1e6
            shown = " | ".join(f"{times[c]:.1f}us {gb / times[c]:.2f} {brief(c)}" for c in order[:3])
            print(f"[{time.time() - START:5.1f}s] {shape.name} {name:7} M={m:3} cuBLAS {times.get(None, 0):6.1f}us "
                  f"{gb / times.get(None, 1e9):.2f} err {usual:.1e} best: {shown}", flush=True)  # fmt: skip
        del weights
        torch.cuda.empty_cache()


def brief(config: GemmConfig | None) -> str:
    if config is None:
        return "cuBLAS"
    c = config
    kind, more = "dot" if c.dot else "one", f"pre{int(c.preload)},pf{c.prefetch},bm{c.block_m}"
    return f"{kind}({c.block_n},{c.block_k},s{c.split},w{c.warps},st{c.stages},{more})"


ranks: dict[tuple[str, int, str], list[GemmConfig | None]] = {}

# ---- whole forwards ----------------------------------------------------------------------------------------------


class Model:
    """Random weights of one shape, and both decoders over them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        s = shape

        def normal(n: int, k: int) -> torch.Tensor:
            return torch.randn(n, k, device=DEVICE, dtype=DTYPE).mul_(k**-0.5)

        def norm(n: int) -> Norm:
            return Norm("rms", (1 + 0.1 * torch.randn(n, device=DEVICE)).to(DTYPE), None, EPS)

        speed = 1e4 ** (-torch.arange(s.d // 2, device=DEVICE) / (s.d // 2))
        angle = torch.arange(8192, device=DEVICE)[:, None] * speed
        rotary = Rotary(angle.cos().repeat(1, 2).to(DTYPE), angle.sin().repeat(1, 2).to(DTYPE))
        params = AttentionParams(s.d**-0.5)

        def layer(place: int) -> Layer:
            qkv, out = Weight(normal((s.hq + 2 * s.hk) * s.d, s.hidden)), Weight(normal(s.hidden, s.hq * s.d))
            norms = (norm(s.d), norm(s.d)) if s.qk_norm else (None, None)
            part = Attention(qkv, out, s.hq, s.hk, s.d, params, rotary, *norms, False, place)
            up, down = Weight(normal(2 * s.width, s.hidden)), Weight(normal(s.hidden, s.width))
            return Layer(norm(s.hidden), part, None, norm(s.hidden), FeedForward(up, down, Gate("silu")), None)

        table = torch.randn(s.vocab, s.hidden, device=DEVICE, dtype=DTYPE)
        head = Weight(table if s.tied else normal(s.vocab, s.hidden))
        layers = tuple(layer(place) for place in range(s.layers))
        self.decoder = Decoder(Embedding(table), layers, norm(s.hidden), Head(head))

    def first(self, layers: int) -> Decoder:
        return replace(self.decoder, layers=self.decoder.layers[:layers])

    def old(self, layers: int) -> DecoderModel:
        about = SimpleNamespace(name="", kv_specs=(), vocab_size=self.shape.vocab, max_position=8192,
                                eos_token_ids=(), weight_bytes=0, dtype=DTYPE, device=DEVICE)  # fmt: skip
        return DecoderModel(about, self.first(layers), ops_triton, attention.attend_cached)  # type: ignore[arg-type]

    def new(self, layers: int, picks: dict[str, GemmConfig | None], m: int, pdl: int, **more: Any) -> FewTokens:
        table = {}
        for name, config in picks.items():
            p = self.shape.product(name, bucket(m))
            table[bucket(m), p.op, p.n, p.k] = config

        def choose(product: Product) -> GemmConfig | None:
            return table.get((bucket(product.m), product.op, product.n, product.k))

        return FewTokens(self.first(layers), attention.attend_cached, limit=m, pdl=pdl, choose=choose, **more)

    def step(
        self, batch: int, ctx: int, layers: int
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[], AttentionContext]]:
        """Ids, positions, and a maker of contexts: the scratch of each forward must start empty."""
        s, block = self.shape, 16
        pages = -(-ctx // block)
        table = (torch.randperm(batch * pages, dtype=torch.int32).view(batch, pages) + 1).to(DEVICE)
        caches = [
            torch.randn(2, batch * pages + 1, block, s.hk, s.d, dtype=DTYPE, device=DEVICE) for _ in range(layers)
        ]
        last = ctx - 1
        slots = table[:, last // block].long() * block + last % block
        starts = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32)
        lens = torch.full((batch,), ctx, device=DEVICE, dtype=torch.int32)
        rows = torch.arange(batch, device=DEVICE, dtype=torch.int32)

        def context() -> AttentionContext:
            return AttentionContext(kv_caches=caches, slot_mapping=slots, query_start_loc=starts, seq_lens=lens,
                                    rows=rows, block_tables=table, block_size=block, decode_only=True)  # fmt: skip

        ids = torch.randint(0, s.vocab, (batch,), device=DEVICE)
        positions = torch.full((batch,), last, device=DEVICE)
        return ids, positions, context


def capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, replays: int = 9) -> float:
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def forwards(model: Model, picks: Picks, pool: Any, limit: float) -> None:
    rows: list[dict[str, Any]] = REPORT.setdefault("forwards", [])
    for batch, ctx in model.shape.loads:
        row: dict[str, Any] = {"shape": model.shape.name, "batch": batch, "ctx": ctx}
        if time.time() - START > limit:
            print("out of time for", row)
            continue
        try:
            forward(model, picks, pool, batch, ctx, row)
        except Exception:
            row["failed"] = traceback.format_exc()[-1500:]
        rows.append(row)
        print(f"[{time.time() - START:5.1f}s]", json.dumps(row), flush=True)
        torch.cuda.empty_cache()


def forward(model: Model, picks: Picks, pool: Any, batch: int, ctx: int, row: dict[str, Any]) -> None:
    """Old and new decoder on one load."""
    shape, m = model.shape, bucket(batch)
    chosen = {name: picks.get((shape.name, m, name)) for name in NAMES}
    few = min(shape.layers, 8)
    ids, positions, context = model.step(batch, ctx, shape.layers)
    logits = [torch.empty(batch, shape.vocab, dtype=DTYPE, device=DEVICE) for _ in range(2)]
    old = model.old(shape.layers)
    # `logits_index` is not read by a step that only decodes.
    row["old_ms"] = replay_ms(capture(lambda: old.forward(ids, positions, context(), ids, logits[0])))

    def step(new: FewTokens, layers: int = shape.layers) -> Callable[[], None]:
        return lambda: walk(model.first(layers), new, ids, positions, context(), None, logits[1])

    # In the chain the kernels overlap, which may change which one is best: try the runners-up there.
    if (batch, ctx) != (32, 3840):
        for name in NAMES[:4]:
            times: dict[GemmConfig | None, float] = {}
            for config in ranks.get((shape.name, m, name), [])[:3]:
                times[config] = replay_ms(capture(step(model.new(few, chosen | {name: config}, batch, LATE), few)), 7)
            if times:
                best = min(times, key=times.__getitem__)
                if best != chosen[name]:
                    print(f"  in the chain: {name} {brief(chosen[name])} -> {brief(best)} "
                          f"{times[chosen[name]]:.3f} -> {times[best]:.3f} ms of {few} layers")  # fmt: skip
                chosen[name] = picks[shape.name, m, name] = best
    ahead = [(shape.product(n, m), c, p) for n, c in chosen.items() if c is not None for p in (OFF, EARLY)]
    pool.map(compile_one, ahead, chunksize=1)
    outs: dict[str, torch.Tensor] = {}
    for label, pdl, more in (
        ("off", OFF, {}), ("late", LATE, {}), ("early", EARLY, {}),
        ("late, products only", LATE, {"early_attention": False}),
    ):  # fmt: skip
        graph = capture(step(model.new(shape.layers, chosen, batch, pdl, **more)))
        row[label] = replay_ms(graph)
        outs[label] = logits[1].clone()
        bad = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(RACES):
            logits[1].fill_(float("nan"))
            graph.replay()
            bad += (logits[1] != outs[label]).any()
        row[f"{label}: replays that differ"] = int(bad)
    row["pdl same bits"] = all(torch.equal(outs["off"], o) for o in outs.values())
    gap = (outs["late"].float() - logits[0].float()).norm() / logits[0].float().norm()
    row["gap to old"] = float(gap)
    row["same argmax"] = float((outs["late"].argmax(1) == logits[0].argmax(1)).float().mean())


def _wide(part: Any) -> Any:
    """A part, or a decoder, in fp32."""
    if isinstance(part, torch.Tensor):
        return part.float()
    if isinstance(part, tuple):
        return tuple(map(_wide, part))
    if not is_dataclass(part) or isinstance(part, type):
        return part
    return replace(part, **{f.name: _wide(getattr(part, f.name)) for f in fields(part) if f.init})


def accuracy(model: Model, picks: Picks) -> None:
    """Few layers against fp32: the new path must not be further off than the old one."""
    s = model.shape
    for batch in (1, 32):
        layers, ctx = 3, 100
        ids, positions, context = model.step(batch, ctx, layers)
        got = {"old": torch.empty(batch, s.vocab, dtype=DTYPE, device=DEVICE)}
        got["new"] = torch.empty_like(got["old"])
        model.old(layers).forward(ids, positions, context(), ids, got["old"])
        chosen = {name: picks.get((s.name, bucket(batch), name)) for name in NAMES}
        new = model.new(layers, chosen, batch, LATE)
        walk(model.first(layers), new, ids, positions, context(), None, got["new"])
        wide = Model.__new__(Model)
        wide.shape = s
        wide.decoder = _wide(model.first(layers))
        ctx32 = context()
        ctx32 = replace(ctx32, kv_caches=[c.float() for c in ctx32.kv_caches], scratch={})
        want = torch.empty(batch, s.vocab, dtype=torch.float32, device=DEVICE)
        wide.old(layers).forward(ids, positions, ctx32, ids, want)
        row = {k: ((v.float() - want).norm() / want.norm()).item() for k, v in got.items()}
        REPORT.setdefault("accuracy", []).append({"shape": s.name, "batch": batch, **row})
        ok = row["new"] < 1.3 * row["old"] + 1e-4
        print(f"accuracy {s.name} batch {batch}: old {row['old']:.2e} new {row['new']:.2e} {'ok' if ok else 'BAD'}")


def table(picks: Picks) -> None:
    print("TABLE of products/choice.py:")
    for shape, m, name in itertools.product(SHAPES, MS, NAMES):
        if (shape.name, m, name) in picks:
            p, c = shape.product(name, m), picks[shape.name, m, name]
            shown = "None" if c is None else repr(c).replace("GemmConfig(dot=", "GemmConfig(")
            for field in ("block_n", "block_k", "split", "warps"):
                shown = shown.replace(f"{field}=", "")
            shown = shown.replace(", preload=False", "").replace(", prefetch=0", "").replace(", block_m=0", "")
            print(f"    ({p.op!r}, {m}, {p.n}, {p.k}): {shown},".replace("'", '"'))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--seconds", type=float, default=25.0, help="for the products of one shape")
    parser.add_argument("--compile-seconds", type=float, default=75.0, help="what is not compiled by then is left out")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds after which no further forward begins")
    args = parser.parse_args()

    def save() -> None:
        if args.out:
            args.out.write_text(json.dumps(REPORT, indent=1))

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spawn = multiprocessing.get_context("spawn")
    pool = spawn.Pool(args.workers)
    order = (32, 1, 64, 128, 256, 16)
    tasks = [
        (shape.product(name, m), config, LATE)
        for m, shape, name in itertools.product(order, SHAPES, NAMES)
        for config in sweep(shape.product(name, m), name == "head")
    ]
    print(f"{len(tasks)} kernels to compile by {args.workers} workers", flush=True)
    compiled: set[Task] = set()
    results = pool.imap_unordered(compile_one, tasks)
    for _ in tasks:
        try:
            task, problem = results.next(max(0.1, START + args.compile_seconds - time.time()))
        except multiprocessing.TimeoutError:
            pool.terminate()
            pool = spawn.Pool(args.workers)
            break
        if problem:
            print("  ", problem, flush=True)
        else:
            compiled.add(task)
    print(f"[{time.time() - START:5.1f}s] {len(compiled)} compiled", flush=True)
    REPORT["device"] = torch.cuda.get_device_name()
    torch.backends.cuda.matmul.allow_tf32 = False
    picks: Picks = {}
    for shape in SHAPES:
        try:
            products(shape, picks, args.seconds, compiled)
        except Exception:
            traceback.print_exc()
        save()
    for shape in SHAPES:
        try:
            model = Model(shape)
            for section in (lambda m: accuracy(m, picks), lambda m: forwards(m, picks, pool, args.limit)):
                try:
                    section(model)
                except Exception:
                    traceback.print_exc()
                save()
            del model
            torch.cuda.empty_cache()
        except Exception:
            traceback.print_exc()
    pool.terminate()
    REPORT["table"] = [
        {"shape": s, "m": m, "product": n, "config": None if c is None else asdict(c)} for (s, m, n), c in picks.items()
    ]
    save()
    table(picks)
    for row in REPORT.get("forwards", []):
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if "replays" not in k})
    print(f"{time.time() - START:.0f} s in all")


if __name__ == "__main__":
    main()
