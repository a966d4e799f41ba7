"""ReadCounters: how much of the past steps have read, counted from plans, for estimates of bytes and operations.

A few NumPy calls over the sequences of a step. In a step with drafts the starts are lower bounds, and so is the count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gapless.batch.plan import StepPlan
from gapless.device.counts import Counters

I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class ReadCounters(Counters):
    """Sums since the start. The lists have one entry for each group of layers (see `gapless.cache.groups`).

    Attributes:
        sequences: sequences of steps.
        keys: positions whose keys and values were read: those that some token of a sequence sees, once for each
            sequence and step.
        pairs: pairs of a token and a position that it sees, itself included.
    """

    sequences: int = 0
    keys: list[int] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    _last: int = 0  # positions read in the latest step, of a group that sees all

    def copy(self) -> ReadCounters:
        """As it is now."""
        new = Counters.copy(self)
        new.keys, new.pairs = list(self.keys), list(self.pairs)
        return new

    def count(self, plan: StepPlan, windows: tuple[int | None, ...]) -> None:
        """Count the next step of an engine whose groups see ``windows`` positions."""
        self.sequences += plan.num_seqs
        if plan.repeats and plan.query_width == 1 and windows == (None,):  # each sequence is one position further
            self._last += plan.num_seqs
            self.keys[0] += self._last
            self.pairs[0] += self._last
            return
        if not self.keys:
            self.keys, self.pairs = [0] * len(windows), [0] * len(windows)
        ends = plan.starts + plan.query_lens
        self._last = int(ends.sum())
        single = plan.num_tokens == plan.num_seqs
        for i, window in enumerate(windows):
            seen = ends if window is None else np.minimum(ends, plan.query_lens + np.int32(window - 1))
            keys = int(seen.sum())
            self.keys[i] += keys
            self.pairs[i] += keys if single else int((_seen(ends, window) - _seen(plan.starts, window)).sum())


def _seen(end: npt.NDArray[np.int32], window: int | None) -> I64:
    """Pairs of the tokens before ``end``."""
    n = end.astype(np.int64)
    rising = n if window is None else np.minimum(n, window)
    found: I64 = rising * (rising + 1) // 2 + (n - rising) * (0 if window is None else window)
    return found
