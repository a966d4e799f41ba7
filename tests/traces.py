"""Synthetic Chrome traces with known answers. Times in us."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

LOOP = (1, 100)  # pid and tid of the host thread that launches
PINNED_H2D = "Memcpy HtoD (Pinned -> Device)"
PAGEABLE_H2D = "Memcpy HtoD (Pageable -> Device)"
D2H = "Memcpy DtoH (Device -> Pinned)"


class Trace:
    """Puts events together."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._links = 0

    def link(self) -> int:
        self._links += 1
        return self._links

    def span(self, category: str, name: str, start: float, end: float, lane: tuple[Any, Any], **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": lane[0], "tid": lane[1], "ts": start,
             "dur": end - start, "args": args}
        )  # fmt: skip

    def kernel(
        self, start: float, end: float, link: int = -1, stream: int = 7, name: str = "gemm", device: int = 0
    ) -> None:
        self.span("kernel", name, start, end, (device, stream), device=device, stream=stream, correlation=link)

    def copy(
        self, start: float, end: float, link: int = -1, name: str = PINNED_H2D, stream: int = 20, size: int = 64
    ) -> None:
        self.span("gpu_memcpy", name, start, end, (0, stream), device=0, stream=stream, correlation=link, bytes=size)

    def call(self, name: str, start: float, end: float, link: int | None = None, lane: tuple[int, int] = LOOP) -> int:
        link = self.link() if link is None else link
        self.span("cuda_runtime", name, start, end, lane, correlation=link)
        return link

    def graph(self, start: float, end: float, kernels: list[tuple[float, float]], **options: Any) -> None:
        link = self.call("cudaGraphLaunch", start, end)
        for a, b in kernels:
            self.kernel(a, b, link, **options)

    def range(self, name: str, start: float, end: float, lane: tuple[int, int] = LOOP) -> None:
        self.span("user_annotation", name, start, end, lane)

    def frame(self, name: str, start: float, end: float, lane: tuple[int, int] = LOOP) -> None:
        self.span("python_function", name, start, end, lane)

    def write(self, path: Path) -> Path:
        head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU {[\"x\"]}"}], "with_stack": 1}
        text = json.dumps({**head, "traceEvents": self.events, "traceName": "x.json"}, indent=1)
        data = text.encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def synchronous(steps: int = 6, period: float = 1000.0) -> Trace:
    """A synchronous engine. Each step, from its launch at 0:

    launch call [0, 20); kernels [30, 400), [402, 700); D2H copy [710, 720), launched at 25, that ends it. The host is
    in cudaEventSynchronize from 40 to 740, called by ``fetch``; phase commit [740, 800), schedule [800, 990); the next
    launch at 1000.

    So each step has 280 without a kernel that are over the threshold of 5, or a copy, and 2 between its nodes:
    [700, 710) latency of the D2H, [710, 720) copy, [720, 740) sync, [740, 800) host: commit, [800, 990) host: schedule,
    [990, 1000) host without a phase, [1000, 1030) latency of the launch.
    """
    t = Trace()
    for i in range(steps):
        at = i * period
        t.graph(at, at + 20, [(at + 30, at + 400), (at + 402, at + 700)])
        link = t.call("cudaMemcpyAsync", at + 25, at + 27)
        t.copy(at + 710, at + 720, link, D2H)
        t.call("cudaEventSynchronize", at + 40, at + 740)
        t.frame("engine.py(10): step", at + 1, at + 999)
        t.frame("engine.py(50): fetch", at + 39, at + 741)
        t.frame("torch/cuda/streams.py(217): synchronize", at + 39.5, at + 740.5)
        t.range("commit", at + 740, at + 800)
        t.range("schedule", at + 800, at + 990)
    return t


def asynchronous(steps: int = 6, period: float = 1000.0) -> Trace:
    """Depth 2 in the ranges of gapless. The host launches each step a period ahead of the device: two graphs of 3
    and 1 nodes with 0.5 between them, and no other gap. The H2D copy runs under the kernels of the step before."""
    t = Trace()
    for i in range(steps):
        at = (i + 1) * period
        host = at - period
        t.range("gapless:launch", host, host + 100)
        t.range("gapless:fill", host + 10, host + 40)
        link = t.call("cudaMemcpyAsync", host + 45, host + 46)
        t.copy(host + 50, host + 52, link)
        edges = [at, at + 250, at + 600, at + 900, at + period]
        nodes = [(a, b - 0.5) for a, b in itertools.pairwise(edges)]
        t.graph(host + 60, host + 65, nodes[:3])
        t.graph(host + 70, host + 75, nodes[3:], name="sample")
        t.range("gapless:wait", host + 100, host + 950)
        t.call("cudaEventSynchronize", host + 101, host + 949)
        t.range("gapless:commit", host + 950, host + 990)
    return t


def kineto(steps: int = 20, error: float = 0.0, *, ranges: bool = True) -> Trace:
    """Depth 2 as torch.profiler writes it on a GPU: the kernels of a graph have the launch's correlation and a node's
    id, dependent launch lets neighbours overlap, and step ``i`` is launched while the device computes step ``i - 1``.

    The engine's ranges are off by ``error`` at the begin, and less and less towards the end: two clocks that were tied
    badly. A step is a forward of six kernels and a sample of two, 4,000 us in all; the device never pauses.
    """
    t = Trace()
    for i in range(steps):
        host, at = 4000.0 * i, 4000.0 * (i + 1)
        off = error * (1 - i / steps)
        if ranges:
            t.range("gapless:launch", host + off, host + off + 300)
            t.range("gapless:wait", host + off + 310, host + off + 3950)
        t.copy(host + 50, host + 52, t.call("cudaMemcpyAsync", host + 30, host + 40))
        for name, begin, end, count, start, length in (
            ("gemm", host + 45, host + 145, 6, at, 3900.0),
            ("argmax", host + 160, host + 205, 2, at + 3900, 100.0),
        ):
            link = t.call("cudaGraphLaunch", begin, end)
            each = length / count
            for node in range(count):
                early = 0.2 * each if node else 0.0
                t.span(
                    "kernel", name, start + node * each - early, start + (node + 1) * each, (0, 7),
                    **{"External id": 5000 + i, "queued": 0, "device": 0, "context": 1, "stream": 7,
                       "correlation": link, "registers per thread": 128, "shared memory": 0, "priority": 0,
                       "grid": [132, 1, 1], "block": [128, 1, 1], "graph id": 40, "graph node id": (40 << 32) + node},
                )  # fmt: skip
        t.copy(at + 4000, at + 4002, t.call("cudaMemcpyAsync", host + 230, host + 240), D2H, stream=24)
        t.call("cudaEventSynchronize", host + 313, host + 3945)
    return t


def eager(steps: int = 12, layers: int = 4, period: float = 1000.0) -> Trace:
    """An engine without graphs: every kernel is a launch of its own, and its host is slower than the device.

    A step is an embedding, ``layers`` times (gemm, attention, gemm) of 20 us, a gemm and an argmax, each launched 10 us
    before it runs; then nothing until the next period. Some steps copy a block more.
    """
    t = Trace()
    for i in range(steps):
        at = i * period
        for name in ["embed", *["gemm", "attention", "gemm"] * layers, "gemm", "argmax"]:
            t.kernel(at, at + 20, t.call("cudaLaunchKernel", at - 10, at - 5), name=name)
            at += 25
        if i % 3 == 0:
            t.kernel(at, at + 1, t.call("cudaLaunchKernel", at - 10, at - 5), name="copy_block")
    return t
