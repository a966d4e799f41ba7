"""The block pool against a model of it, and its integrity check against corruption."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gapless.batch.row_layout import NULL_BLOCK
from gapless.cache.block_pool import ROOT, BlockPool, block_keys


def tokens(i: int) -> np.ndarray:
    return np.full(8, i, np.int32)


def block_key(parent: bytes, content: np.ndarray, extra: bytes = b"") -> bytes:
    return block_keys(parent, [content.tobytes()], extra)[0]


def publish(pool: BlockPool, block: int, key: bytes, content: np.ndarray) -> None:
    pool.publish([block], [key], [content.tobytes()])


class PoolMachine(RuleBasedStateMachine):
    """Owners take, share, publish and give back blocks; the pool must always add up."""

    @initialize(size=st.integers(2, 12))
    def make(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.owned: list[list[int]] = []
        self.published: dict[int, int] = {}

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        available = self.pool.available
        blocks = self.pool.allocate(count)
        if count > available:
            assert blocks is None
            assert self.pool.available == available
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        assert NULL_BLOCK not in blocks
        assert not set(blocks) & {b for owner in self.owned for b in owner}
        self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data(), content=st.integers(0, 5))
    def publish(self, data: st.DataObject, content: int) -> None:
        block = data.draw(st.sampled_from([b for owner in self.owned for b in owner]))
        publish(self.pool, block, block_key(ROOT, tokens(content)), tokens(content))

    @rule(content=st.integers(0, 5))
    def share(self, content: int) -> None:
        block = self.pool.lookup(block_key(ROOT, tokens(content)), tokens(content).tobytes())
        if block is not None:
            self.pool.acquire(block)
            self.owned.append([block])

    @rule()
    def forget(self) -> None:
        self.pool.unpublish_all()
        assert self.pool.num_published == 0

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "pool"):
            owned = [b for owner in self.owned for b in owner]
            self.pool.check(owned)
            assert self.pool.available == self.pool.capacity - len(set(owned))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks is not None
    keys = []
    for i, block in enumerate(blocks):
        keys.append(block_key(keys[-1] if keys else ROOT, tokens(i)))
        publish(pool, block, keys[-1], tokens(i))
    pool.release(blocks)
    pool.allocate(1)
    assert [pool.lookup(k, tokens(i).tobytes()) is not None for i, k in enumerate(keys)] == [True, True, False]


def test_a_lookup_compares_tokens_and_keys_differ_by_parent_and_salt() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1) or []
    key = block_key(ROOT, tokens(1))
    publish(pool, block, key, tokens(1))
    assert pool.lookup(key, tokens(2).tobytes()) is None
    assert len({key, block_key(key, tokens(1)), block_key(ROOT, tokens(1), b"tenant"), block_key(ROOT, tokens(2))}) == 4


@given(st.integers(-3, 1))
def test_a_pool_needs_two_blocks(size: int) -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(size)


@pytest.mark.parametrize("damage", ["lost", "twice", "refs", "null"])
def test_the_check_finds_damage(damage: str) -> None:
    pool = BlockPool(5)
    owned = pool.allocate(2) or []
    if damage == "lost":
        pool._free.pop()
    elif damage == "twice":
        pool._free.append(owned[0])
    elif damage == "refs":
        pool._refs[owned[0]] += 1
    else:
        pool._free.append(NULL_BLOCK)
    with pytest.raises(RuntimeError):
        pool.check(owned)


def test_releasing_what_nobody_owns_is_an_error() -> None:
    pool = BlockPool(3)
    with pytest.raises(RuntimeError, match="nobody owns"):
        pool.release([1])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.sampled_from([b"", b"salt", b"long" * 40]), st.data())
def test_keys_of_blocks_at_once_are_those_of_each_alone(
    contents: list[int], extra: bytes, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(contents)))
    alone = []
    for i in contents:
        alone.append(block_key(alone[-1] if alone else ROOT, tokens(i), extra))
    held = [tokens(i).tobytes() for i in contents]
    first = block_keys(ROOT, held[:cut], extra)
    assert first + block_keys(first[-1] if first else ROOT, held[cut:], extra) == alone


def test_publishing_many_skips_the_null_block() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2) or []
    held = [tokens(i).tobytes() for i in range(3)]
    keys = block_keys(ROOT, held)
    pool.publish([blocks[0], NULL_BLOCK, blocks[1]], keys, held)
    assert [pool.lookup(key, tokens(i).tobytes()) for i, key in enumerate(keys)] == [blocks[0], None, blocks[1]]
    pool.check(blocks)
