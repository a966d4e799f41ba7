"""The CPU device: each stream is a worker thread with a FIFO queue; events mean what they mean in CUDA.

It exists so that a laptop runs the pipeline that a GPU runs: the same three streams, the same events, separate memory
for host and device (or races would hide), errors that surface at a wait and stay.

Two aids for tests:
    delays   a random pause before each piece of work, to shake the order of the streams; seeded.
    debug    one piece of work at a time, with every byte that it did not declare poisoned. A changed poison byte is
             an undeclared write. The work runs twice with different poison; different results are an undeclared read.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import cast

import torch

from gapless.device.base import NOTHING, Access, DeviceError, Event, Stream, UndeclaredAccessError
from gapless.device.counts import CopyCounts

POLL_SECONDS = 0.2
LAZY_BYTES = 2**20
"""Buffers from this size on are zeroed page by page, when they are first touched."""
POISON = (0xFF, 0x7E)  # as fp32: NaN and 8.5e37; as int32: -1 and a huge index


class CpuStream:
    """A FIFO of work and the thread that runs it."""

    def __init__(self, device: CpuDevice, name: str, delays: random.Random | None, max_delay: float) -> None:
        self.name = name
        self._device = device
        self._delays = delays
        self._max_delay = max_delay
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"gapless-{name}", daemon=True)
        self.thread.start()

    def put(self, work: Callable[[], None]) -> None:
        if self._device.closed:
            raise RuntimeError(f"the device is closed; nothing can be put on its {self.name} stream")
        self._queue.put(work)

    def stop(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # thread-local
        while (work := self._queue.get()) is not None:
            if self._delays is not None:
                time.sleep(self._delays.random() * self._max_delay)
            try:
                work()
            except BaseException as error:  # not of the work, which is guarded: a worker that ends would hang the host
                self._device.fail(error)
            del work  # or the last closure would keep its tensors alive while the thread sleeps


class _Record:
    """One record of an event: done once the stream has reached it."""

    __slots__ = ("done", "time")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.time = 0.0

    def reached(self) -> None:
        self.time = time.perf_counter()
        self.done.set()


class CpuEvent:
    """See `gapless.device.base.Event`."""

    __slots__ = ("_device", "_latest")

    def __init__(self, device: CpuDevice) -> None:
        self._device = device
        self._latest: _Record | None = None

    def record(self, stream: Stream) -> None:
        self._latest = record = _Record()
        cast(CpuStream, stream).put(record.reached)

    def wait(self, stream: Stream) -> None:
        if (record := self._latest) is not None:  # bound now: a later record does not move this wait
            cast(CpuStream, stream).put(lambda: self._device.wait_for(record))

    def query(self) -> bool:
        return self._latest is None or self._latest.done.is_set()

    def synchronize(self, *, counted: bool = True) -> None:
        if counted:
            self._device.copies.waits += 1
        if self._latest is not None:
            self._device.wait_for(self._latest)
        self._device.raise_error()

    def elapsed_ms(self, later: Event) -> float:
        first, second = self._latest, cast(CpuEvent, later)._latest
        if first is None or second is None or not (first.done.is_set() and second.done.is_set()):
            raise RuntimeError("elapsed_ms needs two events that were recorded and are done")
        return (second.time - first.time) * 1e3


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros; of a large buffer the system gives and zeroes a page when it is first touched."""
    size = math.prod(shape) * dtype.itemsize
    if size < LAZY_BYTES:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)


