"""WatchedQueue: a queue without a bound that says how long it has been.

Between the threads of an engine nothing may wait to put, or a slow reader would stop the loop. So these queues have no
bound; what comes in is bounded before, and how far they filled stands in the metrics and, from `LOUD` on, in the log.
"""

from __future__ import annotations

import logging
import queue
from typing import Generic, TypeVar

logger = logging.getLogger("gapless")
T = TypeVar("T")

LOUD = 4096
"""Entries from which on each doubling is logged."""


class WatchedQueue(Generic[T]):
    """First in, first out; from any thread, and from a finalizer.

    Args:
        name: in the log: what it holds for whom.

    Attributes:
        peak: most entries so far.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._name = name
        self._loud = LOUD
        self.peak = 0
        self.get, self.qsize, self.empty = self._queue.get, self._queue.qsize, self._queue.empty

    def put(self, entry: T) -> None:
        """Never blocks."""
        self._queue.put(entry)
        size = self._queue.qsize()
        if size > self.peak:
            self.peak = size
            if size >= self._loud:
                self._loud = 2 * size
                logger.warning("%d %s wait: they come faster than they are taken", size, self._name)
