"""The CUDA device: a thin layer on ``torch.cuda``.

The loop's thread enters `CudaDevice.thread_context` once; from then on the compute stream is its current stream, so
that `launch` is a plain call and nothing of a step runs on the default stream. Captures are thread-local (two engines
in two threads work) and share one memory pool: replays of one engine never overlap, so they may use the same memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import cast

import torch

from gapless.device.base import Access, CopyCounts, Event, Stream


class CudaStream(torch.cuda.Stream):
    """A CUDA stream with a name."""

    name: str


class CudaEvent:
    """See `gapless.device.base.Event`."""

    __slots__ = ("event",)

    def __init__(self, timing: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]

    def record(self, stream: Stream) -> None:
        self.event.record(cast(CudaStream, stream))

    def wait(self, stream: Stream) -> None:
        cast(CudaStream, stream).wait_event(self.event)

    def query(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self.event.synchronize()  # sync-ok: the d2h event of the oldest step

    def elapsed_ms(self, later: Event) -> float:
        return float(self.event.elapsed_time(cast(CudaEvent, later).event))


class CudaDevice:
    """See `gapless.device.base.Device`.

    Args:
        index: which CUDA device.
    """

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.copies = CopyCounts()
        with torch.cuda.device(index):
            streams = [CudaStream(device=self.torch_device) for _ in range(3)]  # type: ignore[no-untyped-call]
            self.pool = torch.cuda.graph_pool_handle()
        for stream, name in zip(streams, ("h2d", "compute", "d2h"), strict=True):
            stream.name = name
        self._h2d, self._compute, self._d2h = streams
        self._on_h2d, self._on_d2h = torch.cuda.stream(self._h2d), torch.cuda.stream(self._d2h)
        self.h2d: Stream = self._h2d
        self.compute: Stream = self._compute
        self.d2h: Stream = self._d2h
        self._buffers: list[torch.Tensor] = []
        self.closed = False

    def event(self, *, timing: bool = False) -> Event:
        return CudaEvent(timing)

    def host_buffer(self, num_bytes: int, name: str) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        buffer = torch.zeros(shape, dtype=dtype, device=self.torch_device)
        torch.cuda.current_stream(self.torch_device).synchronize()  # sync-ok: at start; zeros land before any step
        return buffer

    def copy_h2d(self, dst: torch.Tensor, src: torch.Tensor, name: str) -> None:
        self.copies.h2d += 1
        self.copies.h2d_bytes += src.nbytes
        with self._on_h2d:
            dst.copy_(src, non_blocking=True)

    def copy_d2h(self, dst: torch.Tensor, src: torch.Tensor, name: str) -> None:
        self.copies.d2h += 1
        self.copies.d2h_bytes += src.nbytes
        with self._on_d2h:
            dst.copy_(src, non_blocking=True)

    def launch(self, work: Callable[[], None], access: Access, name: str) -> None:
        work()  # the caller's current stream is the compute stream, see thread_context

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        return graph.replay

    def host_access(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def thread_context(self) -> Iterator[None]:
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._compute), torch.no_grad():
            yield

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)  # sync-ok: off the step path

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.synchronize()
