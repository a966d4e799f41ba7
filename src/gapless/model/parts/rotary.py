"""Rotary position embeddings as tables: which dimensions turn together, and by which angles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """The first R dimensions of each head turn.

    Attributes:
        cos, sin: ``[positions, R]``, both halves equal; dimension j of the first half turns with j + R / 2, or, in
            ``pairs``, dimension 2 j with 2 j + 1.
        pairs: see there.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    pairs: bool = False


def tables(model: nn.Module, seen: tuple[torch.Tensor, torch.Tensor], like: torch.Tensor, count: int) -> Rotary | None:
    """The whole tables whose first positions a layer was ``seen`` to be given; None if no module makes them.

    A module that makes them may want to know the kind of layer.
    """
    config: Any = getattr(model, "config", None)
    kinds = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()})
    positions = torch.arange(count, device=like.device)[None]
    cos, sin = (t[0] if t.dim() == 3 else t for t in seen)
    for module in model.modules():
        if "otary" not in type(module).__name__ or any(True for _ in module.parameters()):
            continue
        for more in ((), *((kind,) for kind in kinds)):
            try:
                with torch.no_grad():
                    made: Any = module(like[:1, None], positions, *more)
            except Exception:  # it takes no kind of layer, or not this one
                continue
            if not (isinstance(made, tuple) and len(made) == 2):
                continue
            whole_cos, whole_sin = (t[0] if t.dim() == 3 else t for t in made)
            rows = len(cos)
            same = whole_cos.shape == (count, cos.shape[-1]) and count >= rows
            if same and torch.equal(whole_cos[:rows], cos) and torch.equal(whole_sin[:rows], sin):
                return _halves(whole_cos, whole_sin)
    return None


def _halves(cos: torch.Tensor, sin: torch.Tensor) -> Rotary:
    """With both halves equal; a table in which neighbours are equal says that pairs turn."""
    half = cos.shape[-1] // 2
    if torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:]):
        return Rotary(cos.contiguous(), sin.contiguous())
    if torch.equal(cos[:, ::2], cos[:, 1::2]) and torch.equal(sin[:, ::2], sin[:, 1::2]):
        return Rotary(cos[:, ::2].repeat(1, 2).contiguous(), sin[:, ::2].repeat(1, 2).contiguous(), pairs=True)
    return Rotary(cos.repeat(1, 2), sin.repeat(1, 2))  # each angle once


def forms(rotary: Rotary | None, count: int, size: int, like: torch.Tensor) -> list[Rotary]:
    """What a layer may make of the tables that it is given: halves, pairs, or nothing."""
    still = Rotary(
        torch.ones(count, 2, device=like.device, dtype=like.dtype),
        torch.zeros(count, 2, device=like.device, dtype=like.dtype),
    )
    if rotary is None or rotary.cos.shape[1] > size:
        return [still]
    other = Rotary(rotary.cos, rotary.sin, not rotary.pairs)
    return [rotary, other, still]