class CpuDevice:
    """See `gapless.device.base.Device`.

    Args:
        delays: seed of random pauses before each piece of work; None for none.
        max_delay: longest pause in seconds.
        debug: poison what a piece of work does not declare.
    """

    def __init__(self, *, delays: int | None = None, max_delay: float = 0.002, debug: bool = False) -> None:
        self.torch_device = torch.device("cpu")
        self.copies = CopyCounts()
        self.closed = False
        self._error: BaseException | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock() if debug else None
        self._streams: list[CpuStream] = []
        for i, name in enumerate(("h2d", "compute", "d2h")):
            rng = None if delays is None else random.Random(delays * 3 + i)
            self._streams.append(CpuStream(self, name, rng, max_delay))
        self.h2d: Stream = self._streams[0]
        self.compute: Stream = self._streams[1]
        self.d2h: Stream = self._streams[2]

    def event(self, *, timing: bool = False) -> Event:
        return CpuEvent(self)

    def host_buffer(self, num_bytes: int, name: str) -> torch.Tensor:
        return self._register(torch.zeros(num_bytes, dtype=torch.uint8), name)

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        return self._register(zeros(shape, dtype), name)

    def _register(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        if name in self._buffers:
            raise RuntimeError(f"a buffer named {name!r} exists already")
        self._buffers[name] = buffer
        return buffer

    def release_buffer(self, name: str) -> None:
        del self._buffers[name]

    def trim(self) -> None:
        pass  # freed large buffers go back to the system at once

    def copy_h2d(self, dst: torch.Tensor, src: torch.Tensor, name: str) -> None:
        self.copies.h2d += 1
        self.copies.h2d_bytes += src.nbytes
        self._put(self.h2d, lambda: cast(None, dst.copy_(src)), Access((src,), (dst,)), name)

    def copy_d2h(self, dst: torch.Tensor, src: torch.Tensor, name: str) -> None:
        self.copies.d2h += 1
        self.copies.d2h_bytes += src.nbytes
        self._put(self.d2h, lambda: cast(None, dst.copy_(src)), Access((src,), (dst,)), name)

    def launch(self, work: Callable[[], None], access: Access, name: str) -> None:
        self._put(self.compute, work, access, name)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def host_access(self, access: Access = NOTHING, name: str = "host") -> AbstractContextManager[None]:
        return cast("AbstractContextManager[None]", self._lock) if self._lock else contextlib.nullcontext()

    @contextlib.contextmanager
    def thread_context(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        for stream in self._streams:  # not by an event, whose waits are counted: as on a GPU
            record = _Record()
            stream.put(record.reached)
            self.wait_for(record)
            self.raise_error()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for stream in self._streams:
            stream.stop()
        for stream in self._streams:
            stream.thread.join()
        self._buffers.clear()

    def fail(self, error: BaseException) -> None:
        """Every later wait raises ``error``, unless there was one before it."""
        self._error = self._error or error

    def wait_for(self, record: _Record) -> None:
        """Until it is reached, or will never be because its stream has failed."""
        while not record.done.wait(POLL_SECONDS) and self._error is None:
            pass

    def raise_error(self) -> None:
        """Raise the first failure of any stream, if there was one."""
        if self._error is not None:
            raise DeviceError(f"work on the CPU device failed: {self._error}") from self._error

    def _put(self, stream: Stream, work: Callable[[], None], access: Access, name: str) -> None:
        def guarded() -> None:
            if self._error is not None:
                return  # like a broken CUDA context: nothing runs any more, but every record is still reached
            try:
                if self._lock is None:
                    work()
                else:
                    with self._lock:
                        self._run_poisoned(work, access, name)
            except BaseException as error:
                error.add_note(f"in {name!r} on the {stream.name} stream")
                self._error = error

        cast(CpuStream, stream).put(guarded)

    def _run_poisoned(self, work: Callable[[], None], access: Access, name: str) -> None:
        saved = {k: _bytes(b).clone() for k, b in self._buffers.items()}
        undeclared = {k: _undeclared(b, access.reads + access.writes) for k, b in self._buffers.items()}
        results: list[list[torch.Tensor]] = []
        try:
            for poison in POISON:
                for key, buffer in self._buffers.items():
                    _bytes(buffer).copy_(torch.where(undeclared[key], poison, saved[key]))
                work()
                for key, buffer in self._buffers.items():
                    if bool((_bytes(buffer)[undeclared[key]] != poison).any()):
                        raise UndeclaredAccessError(f"{name!r} wrote to {key!r} without declaring it")
                results.append([_bytes(w).clone() for w in access.writes])
        finally:
            for key, buffer in self._buffers.items():
                mask = undeclared[key]
                _bytes(buffer).copy_(torch.where(mask, saved[key], _bytes(buffer)))
        for first, second in zip(*results, strict=True):
            if not torch.equal(first, second):
                raise UndeclaredAccessError(f"{name!r} read what it did not declare: its results depend on it")
        changed = {k for k, b in self._buffers.items() if not torch.equal(_bytes(b), saved[k])}
        written = {k for k, b in self._buffers.items() if not bool(_undeclared(b, access.writes).all())}
        if changed - written:
            raise UndeclaredAccessError(f"{name!r} declared {sorted(changed - written)} as read only and wrote there")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _undeclared(buffer: torch.Tensor, declared: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Bool per byte of ``buffer``: True where no declared slice lies."""
    mask = torch.ones(buffer.nbytes, dtype=torch.bool)
    start = buffer.data_ptr()
    for piece in declared:
        lo = piece.data_ptr() - start
        if 0 <= lo < buffer.nbytes:
            if not piece.is_contiguous():
                raise RuntimeError("Access takes contiguous tensors")
            mask[lo : lo + piece.nbytes] = False
    return mask
