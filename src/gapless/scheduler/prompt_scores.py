"""PromptScores: how likely the tokens of a prompt are, for requests with ``prompt_logprobs``.

Only the end of a sequence has logits. So a prompt whose tokens are scored goes as sequences of one token, side by
side: the logits of a step stay as many as its sequences, however long the prompt is. Touched by the loop's thread only.
"""

from __future__ import annotations

import numpy as np

from gapless.batch.plan import SeqFlag, StepPlan
from gapless.batch.row_layout import I32
from gapless.batch.row_table import RowTable
from gapless.request.messages import PromptRecords
from gapless.scheduler.step_builder import StepBuilder


class PromptScores:
    """See the module. ``rows.scored`` and ``rows.to_score`` say how far each row is."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows

    def pending(self, row: int) -> bool:
        """Some token of the row's prompt is to be scored yet."""
        return bool(self._rows.scored[row] != self._rows.to_score[row])

    def chunk(self, row: int, start: int, length: int, builder: StepBuilder) -> int:
        """How many of the ``length`` tokens from position ``start`` on the row's next chunk may have."""
        scored, to_score = int(self._rows.scored[row]), int(self._rows.to_score[row])
        if scored == to_score:
            return length
        if start < scored:  # computed once more after a preemption
            return min(length, scored - start)
        return min(length, to_score - start, 1 + builder.seqs_left)

    def add(self, row: int, start: int, length: int, builder: StepBuilder) -> bool:
        """Put the chunk into the step if its tokens are to be scored; else False."""
        r = self._rows
        if not r.scored[row] <= start < r.to_score[row]:
            return False
        builder.extend(np.full(length, row, np.int32), np.ones(length, np.int32))
        builder.seqs_left -= length - 1  # the row has its one sequence already
        builder.scored.append(row)
        builder.update(r.token_updates(row, start + length, start + length + 1))  # no chunk has brought it yet
        return True

    def launch(self, builder: StepBuilder, rows: I32, starts: I32, flags: I32) -> I32:
        """The step is planned; sets ``flags [S]`` of the sequences that score. Returns ``starts [S]``, where those of
        one row stand one behind the other."""
        if not builder.scored:
            return starts
        scores = np.isin(rows, builder.scored)
        flags[scores] = SeqFlag.SCORES
        starts = starts + places(rows)
        self._rows.scored[rows[scores]] = starts[scores] + 1  # of several values for a row NumPy takes the last
        return starts

    def commit(self, plan: StepPlan, records: I32 | None) -> PromptRecords | None:
        """What the step has brought of prompts; ``records`` as in `Scheduler.commit`."""
        if records is None or plan.repeats:
            return None
        r, live = self._rows, plan.having(SeqFlag.SCORES)
        if not live.any():
            return None
        live &= ~r.finished[plan.rows]
        first = records[live] if plan.query_width == 1 else records[live, 0]
        return PromptRecords(r.ids[plan.rows[live]], plan.starts[live] + 1, first)


def places(rows: I32) -> I32:
    """How many of the entries just before each are equal to it."""
    first = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
    counts = np.diff(np.append(first, len(rows)))
    return (np.arange(len(rows)) - np.repeat(first, counts)).astype(np.int32)
