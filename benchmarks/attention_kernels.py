"""Paged attention on one GPU: correctness on random cases, then time by CUDA-graph replay.

    python benchmarks/attention_kernels.py --out attention.json

One graph holds several calls on different caches ("layers"), with more bytes than the second-level cache has,
and shares one plan as a step does. Times are per call. Bandwidth counts keys and values once.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from gapless.attention import triton as entry
from gapless.attention.context import AttentionContext, AttentionParams
from gapless.attention.triton_decode import CONFIGS as DECODE_CONFIGS
from gapless.attention.triton_decode import DecodeConfig
from gapless.attention.triton_prefill import CONFIGS as PREFILL_CONFIGS
from gapless.attention.triton_prefill import PrefillConfig

DEVICE = "cuda"
READ_TB_S = 4.36  # measured ceiling of an H200; only the "share" column depends on it
L2_BYTES = 256 * 2**20
START = time.time()
RESULTS: list[dict[str, Any]] = []

SHAPES = {"8B": (32, 8, 128), "0.6B": (16, 8, 128)}
DECODE_LOADS = [(32, 512), (32, 1024), (32, 3840), (32, 4352), (32, 8192), (1, 256), (1, 4096), (256, 640)]
BASE = DECODE_CONFIGS[(9, 128, 2)]
DECODE_VARIANTS = [
    BASE,
    replace(BASE, last_arriver_merges=False),
    replace(BASE, programs=3),
    replace(BASE, programs=6),
    replace(BASE, programs=12),
    replace(BASE, programs=24),
    replace(BASE, min_split=128),
    replace(BASE, min_split=512),
    replace(BASE, min_split=128, last_arriver_merges=False),
    replace(BASE, stages=4),
    replace(BASE, stages=4, programs=4),
    replace(BASE, block_n=128),
    replace(BASE, block_n=128, warps=8),
    replace(BASE, block_n=32, stages=4),
    replace(BASE, block_n=32, stages=5, warps=2, programs=12),
]
PREFILL_VARIANTS = [
    PREFILL_CONFIGS[(9, 128, 2)],
    PrefillConfig(128, 128, 8, 3),
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 64, 8, 2),
    PrefillConfig(64, 64, 4, 2),
    PrefillConfig(64, 64, 4, 3),
]


def record(section: str, **row: Any) -> None:
    RESULTS.append({"section": section, **row})
    shown = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
    print(f"[{time.time() - START:5.1f}s] {section}: {shown}", flush=True)


def make_step(
    sequences: list[tuple[int, int]], hq: int, hk: int, d: int, layers: int = 1, block: int = 16,
    dtype: torch.dtype = torch.bfloat16, padding: int = 0,
) -> tuple[torch.Tensor, list[torch.Tensor], AttentionContext]:  # fmt: skip
    """q, one cache per layer and the context of a step of (query tokens, tokens cached before) sequences."""
    q_lens = torch.tensor([n for n, _ in sequences])
    lens = torch.tensor([n + c for n, c in sequences])
    pages = (lens + block - 1) // block
    width = int(pages.max())
    total = int(pages.sum())
    table = torch.full((len(sequences) + 1, width), 2**30, dtype=torch.int32)
    order = torch.randperm(total, dtype=torch.int32) + 1
    for row, part in enumerate(order.split(pages.tolist())):
        table[row, : len(part)] = part
    caches = []
    for _ in range(layers):
        cache = torch.empty(2, total + 1, block, hk, d, dtype=dtype, device=DEVICE)
        caches.append(cache.normal_())
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), q_lens.cumsum(0)])
    tokens = int(q_lens.sum()) + padding
    q = torch.randn(tokens, hq, d, device=DEVICE).to(dtype)
    context = AttentionContext(
        kv_caches=caches,
        slot_mapping=torch.randperm(total * block, device=DEVICE)[:tokens] + block,
        query_start_loc=starts.to(DEVICE, torch.int32),
        seq_lens=lens.to(DEVICE, torch.int32),
        rows=torch.arange(len(sequences), device=DEVICE, dtype=torch.int32),
        block_tables=table.to(DEVICE),
        block_size=block,
        decode_only=bool((q_lens == 1).all()) and not padding,
    )
    return q, caches, context


def layers_for(sequences: list[tuple[int, int]], hk: int, d: int) -> int:
    kv_bytes = sum(n + c for n, c in sequences) * hk * d * 2 * 2
    return min(64, max(8, -(-L2_BYTES // kv_bytes)))


def graph_ms(step: Callable[[], Any], replays: int = 7) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])


def call_us(q: torch.Tensor, context: AttentionContext, params: AttentionParams, **options: Any) -> float:
    """Microseconds of one ``attend_cached``, from a graph with one call per cache."""
    out = torch.empty_like(q)

    def step() -> None:
        context.scratch.clear()
        for cache in context.kv_caches:
            entry.attend_cached(q, cache, context, params, out=out, **options)

    return graph_ms(step) / len(context.kv_caches) * 1e3


def oracle(
    q: torch.Tensor, cache: torch.Tensor, context: AttentionContext, params: AttentionParams
) -> torch.Tensor:
    out = torch.zeros(q.shape, device=q.device)
    hk = cache.shape[3]
    starts, lens = context.query_start_loc.tolist(), context.seq_lens.tolist()
    for s, (begin, end) in enumerate(itertools.pairwise(starts)):
        n, pages = lens[s], -(-lens[s] // context.block_size)
        blocks = context.block_tables[s, :pages].long()
        keys, values = (cache[i, blocks].flatten(0, 1)[:n].float() for i in (0, 1))
        own = torch.arange(n - (end - begin), n, device=q.device)[:, None]
        pos = torch.arange(n, device=q.device)[None, :]
        seen = pos <= own
        if params.window is not None:
            seen &= pos > own - params.window
        grouped = q[begin:end].float().unflatten(1, (hk, -1))
        score = torch.einsum("thgd,phd->thgp", grouped, keys) * params.scale
        if params.softcap is not None:
            score = params.softcap * torch.tanh(score / params.softcap)
        score = score.masked_fill(~seen[:, None, None, :], float("-inf"))
        if params.sinks is not None:
            sink = params.sinks.float().view(1, hk, -1, 1).expand(*score.shape[:3], 1)
            score = torch.cat([score, sink], -1)
        weight = score.softmax(-1)[..., :n]
        out[begin:end] = torch.einsum("thgp,phd->thgd", weight, values).flatten(1, 2)
    return out


def correctness() -> None:
    ragged = [(1, 4000), (1, 0), (1, 63), (1, 64), (1, 1500), (1, 255), (1, 16), (1, 8000)]
    mixed = [(1, 3000), (700, 0), (1, 64), (300, 900), (3, 5), (0, 0), (17, 17)]
    cases: list[tuple[str, list[tuple[int, int]], tuple[int, int, int], dict[str, Any], dict[str, Any]]] = [
        ("decode", ragged, SHAPES["8B"], {}, {}),
        ("decode, merge kernel", ragged, SHAPES["8B"], {},
         {"decode_config": replace(BASE, last_arriver_merges=False)}),
        ("mixed", mixed, SHAPES["8B"], {}, {}),
        ("drafts", [(5, 3000), (1, 10), (4, 0), (5, 700)], SHAPES["8B"], {}, {"max_query_len": 5}),
        ("mixed, all features", mixed, (20, 4, 80), {"window": 100, "softcap": 20.0, "sinks": True}, {}),
    ]  # fmt: skip
    for name, sequences, (hq, hk, d), features, options in cases:
        q, caches, context = make_step(sequences, hq, hk, d, padding=0 if name.startswith("dec") else 37)
        sinks = torch.randn(hq, device=DEVICE) if features.pop("sinks", False) else None
        params = AttentionParams(d**-0.5, sinks=sinks, **features)
        got = entry.attend_cached(q, caches[0], context, params, **options).float()
        want = oracle(q, caches[0], context, params)
        error = ((got - want).norm() / want.norm()).item()
        worst = (got - want).abs().max().item()
        record("correct", case=name, error=error, worst=worst, ok=error < 5e-3)


def races() -> None:
    """The last arriver adds the splits in a fixed order: any replay that differs by one bit has lost data."""
    hq, hk, d = SHAPES["8B"]
    q, _, context = make_step([(1, 100 + 251 * i) for i in range(32)], hq, hk, d, layers=4)
    params = AttentionParams(d**-0.5)
    config = replace(BASE, min_split=64, programs=24)
    outs = [torch.empty_like(q) for _ in context.kv_caches]

    def step() -> None:
        context.scratch.clear()
        for cache, out in zip(context.kv_caches, outs, strict=True):
            entry.attend_cached(q, cache, context, params, out=out, decode_config=config)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    first = [out.clone() for out in outs]
    bad = torch.zeros((), device=DEVICE, dtype=torch.int64)
    for _ in range(1000):
        graph.replay()
        for out, want in zip(outs, first, strict=True):
            bad += (out != want).any()
    want = oracle(q, context.kv_caches[0], context, params)
    error = ((outs[0].float() - want).norm() / want.norm()).item()
    record(
        "races", replays=1000, layers=4, different=int(bad), error=error, ok=int(bad) == 0 and error < 5e-3
    )


def decode_table(shape: str, variants: list[DecodeConfig]) -> None:
    hq, hk, d = SHAPES[shape]
    params = AttentionParams(d**-0.5)
    for batch, ctx in DECODE_LOADS:
        sequences = [(1, ctx - 1)] * batch
        q, _, context = make_step(sequences, hq, hk, d, layers=layers_for(sequences, hk, d))
        kv_bytes = batch * ctx * hk * d * 2 * 2
        rows: list[dict[str, Any]] = []
        for config in variants:
            try:
                us = call_us(q, context, params, decode_config=config)
            except Exception as error:
                print("  failed:", config, repr(error)[:200])
                continue
            tb_s = kv_bytes / us / 1e6
            rows.append({"us": us, "tb_s": tb_s, "share": tb_s / READ_TB_S, "config": asdict(config)})
        if not rows:
            continue
        best = min(rows, key=lambda row: row["us"])
        RESULTS.append({"section": "decode_all", "shape": shape, "batch": batch, "ctx": ctx, "rows": rows})
        record(
            "decode", shape=shape, batch=batch, ctx=ctx, base_us=rows[0]["us"], best_us=best["us"],
            best_tb_s=best["tb_s"], share=best["share"], best=tuple(best["config"].values()),
        )  # fmt: skip
        print("   ", " ".join(f"{row['us']:.1f}" for row in rows), flush=True)
        del context
        torch.cuda.empty_cache()


def split_rule() -> None:
    """Whether to split sequences that one program each would nearly keep the device busy: equal lengths, and not."""
    hq, hk, d = SHAPES["8B"]
    params = AttentionParams(d**-0.5)
    rng = random.Random(0)
    loads = {f"{batch} x {ctx}": [ctx] * batch for batch, ctx in (
        (32, 576), (32, 704), (32, 1024), (32, 2048), (32, 3840), (32, 8192), (24, 1024), (24, 3840), (22, 3840),
        (16, 3840), (48, 1024), (64, 1024), (64, 3840), (256, 640))}  # fmt: skip
    loads["32 of 100 to 4000"] = [rng.randint(100, 4000) for _ in range(32)]
    loads["64 of 100 to 4000"] = [rng.randint(100, 4000) for _ in range(64)]
    loads["31 x 500 and one of 8000"] = [500] * 31 + [8000]
    for name, lengths in loads.items():
        sequences = [(1, n - 1) for n in lengths]
        q, _, context = make_step(sequences, hq, hk, d, layers=layers_for(sequences, hk, d))
        rules = {"split": DecodeConfig(even=0), "even": DecodeConfig(most=10**6), "even and short": DecodeConfig()}
        us = {rule: call_us(q, context, params, decode_config=config) for rule, config in rules.items()}
        record("split", case=name, **us)
        del context
        torch.cuda.empty_cache()


def long_context() -> None:
    """Few long sequences: into how many items each is split, and how much a merging program takes at a time."""
    hq, hk, d = SHAPES["8B"]
    params = AttentionParams(d**-0.5)
    tried = [(64, 4096), (64, 8192), (2, 4096), (2, 8192), (3, 4096), (4, 4096), (4, 8192)]
    configs = [DecodeConfig(resident=resident, merged=merged) for resident, merged in tried]
    for batch, ctx in ((1, 1024), (1, 4096), (1, 16384), (1, 32768), (1, 65536), (1, 131072), (4, 32768), (8, 16384)):
        sequences = [(1, ctx - 1)] * batch
        q, _, context = make_step(sequences, hq, hk, d, layers=layers_for(sequences, hk, d))
        times = {f"{c.resident}/{c.merged}": call_us(q, context, params, decode_config=c) for c in configs}
        record("long", batch=batch, ctx=ctx, floor_us=batch * ctx * hk * d * 4 / READ_TB_S / 1e6, **times)
        del context
        torch.cuda.empty_cache()


def prefill_table() -> None:
    hq, hk, d = SHAPES["8B"]
    params = AttentionParams(d**-0.5)
    for name, sequences in (
        ("2 x 3584", [(3584, 0)] * 2),
        ("16 x 512", [(512, 0)] * 16),
        ("1 x 8192 after 8192", [(8192, 8192)]),
    ):
        tokens = 8192 - sum(n for n, _ in sequences)
        q, caches, context = make_step(sequences, hq, hk, d, layers=4, padding=tokens)
        flop = sum(4 * hq * d * (n * c + n * (n + 1) // 2) for n, c in sequences)
        for config in PREFILL_VARIANTS:
            try:
                us = call_us(q, context, params, prefill_config=config)
                record(
                    "prefill",
                    case=name,
                    us=us,
                    tflop_s=flop / us / 1e6,
                    config=tuple(asdict(config).values()),
                )
            except Exception as error:
                print("  failed:", config, repr(error)[:300], flush=True)
        if all(c == 0 for _, c in sequences):
            compare_varlen(name, sequences, flop, hq, hk, d)
        del caches, context
        torch.cuda.empty_cache()


def compare_varlen(name: str, sequences: list[tuple[int, int]], flop: int, hq: int, hk: int, d: int) -> None:
    """PyTorch's own packed attention on contiguous keys and values, where this version has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn

        total = sum(n for n, _ in sequences)
        q, k, v = (torch.randn(total, h, d, device=DEVICE, dtype=torch.bfloat16) for h in (hq, hk, hk))
        starts = [0, *itertools.accumulate(n for n, _ in sequences)]
        cu = torch.tensor(starts, device=DEVICE, dtype=torch.int32)
        longest = max(n for n, _ in sequences)
        names = inspect.signature(varlen_attn).parameters
        options: dict[str, Any] = {}
        if "window_size" in names:
            options["window_size"] = (-1, 0)
        else:
            options["is_causal"] = True
        if "enable_gqa" in names:
            options["enable_gqa"] = True
        us = (
            graph_ms(lambda: [varlen_attn(q, k, v, cu, cu, longest, longest, **options) for _ in range(4)])
            / 4
            * 1e3
        )
        record("prefill", case=name, us=us, tflop_s=flop / us / 1e6, config="torch varlen_attn, packed")
    except Exception as error:
        print("  varlen_attn:", repr(error)[:300], flush=True)


