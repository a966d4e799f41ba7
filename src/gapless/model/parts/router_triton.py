# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Scores, the K largest of them, and their weights, in one kernel. Of equal scores the lower expert comes first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.model.parts.router import Router

SCORES = {"softmax": 0, "sigmoid": 1, "logits": 2}


@triton.jit
def _choose_kernel(
    logits_ptr, correction_ptr, chosen_ptr, weights_ptr, stride, scale, E: tl.constexpr, EP: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, SCORE: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    inside = e < E
    raw = tl.load(logits_ptr + token * stride + e, mask=inside, other=0.0)
    x = tl.where(inside, raw.to(tl.float32), -float("inf"))
    if SCORE == 0:
        up = tl.exp(x - tl.max(x, 0))
        score = up / tl.sum(up, 0)
    elif SCORE == 1:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        score = x
    choice = score
    if correction_ptr is not None:
        choice = score + tl.load(correction_ptr + e, mask=inside, other=0.0)
    choice = tl.where(inside, choice, -float("inf"))
    k = tl.arange(0, KP)
    best = tl.zeros((KP,), tl.int32)
    value = tl.zeros((KP,), tl.float32)
    for i in tl.static_range(K):
        top = tl.max(choice, 0)
        # A NaN equals nothing: then any expert is as good, and the row ends by what comes of it.
        at = tl.minimum(tl.min(tl.where(choice == top, e, EP), 0), E - 1)
        best = tl.where(k == i, at, best)
        value = tl.where(k == i, tl.sum(tl.where(e == at, score, 0.0), 0), value)
        choice = tl.where(e == at, -float("inf"), choice)
    real = k < K
    if SCORE == 2:
        up = tl.where(real, tl.exp(value - tl.max(tl.where(real, value, -float("inf")), 0)), 0.0)
        value = (up / tl.sum(up, 0)).to(logits_ptr.dtype.element_ty).to(tl.float32)
    if NORMED:
        value = value / tl.sum(tl.where(real, value, 0.0), 0)
    tl.store(chosen_ptr + token * K + k, best, mask=real)
    tl.store(weights_ptr + token * K + k, (value * scale).to(weights_ptr.dtype.element_ty), mask=real)


def choose(router: Router, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `gapless.model.parts.router.Router.choose`; experts are int32."""
    tokens, experts = logits.shape
    chosen = torch.empty((tokens, router.count), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, router.count), dtype=router.dtype, device=logits.device)
    if tokens:
        _choose_kernel[(tokens,)](
            logits, router.correction, chosen, weights, logits.stride(0), router.scale, E=experts,
            EP=triton.next_power_of_2(experts), K=router.count, KP=triton.next_power_of_2(router.count),
            SCORE=SCORES[router.score], NORMED=router.normed, num_warps=1 if experts <= 128 else 4,
        )  # fmt: skip
    return chosen, weights
