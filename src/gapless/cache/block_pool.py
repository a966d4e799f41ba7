"""BlockPool: who owns which block of the KV cache, and which blocks hold a prefix that can be used again.

Touched by the loop's thread only. Every block except the null block is in exactly one of three states:

    owned    refs >= 1: in the block table of that many rows
    cached   refs == 0, published: holds a known prefix; evicted when the free ones run out, least recently used first
    free     refs == 0, not published

A block may be given to a new owner at once, even while steps in flight still write to it for the old one: all writes
happen on the compute stream, in order. A block of a live request is never taken away.

Published blocks are found by a hash chain over blocks of tokens (the parent's hash, the tokens, an extra key), as in
vLLM's automatic prefix caching; BLAKE2b, so that nobody can construct a collision, and the tokens are compared too.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from gapless.batch.row_layout import NULL_BLOCK

ROOT = b""


def block_keys(parent: bytes, blocks: Iterable[bytes], extra: bytes = b"") -> list[bytes]:
    """Hashes of full blocks that follow each other, each given as the bytes of its tokens; the predecessor of the first
    hashes to ``parent``, or is `ROOT`.

    Blocks of equal tokens with another ``extra`` hash differently. All of it counts, however long it is.
    """
    if len(extra) > hashlib.blake2b.MAX_KEY_SIZE:
        extra = hashlib.blake2b(extra).digest()
    start, keys = hashlib.blake2b(digest_size=16, key=extra).copy, []  # to copy one is quicker than to make one
    for tokens in blocks:
        digest = start()
        digest.update(parent + tokens)
        parent = digest.digest()
        keys.append(parent)
    return keys


class BlockPool:
    """``num_blocks`` blocks, block 0 being the null block that nobody owns."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} is not allowed: the null block and at least one more are needed")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._by_key: dict[bytes, int] = {}  # published blocks
        self._keys = [ROOT] * num_blocks  # theirs; `ROOT` is nobody's
        self._tokens = [b""] * num_blocks

    @property
    def capacity(self) -> int:
        """Blocks that requests can own."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_published(self) -> int:
        """Blocks that a lookup could find."""
        return len(self._by_key)

    def count_idle(self, blocks: list[int]) -> int:
        """How many of these blocks nobody owns."""
        return sum(self._refs[block] == 0 for block in blocks)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None, and then nothing has changed."""
        free, refs = self._free, self._refs
        if count > len(free) + len(self._cached):
            return None
        first = max(len(free) - count, 0)
        blocks = free[first:]
        blocks.reverse()
        del free[first:]
        cached, keys, by_key = self._cached, self._keys, self._by_key
        for _ in range(count - len(blocks)):
            block, _ = cached.popitem(last=False)
            del by_key[keys[block]]
            keys[block] = ROOT
            blocks.append(block)
        for block in blocks:
            refs[block] = 1
        return blocks

    def acquire(self, block: int) -> None:
        """One more owner of a published block."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One owner less of each. Given in table order; the tail of a prefix is evicted before its head."""
        refs, keys, cached, free = self._refs, self._keys, self._cached, self._free
        for block in reversed(blocks):
            left = refs[block] - 1
            if left < 0:
                raise RuntimeError(f"block {block} is released but nobody owns it")
            refs[block] = left
            if left == 0:
                if keys[block]:
                    cached[block] = None
                else:
                    free.append(block)

    def publish(self, blocks: list[int], keys: list[bytes], tokens: list[bytes]) -> None:
        """Let later lookups find these owned blocks, but not the null block, which stands for what a row has left
        behind. A key that is known already keeps its first block."""
        by_key, key_of, tokens_of = self._by_key, self._keys, self._tokens
        for block, key, held in zip(blocks, keys, tokens, strict=True):
            if key not in by_key and not key_of[block] and block != NULL_BLOCK:
                by_key[key] = block
                key_of[block], tokens_of[block] = key, held

    def unpublish(self, block: int) -> None:
        """Later lookups do not find this block; its owners keep it."""
        key, self._keys[block] = self._keys[block], ROOT
        if key:
            del self._by_key[key]
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def unpublish_key(self, key: bytes) -> None:
        """Later lookups of this key find nothing."""
        block = self._by_key.get(key)
        if block is not None:
            self.unpublish(block)

    def unpublish_all(self) -> None:
        """Forget every prefix: after a change of weights no cached key or value is right."""
        for block in list(self._by_key.values()):
            self.unpublish(block)

    def lookup(self, key: bytes, tokens: bytes) -> int | None:
        """The block that holds these tokens after that prefix, if there is one."""
        block = self._by_key.get(key)
        if block is None or self._tokens[block] != tokens:
            return None
        return block

    def check(self, owned: list[int]) -> None:
        """Integrity: ``owned`` lists the blocks of all rows, one entry per reference.

        Raises:
            RuntimeError: a block is lost, in two states, or has a wrong number of owners.
        """
        refs = np.bincount(np.asarray(owned, dtype=np.int64), minlength=self.num_blocks)
        if refs.tolist() != self._refs:
            wrong = [b for b in range(self.num_blocks) if refs[b] != self._refs[b]]
            raise RuntimeError(f"blocks {wrong[:8]} are counted with another number of owners than rows name them")
        free, cached = set(self._free), set(self._cached)
        idle = {b for b in range(1, self.num_blocks) if self._refs[b] == 0}
        if len(free) != len(self._free) or free & cached or free | cached != idle:
            raise RuntimeError(f"free {sorted(free)} and cached {sorted(cached)} are not the idle {sorted(idle)}")
        if self._refs[NULL_BLOCK] or NULL_BLOCK in free | cached:
            raise RuntimeError("the null block is in use")
        if self._by_key != {key: block for block, key in enumerate(self._keys) if key}:
            raise RuntimeError("the prefix index and the published blocks disagree")
