"""BlockPools: the blocks of all groups of layers, and what fits in them. Touched by the loop's thread only.

What could never fit is refused when a request comes; what does not fit now waits, or takes blocks from others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapless.batch.row_layout import RowLayout
from gapless.cache.block_pool import BlockPool
from gapless.cache.groups import blocks_spanned, longest_chunk
from gapless.errors import RequestError

UNBOUNDED = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Hit:
    """What the prefix cache holds of a row: its first ``num_blocks`` blocks of tokens.

    ``blocks`` has for each group the blocks that the positions from there on see; they end at ``num_blocks``.
    """

    num_blocks: int
    blocks: tuple[list[int], ...]


class BlockPools:
    """See the module.

    Args:
        layout: of the rows.
        num_blocks: of each group's pool, the null blocks among them; one number if they are equal.
    """

    def __init__(self, layout: RowLayout, num_blocks: int | Sequence[int]) -> None:
        windows = layout.windows
        counts = [num_blocks] * len(windows) if isinstance(num_blocks, int) else list(num_blocks)
        if len(counts) != len(windows):
            raise ValueError(f"num_blocks={num_blocks} is not allowed: {len(windows)} groups need as many numbers")
        self.pools = tuple(map(BlockPool, counts))
        self._layout = layout
        self._size = layout.block_size
        self.windowed = any(window is not None for window in windows)
        self._windows = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._chunks = [
            (pool.capacity, UNBOUNDED if window is None else longest_chunk(window, pool.capacity, self._size))
            for window, pool in zip(windows, self.pools, strict=True)
        ]
        self.no_hit = Hit(0, ([],) * len(windows))

    @property
    def available(self) -> tuple[int, ...]:
        """Blocks of each group that could be handed out now."""
        return tuple(pool.available for pool in self.pools)

    @property
    def used(self) -> tuple[int, ...]:
        """Blocks of each group that some row owns."""
        return tuple(pool.capacity - pool.available for pool in self.pools)

    @property
    def longest(self) -> int:
        """Tokens, prompt and output, of the longest request that could ever be finished."""
        longest = self._layout.max_model_len
        for window, (capacity, chunk) in zip(self._layout.windows, self._chunks, strict=True):
            if window is None or chunk < 1:
                longest = min(longest, capacity * self._size)
        return longest

    def refuse_what_never_fits(self, length: int) -> None:
        """Raise `RequestError` if a request of ``length`` tokens needs more than some group has. From any thread."""
        blocks = -(-length // self._size)
        for window, (capacity, chunk) in zip(self._layout.windows, self._chunks, strict=True):
            if blocks <= capacity or (window is not None and chunk >= 1):
                continue
            need = f"need {blocks} blocks of {self._size}"
            what = "the KV cache"
            if window is not None:
                need += f", at least {blocks_spanned(window, 1, self._size)} of them at once"
                what = f"the KV cache of layers with a window of {window} tokens"
            raise RequestError(
                f"prompt and output of {length} tokens {need}; {what} has {capacity}. "
                "Shorten the request or raise num_kv_blocks"
            )

    def longest_chunk(self, limit: int) -> int:
        """Tokens that one step may compute of a row of at most ``limit`` tokens, so that its window and they fit in the
        pools."""
        if not self.windowed:
            return UNBOUNDED
        blocks = self._blocks_for(limit)
        return min(UNBOUNDED if blocks <= capacity else chunk for capacity, chunk in self._chunks)

    @property
    def longest_window_chunk(self) -> int:
        """Tokens that one row may compute between a window's first and its last block."""
        return min(chunk for _, chunk in self._chunks)

    def fits(self, hit: Hit, total: int, chunk: int) -> bool:
        """Whether a row of ``total`` tokens that starts with ``hit`` finds room for all of them, ``chunk`` at a time.

        Hits that nobody owns now leave the available blocks when they are acquired.
        """
        needed = self._blocks_for(total) - hit.num_blocks
        for window, pool, blocks in zip(self._layout.windows, self.pools, hit.blocks, strict=True):
            most = needed if window is None else min(needed, blocks_spanned(window, chunk, self._size) - len(blocks))
            if most > pool.available - pool.count_idle(blocks):
                return False
        return True

    def table_words(self, hit: Hit, end: int) -> int:
        """Changes of the arena that bring the tables of a row that starts with ``hit`` and computes up to ``end``."""
        return len(self.pools) * (self._blocks_for(end) - hit.num_blocks) + sum(map(len, hit.blocks))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._size)
