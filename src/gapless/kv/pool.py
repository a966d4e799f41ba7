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
from dataclasses import dataclass

import numpy as np

from gapless.plan import I32, NULL_BLOCK

ROOT = b""


def block_key(parent: bytes, tokens: I32, extra: bytes = b"") -> bytes:
    """Hash of one full block whose predecessor hashes to ``parent`` (`ROOT` for the first).

    Blocks of equal tokens with another ``extra`` hash differently. All of it counts, however long it is.
    """
    if len(extra) > hashlib.blake2b.MAX_KEY_SIZE:
        extra = hashlib.blake2b(extra).digest()
    digest = hashlib.blake2b(parent, digest_size=16, key=extra)
    digest.update(tokens.tobytes())
    return digest.digest()


@dataclass(slots=True)
class _Published:
    key: bytes
    tokens: bytes


class BlockPool:
    """``num_blocks`` blocks, block 0 being the null block that nobody owns."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} is not allowed: the null block and at least one more are needed")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._published: dict[int, _Published] = {}
        self._by_key: dict[bytes, int] = {}

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
        return len(self._published)

    def count_idle(self, blocks: list[int]) -> int:
        """How many of these blocks nobody owns."""
        return sum(self._refs[block] == 0 for block in blocks)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None, and then nothing has changed."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self.unpublish(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, block: int) -> None:
        """One more owner of a published block."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One owner less of each. Given in table order; the tail of a prefix is evicted before its head."""
        for block in reversed(blocks):
            if self._refs[block] <= 0:
                raise RuntimeError(f"block {block} is released but nobody owns it")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._published:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int, key: bytes, tokens: I32) -> None:
        """Let later lookups find an owned block. A key that is known already keeps its first block."""
        if key not in self._by_key and block not in self._published:
            self._by_key[key] = block
            self._published[block] = _Published(key, tokens.tobytes())

    def unpublish(self, block: int) -> None:
        """Later lookups do not find this block; its owners keep it."""
        entry = self._published.pop(block, None)
        if entry is not None:
            del self._by_key[entry.key]
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
        for block in list(self._published):
            self.unpublish(block)

    def lookup(self, key: bytes, tokens: I32) -> int | None:
        """The block that holds these tokens after that prefix, if there is one."""
        block = self._by_key.get(key)
        if block is None or self._published[block].tokens != tokens.tobytes():
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
        if {self._by_key[e.key] for e in self._published.values()} != set(self._published):
            raise RuntimeError("the prefix index and the published blocks disagree")
