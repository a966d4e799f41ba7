"""How many blocks each group gets. Pure arithmetic.

Layers that keep everything take what is there. Layers with a window need little: the windows of `max_num_seqs` rows,
the tokens of one step, and as many windows again as rows for prefixes that may come back. They get this, but

    at most half of the memory   requests that are shorter than the window would otherwise pay for ones that are not
    no more blocks than the layers that keep everything have: no row holds more of the one than of the other

With a pool that is smaller than all rows' windows, fewer rows run at once; each can finish that
`BlockTables.refuse_what_never_fits` lets in.
"""

from __future__ import annotations

from collections.abc import Sequence

from gapless.cache.groups import KVGroup, blocks_spanned


def window_blocks(window: int, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> int:
    """Blocks that a group with this window can use well, the null block among them."""
    return 2 * max_num_seqs * blocks_spanned(window, 1, block_size) + -(-max_num_batched_tokens // block_size) + 1


def split_memory(
    groups: Sequence[KVGroup],
    budget: int,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    most: int,
) -> tuple[int, ...]:
    """Blocks of each group, null blocks among them, that take at most ``budget`` bytes together.

    ``most`` is the largest number that is of use: all rows at full length. A group may come out with fewer than two
    blocks, and cannot work then.
    """
    sizes = [block_size * group.bytes_per_token for group in groups]
    wanted = [_wanted(group, max_num_seqs, max_num_batched_tokens, block_size, most) for group in groups]
    windows = [i for i, group in enumerate(groups) if group.window is not None]
    need = sum(sizes[i] * wanted[i] for i in windows)
    alone = len(windows) == len(groups)
    share = budget if alone else min(need, budget // 2)
    counts = [0] * len(groups)
    for i in windows:  # in proportion to their need, beyond it if nothing else wants the memory
        counts[i] = most if need == 0 else min(wanted[i] * share // need, most)
    if not alone:
        rest = budget - sum(sizes[i] * counts[i] for i in windows)
        counts[0] = most if sizes[0] == 0 else min(rest // sizes[0], most)
        for i in windows:
            counts[i] = min(counts[i], counts[0])
    return tuple(counts)


def given_blocks(
    groups: Sequence[KVGroup],
    num_blocks: int,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
) -> tuple[int, ...]:
    """Blocks of each group if the one that keeps everything, or each if there is none, is to have ``num_blocks``."""
    if groups[0].window is not None:
        return (num_blocks,) * len(groups)
    return tuple(_wanted(g, max_num_seqs, max_num_batched_tokens, block_size, num_blocks) for g in groups)


def _wanted(group: KVGroup, max_num_seqs: int, max_num_batched_tokens: int, block_size: int, most: int) -> int:
    if group.window is None:
        return most
    return min(window_blocks(group.window, max_num_seqs, max_num_batched_tokens, block_size), most)
