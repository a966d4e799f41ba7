"""The small kernels of a step on a GPU: correctness on random cases, then their times inside a CUDA graph.

    python benchmarks/small_kernels.py --out small_kernels.json

A time is the mean over a graph of many equal nodes, so that it is what the kernel adds to a step: inputs are
in the L2 cache, as they mostly are there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gapless.batch.arena import arena_views
from gapless.batch.plan import Feature
from gapless.batch.row_layout import RowLayout, Word
from gapless.batch.slot_layout import HEADER_WORDS, StepInputs
from gapless.model.ops import reference as ops_reference
from gapless.model.ops import triton as ops_triton
from gapless.runner import prepare_triton
from gapless.runner.prepare import StepIndices
from gapless.sampling import reference
from gapless.sampling import triton as sampler

NODES, REPLAYS, BUDGET_S = 50, 5, 55.0
SHAPES = {"8B": (4096, 14336, 32, 8, 128, False), "0.6B": (1024, 3072, 16, 8, 128, True)}
TOKENS = (1, 32, 256, 8192)
LARGEST = 151_936
DRAW, FILTER = Feature.SAMPLE, Feature.SAMPLE | Feature.FILTER
SAMPLERS: dict[str, tuple[Feature, tuple[float, int, float, float]]] = {
    "greedy": (Feature.GREEDY, (0.0, 0, 1.0, 0.0)),
    "greedy+min_tokens": (Feature.MIN_TOKENS, (0.0, 0, 1.0, 0.0)),
    "temperature": (DRAW, (0.6, 0, 1.0, 0.0)),
    "filter graph, no row asks": (FILTER, (0.6, 0, 1.0, 0.0)),
    "top_k+top_p": (FILTER, (0.6, 50, 0.95, 0.0)),
    "top_p": (FILTER, (0.6, 0, 0.95, 0.0)),
    "min_p": (FILTER, (1.0, 0, 1.0, 0.05)),
}
start = time.perf_counter()


def graph_us(work: Callable[[], object], nodes: int = NODES) -> float:
    """Microseconds that one call of ``work`` takes among others in a graph; the best of a few replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            work()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / nodes)
    return round(min(times), 2)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def params(seqs: int, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    words = np.zeros((seqs, Word.COUNT), np.int32)
    floats = words.view(np.float32)
    floats[:, Word.TEMPERATURE], floats[:, Word.TOP_P], floats[:, Word.MIN_P] = temperature, top_p, min_p
    words[:, Word.TOP_K], words[:, Word.SEED_LOW] = top_k, np.arange(seqs)
    words[:, Word.MIN_END], words[:, Word.NUM_STOP] = 1 << 30, 2
    words[:, Word.STOP_IDS : Word.STOP_IDS + 2] = (1, 2)
    return torch.from_numpy(words).cuda()


def rope_inputs(tokens: int, hq: int, hk: int, d: int, norm: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    blocks = -(-tokens // 16) + 1
    angle = torch.arange(4096, device="cuda")[:, None] * 1e4 ** -(torch.arange(d // 2, device="cuda") * 2 / d)
    weights = [randn(d, dtype=dtype) if norm else None for _ in range(2)]
    return (
        randn(tokens, (hq + 2 * hk) * d, dtype=dtype),
        torch.randint(0, 4096, (tokens,), device="cuda"),
        angle.cos().repeat(1, 2).to(dtype),
        angle.sin().repeat(1, 2).to(dtype),
        torch.zeros(2, blocks, 16, hk, d, dtype=dtype, device="cuda"),
        torch.randperm(blocks * 16, device="cuda")[:tokens],
        hq,
        hk,
        *weights,
    )


def check_ops() -> dict[str, Any]:
    """Largest difference and share of equal values, Triton against torch on the GPU."""
    result: dict[str, Any] = {}

    def compare(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        error = (got.double() - expected.double()).abs() / (expected.double().abs() + 1e-2)
        same = float((got == expected).float().mean())
        result[name] = {
            "max_error_eps": float(error.max()) / torch.finfo(got.dtype).eps,
            "equal": round(same, 5),
        }

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tag = str(dtype).removeprefix("torch.")
        for size in (1024, 4096, 5120):
            x, residual, weight = (
                randn(33, size, dtype=dtype),
                randn(33, size, dtype=dtype),
                randn(size, dtype=dtype),
            )
            got = ops_triton.add_rms_norm(x, residual, weight, 1e-5)
            expected = ops_reference.add_rms_norm(x, residual, weight, 1e-5)
            compare(f"add_rms_norm {size} {tag}", got[0], expected[0])
            compare(f"add_rms_norm residual {size} {tag}", got[1], expected[1])
        gate_up = randn(33, 2 * 3072, dtype=dtype)
        compare(f"act_mul {tag}", ops_triton.act_mul(gate_up), ops_reference.act_mul(gate_up))
        for norm in (False, True):
            inputs = rope_inputs(77, 32, 8, 128, norm, dtype)
            got_q = ops_triton.rope_qk_norm_kv_write(*inputs)
            cache = inputs[4].clone()
            inputs[4].zero_()
            expected_q = ops_reference.rope_qk_norm_kv_write(*inputs)
            compare(f"rope q norm={norm} {tag}", got_q, expected_q)
            compare(f"rope cache norm={norm} {tag}", cache, inputs[4])
    return result


class SampleCase:
    """Arena, positions and output of ``seqs`` sequences that all sample."""

    def __init__(self, seqs: int) -> None:
        self.layout = RowLayout(seqs, 512, 16)
        self.arena = torch.zeros(self.layout.num_words, dtype=torch.int32, device="cuda")
        self.rows = torch.arange(seqs, dtype=torch.int32, device="cuda")
        self.flags, self.out = torch.ones_like(self.rows), torch.empty_like(self.rows)
        self.positions = self.rows.long() + 7

    def run(self, logits: torch.Tensor, features: Feature) -> None:
        inputs = (self.rows, self.positions, self.flags, features, self.out)
        sampler.sample_and_store(logits, self.arena, self.layout, *inputs)

    def set_params(self, words: torch.Tensor) -> None:
        at = self.layout.params_at
        self.arena[at : at + words.numel()] = words.view(-1)


def check_sampling() -> dict[str, Any]:
    """Share of rows in which Triton and torch give the same token; the rest must come from rounding."""
    result = {}
    case = SampleCase(64)
    for dtype in (torch.bfloat16, torch.float32):
        logits = randn(64, LARGEST, dtype=dtype) * 3
        for name, (features, values) in SAMPLERS.items():
            words = params(64, *values)
            case.set_params(words)
            case.run(logits, features)
            expected = reference.sample(logits, words, case.positions, features)
            equal = int((case.out == expected).sum()) / 64
            result[f"{name} {str(dtype).removeprefix('torch.')}"] = equal
    return result


def time_ops() -> dict[str, Any]:
    result = {}
    for name, (hidden, width, hq, hk, d, norm) in SHAPES.items():
        for tokens in TOKENS:
            nodes = NODES if tokens < 1000 else 5
            x, residual, weight = randn(tokens, hidden), randn(tokens, hidden), randn(hidden)
            gate_up = randn(tokens, 2 * width)
            rope = rope_inputs(tokens, hq, hk, d, norm, torch.bfloat16)
            result[f"{name} M={tokens}"] = {
                "rms_norm": graph_us(lambda a=x, w=weight: ops_triton.rms_norm(a, w, 1e-5), nodes),
                "add_rms_norm": graph_us(
                    lambda a=x, r=residual, w=weight: ops_triton.add_rms_norm(a, r, w, 1e-5), nodes
                ),
                "act_mul": graph_us(lambda g=gate_up: ops_triton.act_mul(g), nodes),
                "rope_qk_norm_kv_write": graph_us(lambda r=rope: ops_triton.rope_qk_norm_kv_write(*r), nodes),
            }
    return result


def time_sampling() -> dict[str, Any]:
    """Both kernels together; logits with a small nucleus (peaked) and with a large one (flat)."""
    result: dict[str, Any] = {}
    for vocab in (LARGEST, 128_256):
        for seqs in (1, 32, 256):
            flat = randn(seqs, vocab)
            peaked = torch.where(torch.rand_like(flat) < 30 / vocab, 12.0 + flat, flat)
            case = SampleCase(seqs)
            times = result[f"V={vocab} S={seqs}"] = {}
            for name, (features, values) in SAMPLERS.items():
                case.set_params(params(seqs, *values))
                for kind, logits in (("peaked", peaked), ("flat", flat)):
                    if time.perf_counter() - start > BUDGET_S:
                        return result | {"stopped": "out of time"}
                    if kind == "peaked" or features & Feature.FILTER:
                        times[f"{name}, {kind}"] = graph_us(
                            lambda c=case, x=logits, f=features: c.run(x, f), 10
                        )
    return result


def time_prepare() -> dict[str, Any]:
    result = {}
    for seqs, tokens, updates in ((1, 1, 0), (32, 32, 8), (256, 256, 32), (256, 8192, 8192)):
        layout = RowLayout(256, 16384, 16)
        words = torch.zeros(layout.num_words, dtype=torch.int32, device="cuda")
        header = torch.zeros(HEADER_WORDS, dtype=torch.int32, device="cuda")
        header[:3] = torch.tensor([tokens, seqs, updates])
        rows = torch.arange(seqs, dtype=torch.int32, device="cuda")
        changes = torch.stack((torch.arange(16384), torch.zeros(16384)), 1).int().cuda()
        step = StepInputs(
            header,
            rows,
            torch.full_like(rows, 100),
            (torch.arange(seqs + 1, device="cuda") * (tokens // seqs)).int(),
            torch.ones_like(rows),
            torch.zeros(tokens, dtype=torch.int32, device="cuda"),
            torch.ones(tokens, dtype=torch.uint8, device="cuda"),
            changes,
        )
        long = [torch.zeros(n, dtype=torch.int64, device="cuda") for n in (tokens,) * 3 + (seqs,) * 2]
        indices = StepIndices(*long[:3], torch.zeros_like(rows), *long[3:])
        arena = arena_views(words, layout)
        result[f"S={seqs} T={tokens} U={updates}"] = {
            "apply_updates": graph_us(lambda s=step, a=arena: prepare_triton.apply_updates(s, a)),
            "both kernels": graph_us(
                lambda s=step, a=arena, lo=layout, i=indices: prepare_triton.prepare(s, a, lo, i)
            ),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "unit": "us",
    }
    for section in (check_ops, time_ops, time_prepare, check_sampling, time_sampling):
        began = time.perf_counter()
        try:
            report[section.__name__] = section()
        except Exception:
            report[section.__name__] = {"failed": traceback.format_exc()}
        report[section.__name__]["seconds"] = round(time.perf_counter() - began, 1)
        print(section.__name__, json.dumps(report[section.__name__], indent=1), flush=True)
        if args.out:
            args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