def mixed() -> None:
    hq, hk, d = SHAPES["8B"]
    params = AttentionParams(d**-0.5)
    rows, chunk = [(1, 3999)] * 31, [(2000, 0)]
    for name, sequences in (
        ("31 decode rows + 2000", rows + chunk),
        ("the chunk alone", chunk),
        ("31 decode rows alone, as mixed", rows),
    ):
        q, _, context = make_step(sequences, hq, hk, d, layers=8)
        context.decode_only = False
        record("mixed", case=name, us=call_us(q, context, params))
    context.decode_only = True
    record("mixed", case="31 decode rows alone, decode_only", us=call_us(q, context, params))


def drafts() -> None:
    hq, hk, d = SHAPES["8B"]
    params = AttentionParams(d**-0.5)
    q, _, context = make_step([(5, 3835)] * 32, hq, hk, d, layers=8)
    us = call_us(q, context, params, max_query_len=5)
    record("drafts", case="32 x 5 tokens, context 3840", us=us, tb_s=32 * 3840 * hk * d * 4 / us / 1e6)


def writes() -> None:
    _, hk, d = SHAPES["8B"]
    for tokens in (32, 8192):
        _, _, context = make_step([(tokens, 8192)], 8, hk, d, layers=8)
        qkv = torch.randn(tokens, 48 * d, device=DEVICE, dtype=torch.bfloat16)
        k, v = (part.unflatten(-1, (hk, d)) for part in qkv.split([32 * d, 8 * d, 8 * d], -1)[1:])

        def step(k: torch.Tensor = k, v: torch.Tensor = v, context: AttentionContext = context) -> None:
            for cache in context.kv_caches:
                entry.write_kv(k, v, cache, context.slot_mapping)

        record("write_kv", tokens=tokens, us=graph_ms(step) / 8 * 1e3)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=None, help="where to write the JSON")
    parser.add_argument("--seconds", type=float, default=100.0, help="start no section after this time")
    parser.add_argument("--only", default=None, help="one section by its name")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 2
    torch.manual_seed(0)
    sections: list[tuple[str, Callable[[], None]]] = [
        ("correctness", correctness),
        ("races", races),
        ("decode 8B", lambda: decode_table("8B", DECODE_VARIANTS)),
        ("split", split_rule),
        ("long", long_context),
        ("prefill", prefill_table),
        ("mixed", mixed),
        ("drafts", drafts),
        ("writes", writes),
        ("decode 0.6B", lambda: decode_table("0.6B", DECODE_VARIANTS[:8])),
    ]
    failed = 0
    for name, section in sections:
        if options.only not in (None, name):
            continue
        if time.time() - START > options.seconds:
            print("no time left for", name)
            continue
        try:
            section()
        except Exception:
            failed += 1
            print("FAILED", name)
            traceback.print_exc(limit=6)
        torch.cuda.empty_cache()
        if options.out is not None:
            facts = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "results": RESULTS}
            options.out.write_text(json.dumps(facts, indent=1, default=str))
    wrong = [row for row in RESULTS if row.get("ok") is False]
    print(f"{len(wrong)} wrong, {failed} sections failed, {time.time() - START:.0f} s")
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
