"""BlockTables: the blocks of the rows, in all groups at once. Touched by the loop's thread only.

For each row and group, as half-open ranges of places in its table:

    [0, first_blocks)            the null block: they have left the group's window
    [first_blocks, num_blocks)   blocks that the row owns
    [0, sent)                    what the device has of it

A row's table is equally long in every group, as a position lies in the same place of each. Groups with a window own
less of it: once no later step reads a block, `free_passed` gives it back. So such a row holds at most
`gapless.cache.groups.blocks_spanned` blocks of the group, however long it gets. A new owner may have the block at once:
steps in flight that still read it come before the owner's writes on the compute stream.

The device is not told. Its table keeps the old number before the window, as it does after the row's end, and no kernel
reads either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gapless.batch.plan import NO_UPDATES
from gapless.batch.row_layout import I32, NULL_BLOCK
from gapless.batch.row_table import RowTable
from gapless.batch.row_updates import changes
from gapless.cache.block_pools import BlockPools, Hit


class BlockTables(BlockPools):
    """See the module.

    Args:
        rows: whose tables these are; read only.
        num_blocks: of each group's pool, the null blocks among them; one number if they are equal.

    Attributes:
        tables: int32 ``[G, R, max_blocks]``.
        first_blocks: int32 ``[G, R]``.
        num_blocks, sent: int32 ``[R]``.
    """

    def __init__(self, rows: RowTable, num_blocks: int | Sequence[int]) -> None:
        super().__init__(rows.layout, num_blocks)
        windows = self._layout.windows
        self.rows = rows
        count = self._layout.max_num_seqs
        self.tables = np.zeros((len(windows), count, self._layout.max_blocks), np.int32)
        self.first_blocks = np.zeros((len(windows), count), np.int32)
        self.num_blocks = np.zeros(count, np.int32)
        self.sent = np.zeros(count, np.int32)

    # ---- changes of owner -----------------------------------------------------------------------------------------

    def start(self, row: int, hit: Hit) -> None:
        """The row, which owns nothing, owns the blocks of ``hit`` too."""
        end = hit.num_blocks
        for group, (pool, blocks) in enumerate(zip(self.pools, hit.blocks, strict=True)):
            first = end - len(blocks)
            for block in blocks:
                pool.acquire(block)
            self.tables[group, row, :first] = NULL_BLOCK
            self.tables[group, row, first:end] = blocks
            self.first_blocks[group, row] = first
        self.num_blocks[row] = end

    def grow(self, row: int, end: int) -> I32 | None:
        """Give the row blocks for the positions [0, ``end``) in each group.

        Returns the changes ``[n, 2]`` that bring the device what it lacks of the row's tables; None, and then nothing
        has changed, if some pool is short of blocks.
        """
        have = int(self.num_blocks[row])
        count = self._blocks_for(end) - have
        if count > 0:
            if any(pool.available < count for pool in self.pools):
                return None
            for group, pool in enumerate(self.pools):
                self.tables[group, row, have : have + count] = pool.allocate(count) or []
            self.num_blocks[row] = have + count
        sent, self.sent[row] = int(self.sent[row]), self.num_blocks[row]
        return NO_UPDATES if sent == self.num_blocks[row] else self._changes(row, sent)

    def _changes(self, row: int, sent: int) -> I32:
        """Changes that bring the row's blocks from the place ``sent`` on to the device."""
        layout, end, parts = self._layout, int(self.num_blocks[row]), []
        for group, first in enumerate(self.first_blocks[:, row].tolist()):
            lo = max(sent, first)
            at = layout.block_tables_at + group * layout.table_words + row * layout.max_blocks
            parts.append(changes(at + lo, self.tables[group, row, lo:end]))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def append(self, rows: I32) -> I32 | None:
        """`free_passed`, then one more block for each of ``rows`` in each group.

        Returns the changes ``[n, 2]`` that bring them to the device, or None if some pool is short of them.
        """
        if self.windowed:
            self.free_passed(rows)
        count = len(rows)
        if any(pool.available < count for pool in self.pools):
            return None
        layout, at = self._layout, self.num_blocks[rows]
        words = layout.block_tables_at + rows * np.int32(layout.max_blocks) + at
        updates = np.empty((len(self.pools) * count, 2), np.int32)
        for group, pool in enumerate(self.pools):
            new = pool.allocate(count) or []
            self.tables[group, rows, at] = new
            part = updates[group * count : (group + 1) * count]
            part[:, 0] = words + np.int32(group * layout.table_words)
            part[:, 1] = new
        self.num_blocks[rows] = self.sent[rows] = at + 1
        return updates

    def free_passed(self, rows: I32) -> None:
        """Give back the blocks of these running rows that have left their windows, so that no later step reads them."""
        size = self._size
        lowest = self.rows.computed[rows]  # no later step computes an earlier position: what is launched stays
        for group, window in self._windows:
            table, firsts, pool = self.tables[group], self.first_blocks[group], self.pools[group]
            first = np.minimum(np.maximum(lowest + 1 - window, 0) // size, self.num_blocks[rows])
            gone = first - firsts[rows]
            one = gone == 1  # a row that decodes loses them one by one
            if one.any():
                those = rows[one]
                at = firsts[those]
                pool.release(table[those, at].tolist())
                table[those, at] = NULL_BLOCK
                firsts[those] = at + 1
            for i in np.flatnonzero(gone > 1).tolist():
                row, end = int(rows[i]), int(first[i])
                span = table[row, int(firsts[row]) : end]
                pool.release(span.tolist())
                span[:] = NULL_BLOCK
                firsts[row] = end

    def release(self, row: int) -> None:
        """Take all blocks of the row."""
        for group, pool in enumerate(self.pools):
            pool.release(self.blocks_of(row, group))
        self.num_blocks[row] = self.sent[row] = 0
        self.first_blocks[:, row] = 0

    def blocks_of(self, row: int, group: int = 0) -> list[int]:
        """Blocks of the group that the row owns, in table order."""
        owned = self.tables[group, row, self.first_blocks[group, row] : self.num_blocks[row]]
        blocks: list[int] = owned.tolist()
        return blocks

    # ---- the prefix cache -----------------------------------------------------------------------------------------

    def unpublish(self, row: int) -> None:
        """Nobody finds again what the row's steps have filled, in blocks that it has left behind neither."""
        for group, pool in enumerate(self.pools):
            for block in self.blocks_of(row, group):
                pool.unpublish(block)
            for key in self.rows.hashes[row][: int(self.first_blocks[group, row])]:
                pool.unpublish_key(key)

    def unpublish_all(self) -> None:
        """Forget every prefix."""
        for pool in self.pools:
            pool.unpublish_all()

    def check(self, used: list[int]) -> None:
        """Integrity; ``used`` are the rows that requests have.

        Raises:
            RuntimeError: a pool and the rows disagree, or a row owns a null block.
        """
        for group, pool in enumerate(self.pools):
            pool.check([block for row in used for block in self.blocks_of(row, group)])
            for row in used:
                if (self.tables[group, row, : self.first_blocks[group, row]] != NULL_BLOCK).any():
                    raise RuntimeError(f"row {row} names blocks of group {group} that it has left behind")
