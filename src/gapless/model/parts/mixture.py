"""A mixture of experts as a feed-forward part: a router, its experts, and one that every token shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gapless.model.parts import experts, feed_forward, router
from gapless.model.parts.experts import Experts
from gapless.model.parts.feed_forward import FeedForward, gap, plain_linear, tolerance
from gapless.model.parts.router import Router
from gapless.model.products.weight import Weight


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """``sum over chosen experts of weight * expert(x)``, plus ``sigmoid(shared_gate(x)) * shared(x)``.

    Attributes:
        shared: for every token; None for none.
        shared_gate: ``[1, H]``; None: the shared one counts whole.
    """

    router: Router
    experts: Experts
    shared: FeedForward | None
    shared_gate: Weight | None

    def routed(self, x: torch.Tensor) -> torch.Tensor:
        """The experts' part of ``x [T, H]``."""
        logits = functional.linear(x, self.router.weight.data, self.router.weight.bias)
        if x.device.type != "cuda":
            return experts.reference(x, self.experts, *self.router.choose(logits))
        from gapless.model.parts import experts_triton, router_triton

        return experts_triton.run(x, self.experts, *router_triton.choose(self.router, logits))


@torch.no_grad()
def recognise(module: nn.Module, at: str, watch: Any, x: torch.Tensor, y: torch.Tensor) -> Mixture | None:
    """The mixture that takes ``x`` to ``y``; None for one of another kind.

    Args:
        watch: a `gapless.model.watch.Watch` of the run in which it was seen.
    """
    held = [(m, found) for m in module.modules() if (found := experts.recognise(m)) is not None]
    if len(held) != 1:
        return None
    own, found = held[0]
    call = watch.of(own)
    given = [] if call is None else [t for t in call.options.values() if isinstance(t, torch.Tensor)]
    if len(given) < 3:
        return None
    chosen, weights = (t.reshape(-1, t.shape[-1]) for t in given[1:3])
    if chosen.is_floating_point() or chosen.shape != weights.shape or len(chosen) != len(x):
        return None
    shared, besides = None, {own}
    for name, child in module.named_children():
        seen = watch.of(child)
        if child is own or seen is None or name in {"gate", "router"}:
            continue
        if seen.x.numel() != x.numel() or seen.y.numel() != y.numel():
            continue
        part = feed_forward.recognise(child, f"{at}.{name}", seen.x.reshape(x.shape), seen.y.reshape(y.shape))
        if part is not None:
            if shared is not None:
                return None
            shared = part
            besides.add(child)
    gate = next((g for n in ("shared_expert_gate", "shared_experts_gate") if (g := plain_linear(module, n))), None)
    if gate is not None:
        besides.add(gate)
    route = router.recognise(module, besides, found.count, x, chosen, weights)
    if route is None:
        return None
    made = Mixture(route, found, shared, None if gate is None else Weight(gate.weight, gate.bias))
    total = experts.reference(x, found, *route.choose(functional.linear(x, route.weight.data, route.weight.bias)))
    if shared is not None:
        wide = functional.linear(x, shared.up.data, shared.up.bias)
        more = functional.linear(shared.gate(wide), shared.down.data, shared.down.bias)
        total = total + (more if gate is None else torch.sigmoid(gate(x)) * more)
    return made if gap(total, y) < tolerance(x.dtype) else None
