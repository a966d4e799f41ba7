"""EngineStats: where the time of host and device went. Sums since the start."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from gapless.device.counts import CopyCounts, Counters

PHASES = ("receive", "schedule", "launch", "mask", "wait", "commit", "publish")


@dataclass(slots=True)
class EngineStats(Counters):
    """Sums since the start, in seconds; written and copied by the loop's thread.

    ``host`` has one entry per phase of the loop. The device's time splits into ``busy`` (a step was running),
    ``idle_host`` (it waited for the host), ``idle_masks`` (it waited between a forward and its sampling for masks of
    structured output) and ``idle_no_work`` (there was no request). ``in_flight`` is of now: steps that were launched
    and not waited for yet. ``copies`` are the device's own counts. The peaks are the most entries so far of queues that
    have no bound of their own, see `gapless.engine.watched_queue`.
    """

    steps: int = 0
    in_flight: int = 0
    held_steps: int = 0  # of ``steps``: those that sampled after masks had come
    busy: float = 0.0
    busy_prompts: float = 0.0  # of ``busy``: in steps that computed several tokens of a prompt, or scored one
    idle_host: float = 0.0
    idle_masks: float = 0.0
    idle_no_work: float = 0.0
    host: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    copies: CopyCounts = field(default_factory=CopyCounts)
    inbox_peak: int = 0  # calls of other threads that waited for the loop
    messages_peak: int = 0  # messages of steps that waited for the output side
    grammars_peak: int = 0  # requests that waited for the compiler of grammars, in a server

    def copy(self) -> EngineStats:
        """As it is now; for the loop's thread."""
        new = Counters.copy(self)
        new.host, new.copies = dict(self.host), self.copies.copy()
        return new

    @property
    def idle(self) -> dict[str, float]:
        """Seconds in which no step ran, by cause: every field that begins with ``idle_``, without that."""
        return {f.name.removeprefix("idle_"): getattr(self, f.name) for f in fields(self) if f.name.startswith("idle_")}

    @property
    def busy_share(self) -> float:
        """The device's busy share of the time in which there were requests, 0 to 1; 1 before the first step."""
        wanted = self.busy + sum(self.idle.values()) - self.idle_no_work
        return self.busy / wanted if wanted else 1.0

    @property
    def host_work(self) -> float:
        """Seconds that the host worked: every phase but the wait for the device."""
        return sum(seconds for phase, seconds in self.host.items() if phase != "wait")

    @property
    def host_hidden(self) -> float:
        """Of these, the seconds that cost nothing, because the device was busy meanwhile."""
        return max(self.host_work - self.idle_host, 0.0)
