"""A window of steady steps on this engine, watched through its one hook: `Engine.observer`.

Everything here runs on the loop's thread, between two phases of the loop. Steady means: nothing waits, and each step
computes one token for every running request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from gapless.engine.client import EngineClient
from gapless.runner.runner import Runner

Phase = tuple[str, float, float]


@dataclass(slots=True)
class Seen:
    """What was watched, by ``perf_counter``.

    Attributes:
        phases: name, start and end of each, in the order of their ends; ``fill`` lies within ``launch``.
        counters: time, and running, waiting and blocks in use.
        step_ms: between the ends of the waits of the first and the last step of the window, per step.
        step_busy: the device's share of busy time over the same steps, by the engine's own events.
    """

    phases: list[Phase] = field(default_factory=list)
    counters: list[tuple[float, int, int, int]] = field(default_factory=list)
    step_ms: float = 0.0
    step_busy: float = 0.0


class Window:
    """An observer that waits for steady steps, skips some, and watches the next ones.

    Args:
        client: whose engine it watches.
        batch: requests that must run.
        skip, steps: steady steps to let pass, and to watch.
        begin, end: called on the loop's thread at the window's edges.
    """

    def __init__(
        self,
        client: EngineClient,
        batch: int,
        skip: int,
        steps: int,
        begin: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.seen = Seen()
        self.done = threading.Event()
        self._client = client
        self._scheduler = client._scheduler
        self._batch, self._skip, self._steps = batch, skip, steps
        self._begin, self._end = begin, end
        self._steady = 0
        self._computed = 0
        self._waits: list[float] | None = None  # ends of the window's waits; None before the window
        self._before = (0.0, 0.0)  # busy and idle seconds after its first wait

    def __call__(self, phase: str, start: float, end: float) -> None:
        if self.done.is_set():
            return
        if self._waits is not None:
            self.seen.phases.append((phase, start, end))
            if phase == "wait":
                self._waits.append(end)
        if phase == "commit":
            self._after_commit(end)

    def _after_commit(self, time: float) -> None:
        now = self._scheduler.snapshot()
        if self._waits is not None:
            self.seen.counters.append((time, now.running, now.waiting, now.blocks_used))
            stats = self._client._engine.stats
            if len(self._waits) == 1:
                self._before = (stats.busy, stats.idle_host)
            if len(self._waits) > self._steps:
                busy, idle = stats.busy - self._before[0], stats.idle_host - self._before[1]
                self.seen.step_busy = busy / (busy + idle) if busy + idle else 0.0
                self.seen.step_ms = 1e3 * (self._waits[-1] - self._waits[0]) / (len(self._waits) - 1)
                self._end()
                self.done.set()
            return
        computed, self._computed = now.tokens_computed - self._computed, now.tokens_computed
        steady = now.running == computed == self._batch and now.waiting == 0
        self._steady = self._steady + 1 if steady else 0
        if self._steady > self._skip:
            self._begin()
            self._waits = []

    @contextmanager
    def watching(self) -> Iterator[Seen]:
        """Installed, the filling of slots watched as well; taken off at the end."""
        runner = cast(Runner, self._client._built.runner)
        engine, slots = self._client._engine, runner._ring.slots

        def install() -> None:
            engine.observer = self
            for slot in slots:
                vars(slot)["fill"] = _timed(slot.fill, "fill", self)

        def remove() -> None:
            engine.observer = None
            for slot in slots:
                vars(slot).pop("fill", None)

        engine.call(install)
        try:
            yield self.seen
        finally:
            engine.call(remove)


def _timed(function: Callable[..., Any], name: str, observer: Window) -> Callable[..., Any]:
    import time

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        result = function(*args)
        observer(name, start, time.perf_counter())
        return result

    return timed
