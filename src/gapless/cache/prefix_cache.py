"""PrefixCache: which blocks of which rows may be found again, and what a new row finds.

Touched by the loop's thread only. Two times of publication, and both are never too early:

    prompt      when the step that fills the block is planned. Whatever reads it later, or in the same step, is ordered
                after the write by the compute stream; so 64 equal prompts compute their prefix once.
    generated   after the commit that brought the block's last token. It is put off until somebody could look (a new
                request) or the row gives its blocks back, so that a steady step pays nothing for it.

The key of a block is a property of its tokens and of those before it, and so the same in all groups. A row may go on
after n blocks if each group still has what the positions from there on see: all n, or those of the window. What a row
has generated and left behind is not published in a group with a window: for a longer prefix it is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gapless.batch.row_table import RowTable
from gapless.cache.block_pool import ROOT, block_keys
from gapless.cache.block_pools import Hit
from gapless.cache.block_tables import BlockTables
from gapless.request.prompt_embeds import OVERRIDDEN


class PrefixCache:
    """See the module. Disabled, it finds and publishes nothing. ``root`` precedes the first block of every row: in
    which formats keys and values are kept (`gapless.cache.spec.format_key`)."""

    def __init__(self, rows: RowTable, blocks: BlockTables, *, enabled: bool, root: bytes = ROOT) -> None:
        self._rows = rows
        self._blocks = blocks
        self._pools = blocks.pools
        self._size = rows.layout.block_size
        self.enabled = enabled
        self._root = root

    def hit(self, row: int, most: int) -> Hit:
        """The longest prefix of the row's known tokens, of at most ``most`` blocks, after which every group could go
        on; at least one token stays to compute."""
        windows = self._rows.layout.windows
        most = min((int(self._rows.known[row]) - 1) // self._size, most)
        if not self.enabled or most <= 0:
            return self._blocks.no_hit
        found: list[list[int]] = [[] for _ in windows]
        end, before = most, -1
        while end != before:  # what one group shortens, those before it must look at again
            before = end
            for group, window in enumerate(windows):
                end = self._longest(row, group, window, end, found[group])
            if len(windows) == 1:
                break
        if end <= 0:
            return self._blocks.no_hit
        return Hit(end, tuple(found))

    def _longest(self, row: int, group: int, window: int | None, end: int, found: list[int]) -> int:
        """The most blocks up to ``end`` after which the group could go on; ``found`` becomes those that it needs."""
        if window is None:
            if found:  # a second look, after another group has shortened it
                del found[end:]
                return len(found)
            for i in range(end):
                if (block := self._find(row, group, i)) is None:
                    break
                found.append(block)
            return len(found)
        while end > 0:
            first = max(end * self._size + 1 - window, 0) // self._size
            found.clear()
            i = end - 1
            while i >= first and (block := self._find(row, group, i)) is not None:
                found.append(block)
                i -= 1
            if i < first:
                break
            end = i  # every end behind the missing block and up to the last one needs it too
        else:
            found.clear()
        found.reverse()
        return end

    def publish(self, row: int, computed: int) -> None:
        """Publish the row's full blocks whose tokens are known and whose positions lie below ``computed``."""
        if not self.enabled:
            return
        r, size = self._rows, self._size
        first, full = int(r.blocks_hashed[row]), min(computed, int(r.known[row])) // size
        if full <= first:
            return
        contents = self._blocks_of_tokens(row, first, full)
        keys = self._hashes(row, full)[first:full]
        for pool, blocks in zip(self._pools, self._blocks.tables[:, row, first:full].tolist(), strict=True):
            pool.publish(blocks, keys, contents)
        r.blocks_hashed[row] = full

    def publish_generated(self, rows: Iterable[int]) -> None:
        """Publish what these rows have generated since the last time."""
        if self.enabled:
            for row in rows:
                self.publish(row, int(self._rows.computed[row]))

    def _find(self, row: int, group: int, i: int) -> int | None:
        (content,) = self._blocks_of_tokens(row, i, i + 1)
        return self._pools[group].lookup(self._hashes(row, i + 1)[i], content)

    def _hashes(self, row: int, count: int) -> list[bytes]:
        """Keys of the row's first ``count`` blocks, or of more; all of their tokens must be known."""
        hashes = self._rows.hashes[row]
        if (have := len(hashes)) < count:
            contents = self._blocks_of_tokens(row, have, count)
            hashes += block_keys(hashes[-1] if have else self._root, contents, self._rows.cache_keys[row])
        return hashes

    def _blocks_of_tokens(self, row: int, first: int, end: int) -> list[bytes]:
        """The tokens of each of the row's blocks [first, end), as bytes. Those given by their embeddings have no
        id; their block has the digests of these besides."""
        size, tokens = self._size, self._rows.tokens[row, first * self._size : end * self._size]
        request = self._rows.requests[row]
        embeds = None if request is None else request.embeds
        if embeds is not None:
            tokens = np.maximum(tokens, OVERRIDDEN)
        held, step = tokens.tobytes(), size * tokens.itemsize
        contents = [held[at : at + step] for at in range(0, len(held), step)]
        if embeds is None:
            return contents
        return [c + embeds.digests_of(i * size, (i + 1) * size) for i, c in enumerate(contents, first)]
