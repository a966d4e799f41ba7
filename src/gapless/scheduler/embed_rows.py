"""EmbedRows: which rows of the table of embeddings on the device belong to which request.

A request takes its rows when it starts, and gives them back when it ends; it keeps them while it is preempted. The
compute stream alone writes and reads the table, so that rows have a new owner at once, as blocks do: what the new one
brings is written behind the steps in flight that still read what was there.

For the loop's thread only.
"""

from __future__ import annotations

import numpy as np

from gapless.batch.plan import EmbedUpload
from gapless.batch.row_table import RowTable


class EmbedRows:
    """See the module. The table has ``count`` rows, 0 for none."""

    def __init__(self, rows: RowTable, count: int) -> None:
        self._rows = rows
        self._free = list(range(count - 1, -1, -1))
        self._of: dict[int, list[int]] = {}
        self.count = count

    @property
    def num_free(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    def take(self, row: int) -> EmbedUpload | None:
        """Give the request in ``row`` rows for its embeddings, of which there must be enough, and say what to write
        there. None: it has no embeddings."""
        request = self._rows.requests[row]
        if request is None or request.embeds is None:
            return None
        embeds = request.embeds
        taken = self._of[row] = [self._free.pop() for _ in range(len(embeds))]
        places = np.array(taken, np.int32)
        self._rows.tokens[row, embeds.positions] = -1 - places
        return EmbedUpload(places, embeds.data)

    def give_back(self, row: int) -> None:
        """The row's request has ended."""
        self._free += reversed(self._of.pop(row, ()))

    def check(self, live: list[int]) -> None:
        """Integrity, given the rows of running and preempted requests.

        Raises:
            RuntimeError: a row of the table is lost, or somebody else's.
        """
        taken = [place for places in self._of.values() for place in places]
        if sorted(taken + self._free) != list(range(self.count)) or not self._of.keys() <= set(live):
            raise RuntimeError(f"rows {taken} of {self.count} have the owners {sorted(self._of)}, and {live} are live")


def joined(parts: list[EmbedUpload]) -> EmbedUpload | None:
    """What the requests that start in a step bring, as one; None if they bring nothing."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    return EmbedUpload(np.concatenate([p.rows for p in parts]), np.concatenate([p.data for p in parts]))
