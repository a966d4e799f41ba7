"""Feed-forward parts: one or two products up, an activation, one product down; and modules of no known kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gapless.model.parts.experts import ACTIVATIONS, Gate
from gapless.model.products.cpu_linear import FewRowsLinear
from gapless.model.products.weight import Weight, merge

GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
MERGED = (("gate_up_proj", "down_proj"),)
PLAIN = (("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj"), ("dense_h_to_4h", "dense_4h_to_h"),
         ("fc_in", "fc_out"))  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """``down(gate(up(x)))``; up holds gate and up where there is a gate."""

    up: Weight
    down: Weight
    gate: Gate


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """What no kind fits, run as it is: ``[1, T, H]`` to the same, each token alone."""

    module: nn.Module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` to ``[T, H]``."""
        out: Any = self.module(x[None])
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first.reshape(x.shape)


def plain_linear(module: nn.Module, name: str) -> nn.Linear | None:
    """The child ``name``, if it is a linear layer of the plain kind."""
    child = getattr(module, name, None)
    plain = type(child) in (nn.Linear, FewRowsLinear)
    return child if plain and isinstance(child, nn.Linear) else None


def recognise(module: nn.Module, at: str, x: torch.Tensor, y: torch.Tensor) -> FeedForward | None:
    """The part that takes ``x`` to ``y``, found by names of linear layers and by trying activations."""
    linears = {name for name, child in module.named_children() if isinstance(child, nn.Linear)}
    others = [child for name, child in module.named_children() if name not in linears]
    if any(next(child.parameters(), None) is not None for child in others):
        return None
    for names, halves in [*((n, 2) for n in GATED), *((n, 1) for n in MERGED), *((n, 0) for n in PLAIN)]:
        if set(names) != linears:
            continue
        found = [plain_linear(module, name) for name in names]
        if any(linear is None for linear in found):
            continue
        *ups, down = [linear for linear in found if linear is not None]
        if len({linear.bias is None for linear in ups}) > 1:
            continue
        gates = [Gate(activation, gated=halves > 0) for activation in ACTIVATIONS]
        gaps = [_gap(ups, down, gate, x, y) for gate in gates]
        best = min(range(len(gates)), key=gaps.__getitem__)  # the right one rounds as the module does
        if gaps[best] < tolerance(x.dtype):
            prefix = [f"{at}.{name}" for name in names]
            return FeedForward(merge(ups, prefix[:-1]), merge([down], prefix[-1:]), gates[best])
    return None


@torch.no_grad()
def _gap(ups: list[nn.Linear], down: nn.Linear, gate: Gate, x: torch.Tensor, y: torch.Tensor) -> float:
    wide = torch.cat([functional.linear(x, linear.weight, linear.bias) for linear in ups], -1)
    return gap(functional.linear(gate(wide), down.weight, down.bias), y)


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative difference in the 2-norm; infinite for another shape."""
    if ours.shape != theirs.shape:
        return float("inf")
    difference = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-12)
    return float(difference)  # sync-ok: at load


def tolerance(dtype: torch.dtype) -> float:
    """Of `gap`, for one part: rounding, and no more."""
    return 1e-4 if dtype == torch.float32 else 2e-2
