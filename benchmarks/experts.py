"""Experts of a mixture: our kernels with several tiles beside transformers' grouped product, on one GPU.

    python benchmarks/experts.py --out benchmarks/results/h200-experts.json

Microseconds of one layer's experts (the routing is random and given), replayed in a graph over several layers' weights,
so that no cache holds them. The floor is reading the chosen experts' weights once at 4.36 TB/s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

from gapless.bench.environment import environment
from gapless.bench.table import grid
from gapless.model.parts.experts import Experts, Gate
from gapless.model.parts.experts_triton import Tiles, run, tiles_for

SHAPES = {  # experts, chosen, hidden, width, transposed, bias, gate
    "qwen3-30b": (128, 8, 2048, 768, False, False, Gate("silu")),
    "gpt-oss-20b": (32, 4, 2880, 2880, True, True, Gate("silu", True, True, 1.702, 7.0, 1.0)),
    "deepseek-v2-lite": (64, 6, 2048, 1408, False, False, Gate("silu")),
    "mixtral": (8, 2, 4096, 14336, False, False, Gate("silu")),
}
TOKENS = (1, 4, 32, 256, 2048, 8192)
FEW = [
    (Tiles(16, n, k, stages, 4), Tiles(16, m, k, stages, 4))
    for (n, m), k, stages in product([(32, 32), (64, 64), (32, 64)], (64, 128), (4, 6))
]
SOME = [
    (Tiles(b, 64, k, stages, warps), Tiles(b, m, k, stages, warps))
    for b, m, k, (stages, warps) in product((16, 32, 64), (64, 128), (64, 128), ((3, 4), (4, 4)))
]
MANY = [
    (Tiles(b, n, 64, stages, 8), Tiles(b, m, 64, stages, 8))
    for b, (n, m), stages in product((64, 128), ((64, 128), (128, 128), (64, 256)), (3, 4))
]


def make(name: str, layers: int) -> list[Experts]:
    e, _, h, f, transposed, bias, gate = SHAPES[name]
    out = []
    for _ in range(layers):
        up, down = (e, 2 * f, h), (e, h, f)
        if transposed:
            up, down = (e, h, 2 * f), (e, f, h)
        tensors = [torch.empty(s, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02) for s in (up, down)]
        biases = [torch.zeros(e, 2 * f, device="cuda").bfloat16(), torch.zeros(e, h, device="cuda").bfloat16()]
        out.append(Experts(*tensors, *(biases if bias else (None, None)), transposed, gate))
    return out


def time_us(call: Any, layers: int) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(times[1:]) / layers


def theirs(experts: Experts) -> Any:
    """A module of transformers' kind over the same weights."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts, self.has_gate, self.is_transposed = experts.count, True, experts.transposed
            self.has_bias, self.has_post_expert_norm = experts.up_bias is not None, False
            self._is_expert_parallel = False
            self.gate_up_proj, self.down_proj = experts.up, experts.down
            self.gate_up_proj_bias, self.down_proj_bias = experts.up_bias, experts.down_bias

        def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
            return experts.gate(x)

    module = Module()
    return lambda x, chosen, weights: grouped_mm_experts_forward(module, x, chosen, weights)


def measure(name: str, tokens: int, stack: list[Experts], search: bool) -> dict[str, Any]:
    """One row: the peer, the rule's tiles, and the best of all candidates."""
    e, k, h, f, *_ = SHAPES[name]
    layers = len(stack)
    x = torch.randn(tokens, h, device="cuda").bfloat16()
    weights, chosen = torch.rand(layers, tokens, e, device="cuda").topk(k, -1)
    weights = weights.bfloat16()
    peers = [theirs(experts) for experts in stack]
    hit = sum(len(chosen[i].unique()) for i in range(layers)) / layers
    peer = time_us(lambda: [p(x, chosen[i], weights[i]) for i, p in enumerate(peers)], layers)
    choices = candidates(name, tokens, search)

    def ours(tiles: tuple[Tiles, Tiles]) -> float:
        return time_us(lambda: [run(x, s, chosen[i], weights[i], tiles) for i, s in enumerate(stack)], layers)

    found = {}
    for tiles in choices:
        try:
            found[tiles] = ours(tiles)
        except Exception as error:  # a candidate that does not fit is none
            print("left out:", tiles, type(error).__name__, str(error)[:80])
    best = min(found, key=found.__getitem__)
    times = {"grouped_mm_us": peer, "rule_us": found[choices[0]], "best_us": found[best], "best": str(best)}
    floor = hit * 3 * h * f * 2 / 4.36e6
    return {"shape": name, "tokens": tokens, "experts": hit, "floor_us": floor, **times}


def candidates(name: str, tokens: int, search: bool) -> list[tuple[Tiles, Tiles]]:
    """The rule's tiles first."""
    e, k, *_ = SHAPES[name]
    each = tokens * k / e
    more = FEW if each <= 4 else SOME if each <= 100 else MANY
    return list(dict.fromkeys([tiles_for(tokens * k, e, torch.bfloat16), *(more if search else [])]))


def compile_part(part: int, parts: int, names: list[str], tokens: list[int]) -> None:
    """Compile every ``parts``-th kernel by running it once."""
    for name in names:
        (experts,) = make(name, 1)
        _, k, h, *_ = SHAPES[name]
        every = list(dict.fromkeys(tiles for n in tokens for tiles in candidates(name, n, True)))
        for tiles in every[part::parts]:
            x = torch.randn(2, h, device="cuda").bfloat16()
            chosen = torch.arange(2 * k, device="cuda").view(2, k) % experts.count
            with contextlib.suppress(Exception):  # it is left out later, with its reason
                run(x, experts, chosen, torch.rand(2, k, device="cuda").bfloat16(), tiles)


@torch.no_grad()
def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--search", action="store_true", help="time every candidate, not the rule's choice alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile beforehand")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names, counts = arguments.shapes.split(","), [int(n) for n in arguments.tokens.split(",")]
    if arguments.part is not None:
        compile_part(arguments.part, arguments.jobs, names, counts)
        return
    if arguments.search and arguments.jobs > 1:
        command = [sys.executable, *sys.argv]
        parts = [subprocess.Popen([*command, "--part", str(part)]) for part in range(arguments.jobs)]
        for part in parts:
            part.wait()
    rows = []
    for name in names:
        e, _, h, f, *_ = SHAPES[name]
        stack = make(name, max(2, min(6, int(3e9 / (6 * e * h * f)))))
        for tokens in counts:
            rows.append(measure(name, tokens, stack, arguments.search))
            print({n: round(v, 1) if isinstance(v, float) else v for n, v in rows[-1].items()}, flush=True)
        del stack
        torch.cuda.empty_cache()
    head = ("shape", "tokens", "experts", "floor", "grouped_mm", "rule", "best")
    keys = ("experts", "floor_us", "grouped_mm_us", "rule_us", "best_us")
    print(grid(head, [[r["shape"], str(r["tokens"]), *(f"{r[n]:.1f}" for n in keys)] for r in rows]))
    if arguments.out:
        arguments.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
