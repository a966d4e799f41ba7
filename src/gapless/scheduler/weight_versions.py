"""WeightVersions: which weights a request's tokens came from. Touched by the loop's thread only.

The version counts updates. An update happens while no step is in flight, so a step knows one version, and a row needs
a word only when an update finds it running: nothing is kept on the step path.
"""

from __future__ import annotations

import numpy as np

from gapless.batch.row_table import RowTable

NONE = -1


class WeightVersions:
    """See the module.

    Attributes:
        now: version of the weights that the next step reads; 0 at start.
    """

    def __init__(self, rows: RowTable) -> None:
        count = len(rows.requests)
        self.now = 0
        self._rows = rows
        self._first = np.full(count, NONE, np.int64)
        self._last = np.full(count, NONE, np.int64)
        self._known = np.zeros(count, np.int64)  # tokens that were known at the update that set ``_last``

    def advance(self, live: list[int], *, recompute: bool) -> None:
        """An update. ``live`` are the rows that have not ended; ``recompute``: what their cache holds is not used."""
        r = self._rows
        for row in live:
            known = int(r.known[row])
            if known > max(int(r.prompt_len[row]), int(self._known[row])):
                self._last[row], self._known[row] = self.now, known
            used = r.scored[row] > 0 or (not recompute and r.computed[row] > 0)
            if self._first[row] == NONE and (known > r.prompt_len[row] or used):
                self._first[row] = self.now
        self.now += 1

    def of(self, row: int) -> tuple[int, int]:
        """Versions of the first and of the last step whose work an ended request holds; forgets them."""
        first, last = int(self._first[row]), int(self._last[row])
        drew_since = last == NONE or int(self._rows.known[row]) > int(self._known[row])
        self._first[row] = self._last[row] = NONE
        self._known[row] = 0
        return (first if first != NONE else self.now), (self.now if drew_since else last)
