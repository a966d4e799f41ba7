"""What the host asks of the device in a step: a watch on PyTorch's operations, and a profiler trace taken apart.

Three instruments see different things. PyTorch's sync debug mode raises at operations that make the host wait, on any
thread, but lets a pageable copy that is called non-blocking pass. `CopyWatch` sees every copy that PyTorch makes on the
loop's thread, and those that the device hands to the runtime. The profiler sees every call of the runtime, whoever
makes it.
"""

from __future__ import annotations

import contextlib
import json
import queue
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gapless import SamplingParams
from gapless.device import cuda
from gapless.engine.client import Submission
from gapless.engine.engine import Engine
from gapless.errors import EngineDeadError

aten = torch.ops.aten
DEFAULT_STREAMS = (0, 7)
"""Numbers that the profiler gives to the default stream."""
WAITS = re.compile(r"(Stream|Device|Ctx|Context)Synchronize|^cudaMemcpy(2D|3D)?$|^cuMemcpy(HtoD|DtoH)$")
ALLOCATES = re.compile(
    r"^cuda(Malloc|Free|HostAlloc|HostRegister|HostUnregister)|^cuMem(Alloc|Free|Create|Map|HostAlloc)"
)
LAUNCHES = re.compile(r"^cu(da)?LaunchKernel|^cudaLaunchCooperative|^cudaMemsetAsync$")


class StepPathError(RuntimeError):
    """Something happened in a step that may not."""


class CopyWatch(TorchDispatchMode):
    """Raises, on the thread that enters it, at a copy between host and device that is not pinned and non-blocking, and
    at a read of a device value."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet is aten._local_scalar_dense and args[0].device.type != "cpu":
            raise StepPathError(f"a value is read from {args[0].device}")
        out = func(*args, **kwargs)
        if packet is aten.copy_:
            self.check(args[1], args[0], bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False)))
        elif packet is aten._to_copy and _crosses(args[0], out):
            raise StepPathError(f"a tensor is moved from {args[0].device} to {out.device}")
        return out

    def check(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
        """Count the copy, or raise."""
        if not _crosses(source, target):
            return
        host = source if source.device.type == "cpu" else target
        if not host.is_pinned():
            raise StepPathError(f"a pageable copy from {source.device} to {target.device}")
        if not non_blocking:
            raise StepPathError(f"a blocking copy from {source.device} to {target.device}")
        self.copies += 1


def _crosses(source: torch.Tensor, target: torch.Tensor) -> bool:
    return (source.device.type == "cpu") != (target.device.type == "cpu")


@contextlib.contextmanager
def watch_loops() -> Iterator[CopyWatch]:
    """Every engine that is built and started meanwhile runs its loop under a `CopyWatch`."""
    watch, loop, copier = CopyWatch(), Engine._loop, cuda._copier

    def watched(engine: Engine) -> None:
        with watch:
            loop(engine)

    def watched_copier(stream: Any, kind: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
        copy = copier(stream, kind)

        def watched_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
            seen = watch.copies
            copy(dst, src)
            if watch.copies == seen:  # not by an operation of PyTorch
                watch.check(src, dst, non_blocking=True)

        return watched_copy

    Engine._loop = watched  # type: ignore[method-assign]
    cuda._copier = watched_copier
    try:
        yield watch
    finally:
        Engine._loop = loop  # type: ignore[method-assign]
        cuda._copier = copier


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """PyTorch raises at operations that make the host wait for the device, on any thread."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- traffic ----------------------------------------------------------------------------------------------------


