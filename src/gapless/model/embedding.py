"""Embeddings in place of ids: rows of a table that requests fill, for tokens that have none.

An id ``-1 - r`` is row r of the table. An engine that takes no such requests has no table, and computes as ever.
"""

from __future__ import annotations

import torch


def override(embedded: torch.Tensor, ids: torch.Tensor, overrides: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``embedded`` ``[T, H]`` of ids ``[T]``, with rows of ``overrides`` ``[E, H]``, times ``scale``, where an id is
    negative. Capturable."""
    rows = overrides.index_select(0, (-1 - ids).clamp(min=0))
    if scale != 1.0:
        rows = rows * scale
    return torch.where((ids < 0)[:, None], rows, embedded)
