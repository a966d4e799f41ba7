"""SchedulerStats: what planning and committing have counted. Written and copied by the loop's thread only."""

from __future__ import annotations

from dataclasses import dataclass, field

from gapless.device.counts import Counters
from gapless.scheduler.read_counters import ReadCounters


@dataclass(slots=True)
class DraftStats(Counters):
    """Counters since the start.

    Attributes:
        steps: row-steps with drafts that were committed: a step with drafts of three rows counts three times.
        proposed, accepted: drafts, at each of the K places after a row's last token.
        stopped: times that a row stopped to draft because too few were accepted.
    """

    steps: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    stopped: int = 0

    def copy(self) -> DraftStats:
        """As it is now."""
        new = Counters.copy(self)
        new.proposed, new.accepted = list(self.proposed), list(self.accepted)
        return new

    @property
    def per_step(self) -> float:
        """Drafts that a row's step had accepted, in the mean; one more is the mean of its tokens."""
        return sum(self.accepted) / self.steps if self.steps else 0.0

    def __str__(self) -> str:
        if not self.steps:
            return "no step had drafts"
        places = " ".join(f"{a / p:.0%}" if p else "-" for a, p in zip(self.accepted, self.proposed, strict=True))
        return (
            f"{self.per_step:.2f} of {sum(self.proposed) / self.steps:.2f} accepted in each of {self.steps} steps; "
            f"by place {places}"
        )


@dataclass(slots=True)
class SchedulerStats(Counters):
    """Counters since the start; ``running``, ``waiting`` and what is said of blocks are of now.

    ``blocks_used`` and ``blocks_total`` count the blocks of all groups of layers, ``used_by_group`` has (used, total)
    of each (see `gapless.cache.groups`). ``drafts`` is None in an engine without drafts.
    """

    steps: int = 0
    tokens_computed: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    overrun_tokens: int = 0
    preemptions: int = 0
    requests_finished: int = 0
    corrupted: int = 0  # of them: those that ended because no token could be chosen, by NaN or by their own masks
    reads: ReadCounters = field(default_factory=ReadCounters)
    running: int = 0
    waiting: int = 0
    deferred: int = 0  # of them: those that came after a pause was asked for that lets others finish
    blocks_used: int = 0
    blocks_total: int = 0
    used_by_group: tuple[tuple[int, int], ...] = ()
    drafts: DraftStats | None = None

    def copy(self) -> SchedulerStats:
        """As it is now."""
        new = Counters.copy(self)
        new.reads, new.drafts = self.reads.copy(), self.drafts and self.drafts.copy()
        return new

    @property
    def kv_use(self) -> float:
        """Share of the KV pool that requests hold, 0 to 1: of the group of layers that is fullest. Blocks that only the
        prefix cache keeps are free."""
        groups = self.used_by_group or ((self.blocks_used, self.blocks_total),)
        return max(used / max(total, 1) for used, total in groups)
