"""What a simulated device deals in: operations, the regions of memory that they touch, records of events; and who is
told of them (`Observer`) or decides between them (`Chooser`). No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

HOST = "host"
STREAMS = ("h2d", "compute", "d2h")


class Region(NamedTuple):
    """The bytes [lo, hi) of a buffer, read or written."""

    buffer: str
    lo: int
    hi: int
    write: bool

    def conflicts(self, other: Region) -> bool:
        """They share a byte and one of them is written."""
        return (
            (self.write or other.write)
            and self.buffer == other.buffer
            and self.lo < other.hi
            and other.lo < self.hi
        )

    def __str__(self) -> str:
        return f"{self.buffer}[{self.lo}:{self.hi}]"


@dataclass(slots=True, eq=False)
class Operation:
    """A copy or a piece of work on a stream, or one stay of the host in `host_access`.

    ``step`` counts operations of the same name on the same stream; a pipeline that enqueues each once a step can read
    it as the step's number. ``stamp`` belongs to the observer.
    """

    stream: str
    name: str
    step: int
    regions: tuple[Region, ...]
    work: Callable[[], None] | None = None
    stamp: Any = None

    def __str__(self) -> str:
        return f"{self.name!r} of step {self.step} ({self.stream})"


def conflict(a: Operation, b: Operation) -> Region | None:
    """A region of ``a`` that ``b`` touches too, one of them writing; None if the two can be swapped."""
    return next((r for r in a.regions for q in b.regions if r.conflicts(q)), None)


Chooser = Callable[[Sequence[Operation]], int]
"""Given the operations that may run next, the index of the one that does."""


def in_order(options: Sequence[Operation]) -> int:
    """The host goes on whenever it can; the device runs only while the host waits, its last stage first."""
    return 0 if options[0].stream == HOST else len(options) - 1


class Observer:
    """What happens on a simulated device; the base class does not care."""

    def enqueued(self, operation: Operation) -> None:
        """The host put it on its stream."""

    def hosted(self, operation: Operation) -> None:
        """The host begins to touch host buffers."""

    def recorded(self, record: Record, stream: str) -> None:
        """An event was recorded on ``stream``."""

    def waited(self, record: Record, stream: str) -> None:
        """``stream`` was told to wait for the record."""

    def synchronized(self, record: Record) -> None:
        """The host has waited for the record."""


@dataclass(slots=True, eq=False)
class Record:
    """One record of an event. ``time`` is of the virtual clock; ``stamp`` belongs to the observer."""

    done: bool = False
    time: float = 0.0
    stamp: Any = None


@dataclass(slots=True, eq=False)
class Wait:
    """In a stream's queue: nothing behind it runs before the record is done."""

    record: Record
