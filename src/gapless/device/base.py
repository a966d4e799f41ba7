"""The device protocol: three streams, events between them, buffers, copies that are counted, captured work.

Who may touch what
    The host thread of the loop is the only one that calls these methods. Nothing here blocks, except
    `Event.synchronize`, which the loop calls at one place: on the d2h event of the oldest step in flight.
    A device buffer is touched by work that was put on a stream, never by the host. A host buffer is touched by the
    host only when no copy that names it can be running; the events of the slots say when.

Every piece of work may declare what it reads and writes (`Access`). The CUDA device ignores it; the CPU device checks
it in debug mode; a simulated device derives races from it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from gapless.device.counts import CopyCounts


class DeviceError(RuntimeError):
    """Work on the device failed. Sticky: every later wait raises it again; the ``__cause__`` is the first failure."""


class UndeclaredAccessError(RuntimeError):
    """Debug mode: work touched a buffer that its `Access` does not name."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a piece of work touches: whole buffers, or contiguous slices of them. A partial write is also a read."""

    reads: tuple[torch.Tensor, ...] = ()
    writes: tuple[torch.Tensor, ...] = ()


NOTHING = Access()


class Stream(Protocol):
    """Work put on one stream runs in that order."""

    @property
    def name(self) -> str:
        """``h2d``, ``compute`` or ``d2h``."""
        ...


class Event(Protocol):
    """A marker in a stream, with CUDA's meaning: it stands for its most recent record; never recorded, it is done."""

    def record(self, stream: Stream) -> None:
        """Mark the work that ``stream`` holds by now."""
        ...

    def wait(self, stream: Stream) -> None:
        """Later work of ``stream`` starts after the most recent record. The host does not wait."""
        ...

    def query(self) -> bool:
        """True when the marked work has ended."""
        ...

    def synchronize(self, *, counted: bool = True) -> None:
        """The host waits for the marked work. Raises `DeviceError` if the device has failed.

        Only the loop's thread may have its waits counted, see `CopyCounts`.
        """
        ...

    def elapsed_ms(self, later: Event) -> float:
        """Milliseconds from this event's record to that of ``later``, both done, both made with ``timing=True``."""
        ...


class Device(Protocol):
    """Where steps run."""

    torch_device: torch.device
    h2d: Stream
    compute: Stream
    d2h: Stream
    copies: CopyCounts
    closed: bool

    def event(self, *, timing: bool = False) -> Event:
        """A fresh event, not recorded."""
        ...

    def host_buffer(self, num_bytes: int, name: str) -> torch.Tensor:
        """Zeroed uint8 ``[num_bytes]`` in pinned host memory."""
        ...

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        """Zeroed tensor in device memory, at an address that stays."""
        ...

    def release_buffer(self, name: str) -> None:
        """Forget a buffer that no work names any more; its memory goes with the last reference."""
        ...

    def trim(self) -> None:
        """Give memory that nobody uses back to the system; captures that come later share a fresh pool."""
        ...

    def copy_h2d(self, dst: torch.Tensor, src: torch.Tensor, name: str) -> None:
        """Copy between equal shapes on the h2d stream."""
        ...

    def copy_d2h(self, dst: torch.Tensor, src: torch.Tensor, name: str) -> None:
        """Copy between equal shapes on the d2h stream."""
        ...

    def launch(self, work: Callable[[], None], access: Access, name: str) -> None:
        """Put work on the compute stream."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record ``work`` once; what comes back replays it and goes to `launch`. All captures share one memory pool."""
        ...

    def host_access(self, access: Access = NOTHING, name: str = "host") -> AbstractContextManager[None]:
        """Held while the host fills or reads host buffers. Free of cost unless in debug mode or simulated."""
        ...

    def thread_context(self) -> AbstractContextManager[None]:
        """Entered once by the thread that drives the device."""
        ...

    def synchronize(self) -> None:
        """Wait for everything. Off the step path: start, weight updates and shutdown only."""
        ...

    def close(self) -> None:
        """Finish queued work, give threads and memory back. Safe to call twice."""
        ...