def mixed_traffic(llm: Any, steps: int, vocab: int, seed: int = 0, timeout: float = 120.0) -> Counter[str]:
    """Requests that arrive while others run: shared prefixes, greedy and sampled, ended by length, by a token and by
    abort, for at least ``steps`` steps and until all have ended. Returns counts: by finish reason, and ``steps``,
    ``prefix_hit_tokens``, ``requests``.

    Raises:
        EngineDeadError: the loop ended by an exception.
    """
    rng, client, deadline = random.Random(seed), llm._client, time.monotonic() + timeout
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    errors: list[BaseException] = []
    shared = [[rng.randrange(2, vocab) for _ in range(40)] for _ in range(3)]
    start, hits = llm.stats()[0].steps, llm.stats()[1].prefix_hit_tokens
    sent = next_arrival = next_abort = now = 0
    while (now < steps or client.pending) and not errors:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{now} steps, {client.pending} requests open")
        if now < steps and client.pending < 14 and (now >= next_arrival or client.pending < 2):
            ids = [*rng.choice(shared)[: rng.randint(1, 40)], rng.randrange(2, vocab)]
            submission = Submission(
                client.encode({"prompt_token_ids": ids}),
                _params(rng, sent, vocab),
                lambda output: done.put(str(output.outputs[0].finish_reason)),
                errors.append,
                request_id=f"request {sent}",
            )
            client.submit([submission])
            sent, next_arrival = sent + 1, now + rng.randrange(1, 5)
        elif now >= next_abort and sent:
            client.abort(f"request {max(sent - rng.randrange(1, 4), 0)}")
            next_abort = now + 9
        else:
            time.sleep(2e-4)
        now = llm.stats()[0].steps - start
    if errors:
        raise EngineDeadError(f"the engine stopped: {errors[0]!r}") from errors[0]
    settled = -1
    while settled != (settled := llm.stats()[0].steps):  # a step may still be in flight for rows that have ended
        time.sleep(0.02)
    counts = Counter(done.get() for _ in range(sent))
    counts["steps"], counts["requests"] = llm.stats()[0].steps - start, sent
    counts["prefix_hit_tokens"] = llm.stats()[1].prefix_hit_tokens - hits
    return counts


def _params(rng: random.Random, number: int, vocab: int) -> SamplingParams:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": rng.randint(1, 40), "seed": number}
    if number % 2:
        options |= {"temperature": 0.9, "top_k": rng.choice([0, 5]), "top_p": rng.choice([1.0, 0.9])}
    if number % 3 == 0:
        options |= {"stop_token_ids": rng.sample(range(2, vocab), 8), "min_tokens": min(3, options["max_tokens"])}
    return SamplingParams(**options)


