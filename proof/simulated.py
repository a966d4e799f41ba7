"""The simulated device: the pipeline on one thread, in any order that streams and events allow.

Nothing that is put on a stream runs by itself. Whenever the host is about to touch a host buffer (`host_access`), and
while it waits (`Event.synchronize`), a chooser picks which operation comes next: the host's own, or the first one of
any stream that no wait holds back. Operations run one at a time, on the calling thread. So a run is a function of the
chooser's answers; the list of them (`SimulatedDevice.choices`) replays it.

Operations of the streams and of the host are told to an `Observer`, with the regions of memory that they touch, and so
are the edges between them. What an operation touches is what its `Access` declares; the CPU device's debug mode proves
the declarations.

With ``costs`` the device also keeps a virtual clock: an operation starts when it was enqueued, its stream is free and
its waits are over, whichever is last, and takes what it costs. Times follow from the order in which the host enqueues
and waits, so they do not depend on the chooser.
"""

from __future__ import annotations

import bisect
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import cast

import torch

from gapless.device.base import NOTHING, Access, DeviceError, Event, Stream
from gapless.device.counts import CopyCounts
from proof.operations import HOST, STREAMS, Chooser, Observer, Operation, Record, Region, Wait, in_order

POOL_BYTES = 16
_POISON = 0xA5


