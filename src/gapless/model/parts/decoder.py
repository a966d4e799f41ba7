"""A decoder as parts. See docs/architecture.md, "A description of a decoder"."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from gapless.model.embedding import override
from gapless.model.parts.attention import Attention
from gapless.model.parts.feed_forward import FeedForward, Module
from gapless.model.parts.mixture import Mixture
from gapless.model.parts.norm import Norm
from gapless.model.products.weight import Weight


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Rows of ``table [V, H]``, times ``scale``; embeddings that stand for ids are taken times ``given``."""

    table: torch.Tensor
    scale: float = 1.0
    given: float = 1.0

    def __call__(self, ids: torch.Tensor, overrides: torch.Tensor | None) -> torch.Tensor:
        """``[T, H]`` of ids ``[T]``; for ``overrides`` ``[E, H]`` see `gapless.model.embedding`."""
        rows = functional.embedding(ids if overrides is None else ids.clamp(min=0), self.table)
        if self.scale != 1.0:
            rows = rows * self.scale
        return rows if overrides is None else override(rows, ids, overrides, self.given)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Logits: ``softcap * tanh(scale * (weight @ x) / softcap)``; 0 for no soft cap."""

    weight: Weight
    scale: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Two parts between the residual stream and itself.

        r1 = r + multiplier * after_attention(attention(before_attention(r)))
        r2 = r1 + multiplier * after_mlp(mlp(before_mlp(r1)))

    A norm that is None is left out. In a ``parallel`` layer the second part reads r as well, and
    r2 = r + attention(...) + mlp(...).
    """

    before_attention: Norm | None
    attention: Attention
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: FeedForward | Mixture | Module
    after_mlp: Norm | None
    multiplier: float = 1.0
    parallel: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """Embedding, layers, norm, head."""

    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Head
