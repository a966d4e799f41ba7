"""The CUDA device: a thin layer on ``torch.cuda``.

The loop's thread enters `CudaDevice.thread_context` once; from then on the compute stream is its current stream, so
that `launch` is a plain call and nothing of a step runs on the default stream. Captures are thread-local (two engines
in two threads work) and share one memory pool: replays of one engine never overlap, so they may use the same memory.

A step's two copies call the runtime itself where `cuda.bindings` is installed, as it is with PyTorch for CUDA. A thread
that has just waited some milliseconds finds its caches cold, and the way through ``Tensor.copy_`` is long: it was half
of what a launch cost the host (``benchmarks/launch_cost.py``).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import cast

import torch

from gapless.device.base import NOTHING, Access, DeviceError, Event, Stream
from gapless.device.counts import CopyCounts

try:
    from cuda.bindings import runtime
except ImportError:
    runtime = None

EXCLUSIVE = threading.RLock()
"""Held while graphs are captured and while memory is given back: in one process the two exclude each other, and
captures share the device's default random generator."""



@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """A graph or tensor that the garbage collector frees in the middle of a capture would end it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_idle_streams: dict[int, list[tuple[CudaStream, CudaStream, CudaStream]]] = {}
"""Streams of closed devices, by index. PyTorch hands out 32 streams in turn, so that fresh ones for each engine would
soon be those of another engine that still runs."""


class CudaStream(torch.cuda.Stream):
    """A CUDA stream with a name."""

    name: str


class CudaEvent:
    """See `gapless.device.base.Event`."""

    __slots__ = ("_counts", "event")

    def __init__(self, timing: bool, counts: CopyCounts) -> None:
        self._counts = counts
        self.event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]

    def record(self, stream: Stream) -> None:
        self.event.record(cast(CudaStream, stream))

    def wait(self, stream: Stream) -> None:
        cast(CudaStream, stream).wait_event(self.event)

    def query(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self, *, counted: bool = True) -> None:
        if counted:
            self._counts.waits += 1
        self.event.synchronize()  # sync-ok: the d2h event of the oldest step

    def elapsed_ms(self, later: Event) -> float:
        return float(self.event.elapsed_time(cast(CudaEvent, later).event))


def _copier(stream: CudaStream, kind: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """What enqueues a copy on ``stream`` from its second to its first argument, contiguous and of equal size; the one
    on the host is pinned. ``kind`` is a name of the runtime's ``cudaMemcpyKind``.

    PyTorch does not know of such a copy: whoever lets a buffer go has waited for the device first, as `close` does.
    """
    if runtime is None or torch.version.cuda is None:
        on_stream = torch.cuda.stream(stream)

        def by_torch(dst: torch.Tensor, src: torch.Tensor) -> None:
            with on_stream:
                dst.copy_(src, non_blocking=True)

        return by_torch
    direction, handle = getattr(runtime.cudaMemcpyKind, kind), stream.cuda_stream

    def by_runtime(dst: torch.Tensor, src: torch.Tensor) -> None:
        (error,) = runtime.cudaMemcpyAsync(dst.data_ptr(), src.data_ptr(), src.nbytes, direction, handle)
        if error != 0:
            reason = f"{error!r}, which may be of work before it"
            raise DeviceError(f"the {stream.name} stream took no copy of {src.nbytes} bytes: {reason}")

    return by_runtime


class CudaDevice:
    """See `gapless.device.base.Device`.

    Args:
        index: which CUDA device.
    """

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.copies = CopyCounts()
        with torch.cuda.device(index), EXCLUSIVE:
            idle = _idle_streams.setdefault(index, [])
            self._streams = idle.pop() if idle else (self._stream("h2d"), self._stream("compute"), self._stream("d2h"))
            self.pool = torch.cuda.graph_pool_handle()
        self._h2d, self._compute, self._d2h = self._streams
        self._copy_h2d = _copier(self._h2d, "cudaMemcpyHostToDevice")
        self._copy_d2h = _copier(self._d2h, "cudaMemcpyDeviceToHost")
        self.h2d: Stream = self._h2d
        self.compute: Stream = self._compute
        self.d2h: Stream = self._d2h
        self.closed = False

    def _stream(self, name: str) -> CudaStream:
        stream = CudaStream(device=self.torch_device)  # type: ignore[no-untyped-call]
        stream.name = name
        return stream

    def event(self, *, timing: bool = False) -> Event:
        return CudaEvent(timing, self.copies)

    def host_buffer(self, num_bytes: int, name: str) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        buffer = torch.zeros(shape, dtype=dtype, device=self.torch_device)
        torch.cuda.current_stream(self.torch_device).synchronize()  # sync-ok: at start; zeros land before any step
        return buffer

    def release_buffer(self, name: str) -> None:
        pass  # buffers are known by their references alone

    def trim(self) -> None:
        torch.cuda.empty_cache()
        self.pool = torch.cuda.graph_pool_handle()  # the allocator may have forgotten the old one

    def copy_h2d(self, dst: torch.Tensor, src: torch.Tensor, name: str) -> None:
        self.copies.h2d += 1
        self.copies.h2d_bytes += src.nbytes
        self._copy_h2d(dst, src)

    def copy_d2h(self, dst: torch.Tensor, src: torch.Tensor, name: str) -> None:
        self.copies.d2h += 1
        self.copies.d2h_bytes += src.nbytes
        self._copy_d2h(dst, src)

    def launch(self, work: Callable[[], None], access: Access, name: str) -> None:
        work()  # the caller's current stream is the compute stream, see thread_context

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error is the one to tell
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay

    def host_access(self, access: Access = NOTHING, name: str = "host") -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def thread_context(self) -> Iterator[None]:
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._compute), torch.no_grad():
            yield

    def synchronize(self) -> None:
        for stream in self._streams:  # not the whole device: another engine may be capturing
            stream.synchronize()  # sync-ok: off the step path

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.synchronize()
        with EXCLUSIVE:
            torch.cuda.empty_cache()
            _idle_streams[self.torch_device.index].append(self._streams)
