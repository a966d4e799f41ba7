"""WaitingQueue: requests that have not started, in the order in which they will. Touched by the loop's thread only.

Lower priorities come first; requests of one priority in the order in which they came.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping

from gapless.request.request import Request


class WaitingQueue(MutableMapping[int, Request]):
    """Requests by id; iterates over the ids in order. Every operation on one request takes constant time."""

    def __init__(self) -> None:
        self._by_priority: dict[int, OrderedDict[int, Request]] = {}
        self._priorities: list[int] = []  # of the queues that are not empty, ascending
        self._priority_of: dict[int, int] = {}

    def __setitem__(self, request_id: int, request: Request) -> None:
        if request_id in self._priority_of:
            raise ValueError(f"request {request_id} is waiting already")
        queue = self._by_priority.get(request.priority)
        if queue is None:
            queue = self._by_priority[request.priority] = OrderedDict()
            bisect.insort(self._priorities, request.priority)
        queue[request_id] = request
        self._priority_of[request_id] = request.priority

    def __getitem__(self, request_id: int) -> Request:
        return self._by_priority[self._priority_of[request_id]][request_id]

    def __delitem__(self, request_id: int) -> None:
        priority = self._priority_of.pop(request_id)
        queue = self._by_priority[priority]
        del queue[request_id]
        if not queue:
            del self._by_priority[priority]
            self._priorities.remove(priority)

    def __iter__(self) -> Iterator[int]:
        for priority in self._priorities:
            yield from self._by_priority[priority]

    def __len__(self) -> int:
        return len(self._priority_of)
