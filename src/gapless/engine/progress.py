"""How an engine does during one call, in a few words for a progress bar: always on, because its counters are.

A word is made from a dozen numbers that the loop keeps anyway, twice a second at most; the loop is not asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gapless.engine.stats import EngineStats
from gapless.scheduler.stats import SchedulerStats

INTERVAL = 0.5
"""Seconds between two refreshes of a bar."""


class Pace:
    """Counters since this was made.

    Args:
        stats: of the engine, as they are at the call.
    """

    def __init__(self, stats: Callable[[], tuple[EngineStats, SchedulerStats]]) -> None:
        self._stats = stats
        self._start = time.perf_counter()
        engine, scheduler = stats()
        self._busy, self._idle = engine.busy, _idle(engine)
        self._tokens = scheduler.generated_tokens

    def __str__(self) -> str:
        """``2237.4 tokens/s, busy 99.9 %, 32 running, 4 waiting, KV 41 %``; idle causes above a percent are named.

        Busy is the device's share since the start of the call, by the events around each step; in a time without
        requests it is not asked to be busy. Tokens are all that the engine made, for this call or another.
        """
        engine, scheduler = self._stats()
        seconds = time.perf_counter() - self._start
        words = [f"{(scheduler.generated_tokens - self._tokens) / max(seconds, 1e-9):.1f} tokens/s"]
        idle = {cause: now - self._idle.get(cause, 0.0) for cause, now in _idle(engine).items()}
        busy = engine.busy - self._busy
        total = busy + sum(idle.values())
        if total > 0:
            causes = [f"{cause} {100 * s / total:.1f} %" for cause, s in idle.items() if s > 0.01 * total]
            waits = f" (waits: {', '.join(causes)})" if causes else ""
            words.append(f"busy {100 * busy / total:.1f} %{waits}")
        if scheduler.running or scheduler.waiting:
            waiting = f", {scheduler.waiting} waiting" if scheduler.waiting else ""
            words.append(f"{scheduler.running} running{waiting}, KV {100 * scheduler.kv_use:.0f} %")
        return ", ".join(words)


def _idle(engine: EngineStats) -> dict[str, float]:
    """Idle seconds by cause, but for want of work."""
    return {cause: seconds for cause, seconds in engine.idle.items() if cause != "no_work"}
