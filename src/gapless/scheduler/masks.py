"""GrammarMasks: steps whose tokens grammars restrict, between their forward and their sampling.

What a grammar allows depends on the tokens before, so such a step waits until all older ones are committed; nothing is
planned behind it meanwhile. Touched by the loop's thread only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gapless.batch.plan import StepPlan
from gapless.batch.row_layout import I32
from gapless.batch.row_table import RowTable
from gapless.grammar.matcher import fill_masks
from gapless.request.outputs import FinishReason


class GrammarMasks:
    """See the module.

    Args:
        rows: of the scheduler.
        finish: ends a request: its id, why, and an error's text.
    """

    def __init__(self, rows: RowTable, finish: Callable[[int, FinishReason, str | None], None]) -> None:
        self._rows = rows
        self._finish = finish
        self._step: StepPlan | None = None

    @property
    def awaited(self) -> bool:
        """The latest step waits for `fill`."""
        return self._step is not None

    def launch(self, plan: StepPlan) -> None:
        """The step is planned."""
        self._step = None if plan.constrained is None else plan

    def fill(self, masks: I32) -> I32:
        """See `gapless.scheduler.scheduler.Scheduler.fill_masks`."""
        plan, self._step = self._step, None
        assert plan is not None
        assert plan.constrained is not None
        r = self._rows
        at = np.flatnonzero(plan.constrained & ~r.finished[plan.rows])
        rows, ends = plan.rows[at], (plan.starts + plan.query_lens)[at]
        requests = [request for row in rows.tolist() if (request := r.requests[row]) is not None]
        outputs = [r.tokens[row, r.prompt_len[row] : end] for row, end in zip(rows, ends, strict=True)]
        found = fill_masks([request.grammar for request in requests], outputs, masks[: len(rows)])
        for request, end in zip(requests, found, strict=True):
            if end is not None:
                self._finish(request.id, end.reason, end.error)
        return rows
