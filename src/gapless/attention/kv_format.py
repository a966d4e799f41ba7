"""How a layer's keys and values are kept: the dtype of the cache, and a scale for each KV head, or neither.

What is kept of a number x of head h is ``round(x / scale[h])`` in the cache's dtype, and what is read of it
``kept * scale[h]``. Readers never see x itself, not even in the step that writes it: else a token would be another one
after a chunk, a prefix hit or a preemption.

e4m3 has no infinity, so that what is beyond its largest number becomes that; NaN stays NaN.
`gapless.attention.kv_format_triton` is the same in kernels.

Shape legend: see `gapless.attention.context`. Scales are fp32 ``[2, HK]``, of keys and of values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gapless.cache.spec import KVSpec, LayerSpec

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max


def exact(dtype: torch.dtype, kv_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> bool:
    """Whether the cache gives back what it was given in ``dtype``, bit by bit and without a conversion."""
    return kv_scales is None and kv_cache.dtype == dtype


def encode(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """What is kept of ``x`` ``[..., HK, D]``; ``scale`` ``[HK]`` or None."""
    if scale is None and dtype != FLOAT8:
        return x.to(dtype)
    wide = x.float()
    if scale is not None:
        wide = wide / scale[:, None]
    if dtype == FLOAT8:
        wide = wide.clamp(-LARGEST, LARGEST)
    return wide.to(dtype)


def decode(kept: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """What ``kept`` ``[..., HK, D]`` stands for, in ``dtype``."""
    if scale is None:
        return kept.to(dtype)
    return (kept.to(torch.promote_types(dtype, torch.float32)) * scale[:, None]).to(dtype)


def put(flat: torch.Tensor, places: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    """Keep ``x`` ``[T, HK, D]`` at the ``places`` ``[T]`` of ``flat`` ``[N * B, HK, D]``. Capturable."""
    kept = encode(x, flat.dtype, scale)
    if flat.dtype == FLOAT8:  # torch has no index_copy_ for it
        flat, kept = flat.view(torch.uint8), kept.view(torch.uint8)
    flat.index_copy_(0, places, kept)


def kv_scales(specs: Sequence[LayerSpec], device: torch.device) -> tuple[torch.Tensor | None, ...]:
    """The scales of each layer, on the device. They never change; like weights they are no state of a step."""
    given = (spec.scales if isinstance(spec, KVSpec) else None for spec in specs)
    return tuple(None if s is None else torch.tensor(s, dtype=torch.float32, device=device) for s in given)


def scale_of(kv_scales: torch.Tensor | None, half: int) -> torch.Tensor | None:
    """``[HK]`` of keys (0) or values (1)."""
    return None if kv_scales is None else kv_scales[half]