# ---- the profiler's trace ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepCalls:
    """Numbers of a window of whole steps; those with a bar are per step.

    Attributes:
        steps: in the window.
        calls: runtime and driver calls of all threads, by name. |
        other_threads: of these, how many came from a thread that is not the loop's, in all.
        copies: between host and device, by the profiler's name for them. |
        nodes: kernels, copies and fills on the device. |
        default_stream: names of what ran on the default stream.
        busy: share of the window in which at least one of them ran.
        ms: of a step. |
    """

    steps: int
    calls: dict[str, float]
    other_threads: dict[str, int]
    copies: dict[str, float]
    nodes: float
    default_stream: list[str]
    busy: float
    ms: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a result file."""
        return asdict(self)

    def problems(self, in_flight: int = 0) -> list[str]:
        """What breaks the rules of a step; empty when nothing does.

        Args:
            in_flight: by so many steps the numbers of waits and copies may differ from the steps of the window: 0
                where as many are in flight at its end as at its beginning.
        """
        found = [f"{name}: {n:g} per step, the host waits" for name, n in self.calls.items() if WAITS.search(name)]
        found += [f"{name}: {n:g} per step, allocates" for name, n in self.calls.items() if ALLOCATES.search(name)]
        found += [f"{name}: {n:g} per step, not in a graph" for name, n in self.calls.items() if LAUNCHES.search(name)]
        slack = (in_flight + 0.01) / self.steps

        def expect(what: str, got: float, wanted: int) -> None:
            if abs(got - wanted) > slack * max(wanted, 1):
                found.append(f"{what}: {got:g} per step, not {wanted}")

        expect("cudaEventSynchronize", self.calls.get("cudaEventSynchronize", 0), 1)
        expect("cudaMemcpyAsync", self.calls.get("cudaMemcpyAsync", 0), 2)
        expect("cudaGraphLaunch", self.calls.get("cudaGraphLaunch", 0), 2)
        expect("pinned copies to the device", self.copies.get("Memcpy HtoD (Pinned -> Device)", 0), 1)
        expect("pinned copies to the host", self.copies.get("Memcpy DtoH (Device -> Pinned)", 0), 1)
        found += [f"{name}: {n:g} per step" for name, n in self.copies.items() if "Pageable" in name]
        if self.default_stream:
            found.append(f"on the default stream: {', '.join(sorted(set(self.default_stream)))}")
        return found

    def __str__(self) -> str:
        calls = "  ".join(f"{name} {n:g}" for name, n in sorted(self.calls.items(), key=lambda item: -item[1]))
        copies = "  ".join(f"{name} {n:g}" for name, n in self.copies.items())
        return (
            f"{self.steps} steps of {self.ms:.3f} ms, {self.nodes:.1f} nodes each, "
            f"kernel-busy {100 * self.busy:.2f} %\n  calls per step: {calls}\n  copies per step: {copies}\n"
            f"  other threads: {self.other_threads or 'no calls'}"
        )


def read_trace(trace: Path | list[dict[str, Any]], skip: int = 10) -> StepCalls:
    """Count what is in a Chrome trace of ``torch.profiler``, without the first and the last ``skip`` steps.

    A step begins at the first of its two graph launches. What the device did is assigned to the window by the call that
    it came from.
    """
    events = trace if isinstance(trace, list) else json.loads(trace.read_text())["traceEvents"]
    events = [e for e in events if e.get("ph") == "X"]
    host = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = sorted((e for e in host if _name(e) == "cudaGraphLaunch"), key=lambda e: e["ts"])
    steps = len(launches) // 2 - 2 * skip
    if steps < 1:
        raise ValueError(f"{len(launches)} graph launches are too few, with {skip} steps skipped at either end")
    begin, end = launches[2 * skip]["ts"], launches[2 * (skip + steps)]["ts"]
    loop_thread = launches[2 * skip].get("tid")
    calls: Counter[str] = Counter()
    others: Counter[str] = Counter()
    inside = set()
    for event in host:
        if begin <= event["ts"] < end:
            calls[_name(event)] += 1
            inside.add(event["args"].get("correlation"))
            if event.get("tid") != loop_thread:
                others[_name(event)] += 1
    copies: Counter[str] = Counter()
    nodes, on_default, spans = 0, [], []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event["args"].get("correlation") in inside:
            nodes += 1
            spans.append((event["ts"], event["ts"] + event["dur"]))
            if "HtoD" in event["name"] or "DtoH" in event["name"]:
                copies[event["name"]] += 1
            if event["args"].get("stream") in DEFAULT_STREAMS:
                on_default.append(event["name"][:60])
    return StepCalls(
        steps=steps,
        calls={name: n / steps for name, n in calls.items()},
        other_threads=dict(others),
        copies={name: n / steps for name, n in copies.items()},
        nodes=nodes / steps,
        default_stream=on_default,
        busy=_union(spans),
        ms=(end - begin) / steps / 1e3,
    )


def _name(event: dict[str, Any]) -> str:
    return re.sub(r"(_v\d+|_ptsz|_ptds|_v2)+$", "", event["name"])


def _union(spans: list[tuple[float, float]]) -> float:
    """Covered share of the time from the first begin to the last end."""
    if not spans:
        return 0.0
    spans.sort()
    covered, reached = 0.0, spans[0][0]
    for begin, end in spans:
        covered += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return covered / max(reached - spans[0][0], 1e-9)
