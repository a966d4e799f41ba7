"""What the scheduler asks of drafts, and the answers of an engine without them.

`gapless.scheduler.drafting.Drafting` gives the others. So there is one way through a step, with drafts or without, and
the rest of the scheduler may be read without a thought of them.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from gapless.batch.plan import StepPlan
from gapless.batch.row_layout import I32
from gapless.batch.row_table import NEVER, RowTable
from gapless.request.request import Request
from gapless.scheduler.stats import DraftStats
from gapless.scheduler.steady import Steady
from gapless.scheduler.step_builder import StepBuilder
from gapless.scheduler.step_message import Drawn


class NoDrafts:
    """See the module.

    Attributes:
        num_drafts: K; a row has room for so many positions beyond its limit.
        stats: counters, or None.
    """

    num_drafts = 0
    stats: DraftStats | None = None

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows

    def assign(self, row: int, request: Request) -> None:
        """A request takes the row."""

    def check(self) -> None:
        """Raise `RuntimeError` where what is kept by row is not possible."""

    def choose(self, rows: I32, builder: StepBuilder, *, prompts: bool) -> tuple[I32, I32]:
        """How many tokens each of the ``rows [n]`` that decode computes, and one beyond the last position that it may
        write. ``prompts``: some could use what the budget leaves."""
        return np.ones(len(rows), np.int32), self._rows.computed[rows] + np.int32(1)

    def may_resume(self, row: int) -> bool:
        """The host knows how many tokens the preempted row has."""
        return True

    def launch(
        self, builder: StepBuilder, rows: I32, starts: I32, lens: I32, flags: I32
    ) -> tuple[I32, int, int | None]:
        """A step is planned; sets ``flags [S]`` of its sequences.

        Returns one beyond the last position that each of them computes for certain, and the plan's ``query_width`` and
        ``max_query_len``.
        """
        return starts + lens, 1, None

    def steady(self, plan: StepPlan) -> Steady | None:
        """How a plan goes on that is more than a plain decode."""
        return None

    def steps_until_drafts(self, rows: I32) -> int:
        """Plain steps until one of the rows, none of which drafts now, may draft."""
        return NEVER

    def commit(self, plan: StepPlan, brought: I32, records: I32 | None, preempted: Collection[int]) -> Drawn:
        """What a step with drafts has brought; see `Drafting.commit`."""
        raise RuntimeError(f"step {plan.step} has drafts in an engine without them")
