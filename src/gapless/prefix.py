"""PrefixCache: which blocks of which rows may be found again, and what a new row finds.

Touched by the loop's thread only. Two times of publication, and both are never too early:

    prompt      when the step that fills the block is planned. Whatever reads it later, or in the same step, is ordered
                after the write by the compute stream; so 64 equal prompts compute their prefix once.
    generated   after the commit that brought the block's last token. It is put off until somebody could look (a new
                request) or the row gives its blocks back, so that a steady step pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from gapless.kv.pool import ROOT, BlockPool, block_key
from gapless.rows import RowTable


class PrefixCache:
    """See the module. Disabled, it finds and publishes nothing."""

    def __init__(self, rows: RowTable, pool: BlockPool, *, enabled: bool) -> None:
        self._rows = rows
        self._pool = pool
        self._size = rows.layout.block_size
        self.enabled = enabled

    def hit(self, row: int, most: int) -> list[int]:
        """Published blocks with the row's known tokens from position 0; at least one token stays to compute."""
        if not self.enabled:
            return []
        r, size = self._rows, self._size
        hit: list[int] = []
        for i in range(min((int(r.known[row]) - 1) // size, most)):
            block = self._pool.lookup(self._hash(row, i), r.tokens[row, i * size : (i + 1) * size])
            if block is None:
                break
            hit.append(block)
        return hit

    def publish(self, row: int, computed: int) -> None:
        """Publish the row's full blocks whose tokens are known and whose positions lie below ``computed``."""
        if not self.enabled:
            return
        r, size = self._rows, self._size
        first, full = int(r.blocks_hashed[row]), min(computed, int(r.known[row])) // size
        if full <= first:
            return
        for i, block in enumerate(r.block_tables[row, first:full].tolist(), first):
            self._pool.publish(block, self._hash(row, i), r.tokens[row, i * size : (i + 1) * size])
        r.blocks_hashed[row] = full

    def publish_generated(self, rows: Iterable[int]) -> None:
        """Publish what these rows have generated since the last time."""
        if self.enabled:
            for row in rows:
                self.publish(row, int(self._rows.computed[row]))

    def _hash(self, row: int, i: int) -> bytes:
        """Key of the row's block ``i``; all of its tokens must be known."""
        hashes, size = self._rows.hashes[row], self._size
        while len(hashes) <= i:
            j = len(hashes)
            tokens = self._rows.tokens[row, j * size : (j + 1) * size]
            hashes.append(block_key(hashes[-1] if j else ROOT, tokens, self._rows.cache_keys[row]))
        return hashes[i]
