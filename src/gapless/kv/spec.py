"""KVSpec: what one layer stores for each token. Plain data; no torch."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of one layer's keys and values.

    ``window`` is the number of positions that a query sees, itself included (None: all of them). ``dtype`` is a
    torch dtype name without ``torch.``.
    """

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this layer."""
        return self.num_kv_heads * (self.head_dim_k + self.head_dim_v) * DTYPE_BYTES[self.dtype]
