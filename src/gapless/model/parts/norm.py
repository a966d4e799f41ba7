"""Norms: root mean square in three roundings, and layer norms."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gapless.model.ops import reference


class Scaling(enum.IntEnum):
    """How a root-mean-square norm applies its weight; the value is what kernels take."""

    NARROW = 0  # after rounding: weight * normed (Llama)
    OFFSET = 1  # before rounding, stored minus one: normed * (1 + weight) (Gemma)
    WIDE = 2  # before rounding: normed * weight (OLMo 2)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Over the last dimension.

    Attributes:
        kind: ``rms`` or ``layer``.
        weight, bias: ``[H]``; of a layer norm either may be missing.
        scaling: of ``rms``.
    """

    kind: str
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    scaling: Scaling = Scaling.NARROW

    @property
    def size(self) -> int:
        """H; 0 for a norm without a weight."""
        return 0 if self.weight is None else self.weight.numel()

    def __call__(self, x: torch.Tensor, ops: Any = reference) -> torch.Tensor:
        """The norm of ``x``, by the operations of a device."""
        if self.kind == "rms":
            out: torch.Tensor = ops.rms_norm(x, self.weight, self.eps, self.scaling)
            return out
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        return functional.layer_norm(x.float(), x.shape[-1:], weight, bias, self.eps).to(x.dtype)


def recognise(module: nn.Module, size: int) -> Norm | None:
    """The norm that ``module`` is, found by trying; None for none of the known kinds."""
    held = dict(module.named_parameters(recurse=False))
    named = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    eps = next((value for value in named if isinstance(value, float)), 1e-5)
    if next(module.children(), None) is not None or not set(held) <= {"weight", "bias"}:
        return None
    weight, bias = held.get("weight"), held.get("bias")
    if any(p is not None and tuple(p.shape) != (size,) for p in (weight, bias)):
        return None
    like = torch.empty(0) if weight is None else weight  # without parameters nothing says where it runs
    generator = torch.Generator(device="cpu").manual_seed(0)
    x = torch.randn(7, size, generator=generator).to(like.device, like.dtype)
    # Small values too, where eps counts; and a mean, which a root mean square leaves in.
    x = x * torch.tensor([1.0, 3.0, 0.1, 1e-2, 1e-3, 1.0, 1.0], device=x.device)[:, None].to(x.dtype)
    x[5] += 2
    with torch.no_grad():
        theirs: Any = module(x)
    kinds = [] if weight is None or bias is not None else [Norm("rms", weight, None, eps, s) for s in Scaling]
    found: list[tuple[float, int, Norm]] = []
    for i, norm in enumerate([*kinds, Norm("layer", weight, bias, eps)]):
        gap = float((norm(x).float() - theirs.float()).abs().max())  # sync-ok: at load
        if torch.allclose(norm(x).float(), theirs.float(), rtol=2e-2 if x.dtype != torch.float32 else 1e-4, atol=1e-4):
            found.append((gap, i, norm))
    return min(found, key=lambda item: item[:2])[2] if found else None
