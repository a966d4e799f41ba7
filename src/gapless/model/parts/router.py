"""Routers of a mixture of experts: which experts a token gets, and with what weights.

Shape legend: T tokens, E experts, K experts a token, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from gapless.model.products.weight import Weight


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """From logits ``weight @ x`` to K experts and their weights.

    Attributes:
        weight: ``[E, H]``, with a bias or without.
        count: K.
        score: ``softmax`` or ``sigmoid`` of all logits in fp32; ``logits``: the K largest, and the softmax of these.
        correction: ``[E]``, added to the scores for the choice alone; None for none.
        normed: the chosen scores are divided by their sum.
        scale: of the weights, at the end.
        dtype: of the weights.
    """

    weight: Weight
    count: int
    score: str
    correction: torch.Tensor | None
    normed: bool
    scale: float
    dtype: torch.dtype

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts ``[T, K]``, the largest score first, and their weights ``[T, K]``: the definition."""
        if self.score == "logits":
            top, chosen = torch.topk(logits, self.count, -1)
            weights = functional.softmax(top, -1, dtype=torch.float32).to(logits.dtype).float()
        else:
            wide = logits.float()
            scores = wide.softmax(-1) if self.score == "softmax" else wide.sigmoid()
            chosen = torch.topk(scores if self.correction is None else scores + self.correction, self.count, -1)[1]
            weights = scores.gather(1, chosen)
        if self.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, (weights * self.scale).to(self.dtype)


@torch.no_grad()
def recognise(
    module: nn.Module,
    besides: set[nn.Module],
    experts: int,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> Router | None:
    """The router that takes ``x [T, H]`` to what was seen ``chosen`` with ``weights``, found by trying.

    Args:
        module: the whole mixture.
        besides: modules of it that belong to other parts.
    """
    others = {id(p) for other in besides for p in other.parameters()}
    own = [p for p in module.parameters() if id(p) not in others]
    matrices = [p for p in own if tuple(p.shape) == (experts, x.shape[-1])]
    if len(matrices) != 1 or matrices[0].dtype != x.dtype:
        return None
    named = [*module.named_parameters(), *module.named_buffers()]
    vectors = {name: p for name, p in named if tuple(p.squeeze().shape) == (experts,) and id(p) not in others}
    biases: list[torch.Tensor | None] = [None, *(p for name, p in vectors.items() if name.endswith("bias"))]
    for router in _forms(matrices[0], biases, chosen.shape[-1], module, weights):
        logits = functional.linear(x, router.weight.data, router.weight.bias)
        if _same(*router.choose(logits), chosen, weights):
            return router
    return None


def _forms(
    matrix: torch.Tensor, biases: list[torch.Tensor | None], count: int, module: nn.Module, weights: torch.Tensor
) -> Iterator[Router]:
    factors = {float(v) for m in module.modules() for n, v in vars(m).items() if "scal" in n and isinstance(v, float)}
    for scale in (1.0, *sorted(factors - {1.0})):
        for score in ("softmax", "sigmoid", "logits"):
            for normed in (False, True) if score != "logits" else (False,):
                for bias in biases:
                    for correction in biases if score != "logits" else [None]:
                        if bias is None or bias is not correction:
                            flat = None if correction is None else correction.reshape(-1).float()
                            weight = Weight(matrix, bias)
                            yield Router(weight, count, score, flat, normed, scale, weights.dtype)


def _same(ours: torch.Tensor, ours_w: torch.Tensor, theirs: torch.Tensor, theirs_w: torch.Tensor) -> bool:
    """The same experts with the same weights, in any order."""
    a, b = ours.sort(-1), theirs.sort(-1)
    if not torch.equal(a.values, b.values.to(a.values.dtype)):  # sync-ok: at load
        return False
    mine, other = ours_w.gather(1, a.indices).float(), theirs_w.gather(1, b.indices).float()
    return torch.allclose(mine, other, rtol=2e-2 if theirs_w.dtype != torch.float32 else 1e-4, atol=1e-6)
