"""What one layer keeps of the past. Plain data; no torch.

A layer's memory is of one of five kinds. The first four are *paged*: a token has a place in a block, found through the
block table of the layer's group (see `gapless.cache.groups`), so that prefix hits and rejected tokens need no further
care; a later write to the same position is all that a rollback takes.

    kind            spec          tensor                      a query at position p reads
    full attention  `KVSpec`      [2, N, B, HK, D]            [0, p + 1)
    sliding window  `KVSpec`      [2, N, B, HK, D]            [max(0, p + 1 - window), p + 1)
    convolution     `VectorSpec`  [N, B, width]               [max(0, p + 1 - window), p + 1)
    indexer keys    `VectorSpec`  [N, B, width]               [0, p + 1)
    recurrent       `StateSpec`   [R + 1, slots, *shape]      the state of its row; not paged

N blocks of B tokens, HK heads of D numbers, R rows. A short convolution over the last L inputs is a window of L whose
reader is not attention.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}

COMPUTE_DTYPES = ("float32", "float16", "bfloat16")
"""What a model may compute in."""

KV_FORMATS = {"fp8_e4m3": "float8_e4m3fn"}
"""Names of formats in which keys and values may be kept whatever the model's dtype, and their dtypes."""

Scales = tuple[tuple[float, ...], tuple[float, ...]]
"""Of a layer's keys and of its values, one for each KV head."""


class KVKind(enum.Enum):
    """See the module."""

    FULL = "full attention"
    WINDOW = "sliding window"
    CONVOLUTION = "convolution"
    INDEXER = "indexer keys"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of one layer's keys and values.

    ``window`` is the number of positions that a query sees, itself included (None: all of them). ``dtype`` is a
    torch dtype name without ``torch.``, ``scales`` what keys and values are divided by before they take it (None: by
    nothing); see `gapless.attention.kv_format`.
    """

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str
    window: int | None = None
    scales: Scales | None = None
    paged: ClassVar[bool] = True

    @property
    def kind(self) -> KVKind:
        """By the window."""
        return KVKind.FULL if self.window is None else KVKind.WINDOW

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this layer."""
        return self.num_kv_heads * (self.head_dim_k + self.head_dim_v) * DTYPE_BYTES[self.dtype]

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Of the layer's tensor: ``[2, N, B, HK, D]``, keys first."""
        return (2, num_blocks, block_size, self.num_kv_heads, self.head_dim_k)


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """One vector of ``width`` numbers for each token: the inputs of a short convolution, or the keys of an indexer.

    ``window`` and ``dtype`` as in `KVSpec`; with a window it is a convolution.
    """

    width: int
    dtype: str
    window: int | None = None
    paged: ClassVar[bool] = True

    @property
    def kind(self) -> KVKind:
        """By the window."""
        return KVKind.INDEXER if self.window is None else KVKind.CONVOLUTION

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this layer."""
        return self.width * DTYPE_BYTES[self.dtype]

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Of the layer's tensor: ``[N, B, width]``."""
        return (num_blocks, block_size, self.width)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of fixed size for each row, of which ``slots`` versions are kept.

    It cannot be cut at a position, so that a model with such a layer takes nothing from the prefix cache.
    """

    state: tuple[int, ...]
    dtype: str
    slots: int = 1
    window: ClassVar[None] = None
    paged: ClassVar[bool] = False
    kind: ClassVar[KVKind] = KVKind.RECURRENT
    bytes_per_token: ClassVar[int] = 0

    @property
    def bytes_per_row(self) -> int:
        """Bytes that one row takes in this layer."""
        return self.slots * math.prod(self.state) * DTYPE_BYTES[self.dtype]

    def shape(self, num_rows: int) -> tuple[int, ...]:
        """Of the layer's tensor: ``[R + 1, slots, *state]``."""
        return (num_rows, self.slots, *self.state)


LayerSpec = KVSpec | VectorSpec | StateSpec
"""Of any layer that keeps something."""


def kept_as(specs: Iterable[LayerSpec], kv_format: str) -> tuple[LayerSpec, ...]:
    """The same layers with keys and values in one of `KV_FORMATS`; convolutions, indexer keys and states stay."""
    dtype = KV_FORMATS[kv_format]
    return tuple(replace(spec, dtype=dtype) if isinstance(spec, KVSpec) else spec for spec in specs)


def format_key(specs: Iterable[LayerSpec]) -> bytes:
    """What tells a prefix in these formats from the same tokens in others; empty where all is in the model's dtype."""
    formats = [(spec.dtype, spec.scales) if isinstance(spec, KVSpec) else None for spec in specs]
    if not any(f is not None and (f[0] in KV_FORMATS.values() or f[1] is not None) for f in formats):
        return b""
    return hashlib.blake2b(repr(formats).encode(), digest_size=16, person=b"kv_format").digest()
