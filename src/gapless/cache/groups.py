"""Groups: layers that keep the same positions share a block table, a slot mapping and a block pool.

What a table says depends on nothing but how long a block is needed. So a group is named by its window, None for the
layers that need everything; kinds and widths of its layers may differ, as each layer has a tensor of its own and a
block number means the same place in all of them. The group without a window comes first, then windows in rising order.

A window group frees blocks that no later step reads. The table place of such a block is the null block from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gapless.cache.spec import LayerSpec

Windows = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """``layers`` are indices of the model's specs; ``bytes_per_token`` is the sum over them."""

    window: int | None
    layers: tuple[int, ...]
    bytes_per_token: int


def group_windows(specs: Sequence[LayerSpec], max_model_len: int | None = None) -> Windows:
    """The groups of a model; at least one.

    A window that no request of ``max_model_len`` tokens can leave is none.
    """
    found = {spec.window for spec in specs if spec.paged}
    windows = {w for w in found if w is not None and (max_model_len is None or w < max_model_len)}
    everything: Windows = (None,) if len(windows) < len(found) or not found else ()
    return (*everything, *sorted(windows))


def group_of(window: int | None, windows: Windows) -> int:
    """The group of a layer with this window: its own, or the one that keeps everything.

    Raises:
        ValueError: there is neither.
    """
    for wanted in (window, None):
        if wanted in windows:
            return windows.index(wanted)
    raise ValueError(f"a layer with the window {window} fits in none of the groups with the windows {windows}")


def kv_groups(specs: Sequence[LayerSpec], windows: Windows) -> tuple[KVGroup, ...]:
    """The groups ``windows`` with the layers of ``specs``; layers that are not paged are in none."""
    layers: list[list[int]] = [[] for _ in windows]
    for i, spec in enumerate(specs):
        if spec.paged:
            layers[group_of(spec.window, windows)].append(i)
    sums = [sum(specs[i].bytes_per_token for i in members) for members in layers]
    return tuple(KVGroup(w, tuple(m), size) for w, m, size in zip(windows, layers, sums, strict=True))


def blocks_spanned(window: int, new: int, block_size: int) -> int:
    """Most blocks that a row needs at once to compute ``new`` tokens: theirs, and the window before the first."""
    return -(-(window - 2 + new) // block_size) + 1


def longest_chunk(window: int, capacity: int, block_size: int) -> int:
    """Most tokens for which `blocks_spanned` is at most ``capacity``; below 1 if there are none."""
    return (capacity - 1) * block_size - window + 2