class SimulatedStream:
    """A FIFO of operations, records and waits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Operation | Record | Wait] = deque()
        self.free_at = 0.0

    def settle(self) -> bool:
        """Pass the records at the head and the waits that are over; True if there was one."""
        moved = False
        while self.queue:
            head = self.queue[0]
            if isinstance(head, Operation) or (isinstance(head, Wait) and not head.record.done):
                break
            if isinstance(head, Record):
                head.done = True
            self.queue.popleft()
            moved = True
        return moved


class SimulatedEvent:
    """See `gapless.device.base.Event`."""

    __slots__ = ("_device", "latest")

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.latest: Record | None = None

    def record(self, stream: Stream) -> None:
        own = cast(SimulatedStream, stream)
        self.latest = record = Record(time=max(own.free_at, self._device.now))
        self._device.observer.recorded(record, own.name)
        own.queue.append(record)

    def wait(self, stream: Stream) -> None:
        record = self.latest
        if record is not None:
            own = cast(SimulatedStream, stream)
            own.free_at = max(own.free_at, record.time)
            self._device.observer.waited(record, own.name)
            own.queue.append(Wait(record))

    def query(self) -> bool:
        return self.latest is None or self.latest.done

    def synchronize(self, *, counted: bool = True) -> None:
        if counted:
            self._device.copies.waits += 1
        if self.latest is not None:
            self._device.wait_for(self.latest)

    def elapsed_ms(self, later: Event) -> float:
        first, second = self.latest, cast(SimulatedEvent, later).latest
        if first is None or second is None:
            raise RuntimeError("elapsed_ms needs two events that were recorded")
        return second.time - first.time


class SimulatedDevice:
    """See the module, and `gapless.device.base.Device`. Used by one thread.

    Args:
        chooser: picks what runs next.
        observer: is told of operations and edges.
        costs: milliseconds of an operation; the host's are those of its work since its last operation.
        scramble: what the host has read out of a host buffer is poisoned afterwards: a view that outlives
            `host_access` shows.
    """

    def __init__(
        self,
        chooser: Chooser = in_order,
        observer: Observer | None = None,
        *,
        costs: Callable[[Operation], float] | None = None,
        scramble: bool = True,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.copies = CopyCounts()
        self.observer = observer or Observer()
        self.choices: list[str] = []
        self.now = 0.0
        self._chooser = chooser
        self._costs = costs
        self._scramble = scramble
        self._streams = [SimulatedStream(name) for name in STREAMS]
        self._h2d, self._compute, self._d2h = self._streams
        self.h2d: Stream = self._h2d
        self.compute: Stream = self._compute
        self.d2h: Stream = self._d2h
        self._counts: Counter[tuple[str, str]] = Counter()
        self._buffers: dict[str, torch.Tensor] = {}
        self._starts: list[tuple[int, int, str]] = []  # first byte, end, name; sorted
        self._declared: dict[int, tuple[Access, tuple[Region, ...]]] = {}
        self._pool: torch.Tensor | None = None
        self._captured: set[Callable[[], None]] = set()
        self._error: BaseException | None = None
        self._stopped = False
        self.closed = False

    # ---- the protocol ---------------------------------------------------------------------------------------------

    def event(self, *, timing: bool = False) -> Event:
        return SimulatedEvent(self)

    def host_buffer(self, num_bytes: int, name: str) -> torch.Tensor:
        return self._register(torch.zeros(num_bytes, dtype=torch.uint8), name)

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        return self._register(torch.zeros(shape, dtype=dtype), name)

    def release_buffer(self, name: str) -> None:
        buffer = self._buffers.pop(name)
        self._starts.remove((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes, name))
        self._declared.clear()

    def trim(self) -> None:
        pass

    def copy_h2d(self, dst: torch.Tensor, src: torch.Tensor, name: str) -> None:
        self.copies.h2d += 1
        self.copies.h2d_bytes += src.nbytes
        self._put(self._h2d, lambda: cast(None, dst.copy_(src)), self._resolve(Access((src,), (dst,))), name)

    def copy_d2h(self, dst: torch.Tensor, src: torch.Tensor, name: str) -> None:
        self.copies.d2h += 1
        self.copies.d2h_bytes += src.nbytes
        self._put(self._d2h, lambda: cast(None, dst.copy_(src)), self._resolve(Access((src,), (dst,))), name)

    def launch(self, work: Callable[[], None], access: Access, name: str) -> None:
        regions = self.regions(access)
        if work in self._captured:
            regions = (*regions, Region("graph pool", 0, POOL_BYTES, True))
        self._put(self._compute, work, regions, name)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """The pool that captures share is a buffer that each replay writes, and finds poisoned."""
        pool = self._pool
        if pool is None:
            pool = self._pool = self.device_buffer((POOL_BYTES,), torch.uint8, "graph pool")

        def replay() -> None:
            pool.fill_(_POISON)
            work()

        self._captured.add(replay)
        return replay

    def host_access(self, access: Access = NOTHING, name: str = HOST) -> AbstractContextManager[None]:
        return self._host(access, name)

    @contextlib.contextmanager
    def thread_context(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        while self._step(None) is not None:
            pass
        self.now = max([self.now, *(stream.free_at for stream in self._streams)])
        self.raise_error()

    def close(self) -> None:
        if self.closed:
            return
        self._chooser = in_order
        if not self._stopped:
            with contextlib.suppress(DeviceError):
                self.synchronize()
        self.closed = True
        self._buffers.clear()
        self._declared.clear()

    # ---- the host -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _host(self, access: Access, name: str) -> Iterator[None]:
        operation = self._operation(HOST, name, self.regions(access), None)
        if self._costs is not None:
            self.now += self._costs(operation)
        self.observer.hosted(operation)
        while self._step(operation) is not operation:
            pass
        yield
        if self._scramble:
            for tensor in access.reads:
                tensor.view(torch.uint8).fill_(_POISON)

    def wait_for(self, record: Record) -> None:
        """Run the device, an operation at a time, until it has reached the record."""
        self._settle()
        while not record.done:
            if self._step(None) is None:
                raise RuntimeError("the host waits for an event that no stream can reach any more")
            self._settle()
        self.now = max(self.now, record.time)
        self.observer.synchronized(record)
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the first failure of any stream, if there was one."""
        if self._error is not None:
            raise DeviceError(f"work on the simulated device failed: {self._error}") from self._error

    # ---- choosing -------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        while any(stream.settle() for stream in self._streams):
            pass

    def _step(self, host: Operation | None) -> Operation | None:
        """Run one operation of those that may run; ``host`` is the host's own, if it is at one. None: there is none."""
        self._settle()
        options = [] if host is None else [host]
        options += [s.queue[0] for s in self._streams if s.queue and isinstance(s.queue[0], Operation)]
        if not options:
            return None
        try:
            chosen = options[self._chooser(options)]
        except BaseException:
            self._stopped = True
            raise
        self.choices.append(chosen.stream)
        if chosen is not host:
            self._streams[STREAMS.index(chosen.stream)].queue.popleft()
            if self._error is None and chosen.work is not None:
                try:
                    chosen.work()
                except BaseException as error:
                    error.add_note(f"in {chosen}")
                    self._error = error
        return chosen

    # ---- operations -----------------------------------------------------------------------------------------------

    def _operation(
        self, stream: str, name: str, regions: tuple[Region, ...], work: Callable[[], None] | None
    ) -> Operation:
        count = self._counts[stream, name]
        self._counts[stream, name] += 1
        return Operation(stream, name, count, regions, work)

    def _put(
        self, stream: SimulatedStream, work: Callable[[], None], regions: tuple[Region, ...], name: str
    ) -> None:
        if self.closed:
            raise RuntimeError(f"the device is closed; nothing can be put on its {stream.name} stream")
        operation = self._operation(stream.name, name, regions, work)
        if self._costs is not None:
            stream.free_at = max(stream.free_at, self.now) + self._costs(operation)
        self.observer.enqueued(operation)
        stream.queue.append(operation)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def _register(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        if name in self._buffers:
            raise RuntimeError(f"a buffer named {name!r} exists already")
        self._buffers[name] = buffer
        start = buffer.data_ptr()
        bisect.insort(self._starts, (start, start + buffer.nbytes, name))
        return buffer

    def fingerprint(self) -> int:
        """Of every byte of every buffer, and of whether work has failed."""
        whole = b"".join([b.view(torch.uint8).numpy().tobytes() for b in self._buffers.values()])
        return hash((whole, self._error is None))

    def content(self, region: Region) -> bytes:
        """The bytes of a region as they are now."""
        return self._buffers[region.buffer].view(torch.uint8).numpy().tobytes()[region.lo : region.hi]

    def regions(self, access: Access) -> tuple[Region, ...]:
        """What an `Access` names, in bytes of buffers; kept, for an `Access` is used again and again."""
        known = self._declared.get(id(access))
        if known is None:
            known = self._declared[id(access)] = (access, self._resolve(access))
        return known[1]

    def _resolve(self, access: Access) -> tuple[Region, ...]:
        written = [self._region(tensor, True) for tensor in access.writes]
        read = [self._region(tensor, False) for tensor in access.reads]
        hidden = {(r.buffer, r.lo, r.hi) for r in written}  # a read of what is written adds nothing
        return (*written, *(r for r in read if (r.buffer, r.lo, r.hi) not in hidden))

    def _region(self, tensor: torch.Tensor, write: bool) -> Region:
        at = tensor.data_ptr()
        start, end, name = self._starts[bisect.bisect_right(self._starts, (at, 2**63, "")) - 1]
        if not start <= at <= at + tensor.nbytes <= end:
            raise RuntimeError(f"an Access names a tensor of shape {tuple(tensor.shape)} that is no part of a buffer")
        if not tensor.is_contiguous():
            raise RuntimeError("Access takes contiguous tensors")
        return Region(name, at - start, at - start + tensor.nbytes, write)
