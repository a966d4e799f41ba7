"""Experts of a mixture: how their gates work, the definition of what they compute, and their place in a model.

A router chooses K of E experts for each token; this part begins where the choice is made. ``transformers`` keeps the
weights of a layer's experts in two stacked parameters, and marks such modules by attributes: ``has_gate``,
``has_bias``, ``is_transposed``, ``is_concatenated``. A module is recognised by these, and its gate by trying.

Shape legend: T tokens, K experts a token, E experts, H hidden size, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "relu")


@dataclass(frozen=True, slots=True)
class Gate:
    """What stands between the two products of an expert.

    ``(up + offset) * f(gate)`` with ``f(x) = x * sigmoid(alpha * x)`` for silu, the gate cut at ``limit`` and up at
    plus and minus ``limit``; without a gate ``f(up)``.

    Attributes:
        activation: one of `ACTIVATIONS`.
        gated: the first product has two halves.
        interleaved: gate and up alternate, instead of gate before up.
        limit: 0 for none.
    """

    activation: str
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float = 0.0
    offset: float = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., 2 F]`` (``[..., F]`` without a gate) to ``[..., F]``, rounded where the modules round."""
        if not self.gated:
            return activate(x, self.activation, self.alpha)
        gate, up = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, -1)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        gated = activate(gate, self.activation, self.alpha)
        return (up + self.offset) * gated if self.offset else gated * up


def activate(x: torch.Tensor, name: str, alpha: float = 1.0) -> torch.Tensor:
    """An activation by name; ``alpha`` is silu's."""
    if name == "silu":
        return functional.silu(x) if alpha == 1.0 else x * torch.sigmoid(x * alpha)
    if name == "relu2":
        return functional.relu(x).square()
    if name == "relu":
        return functional.relu(x)
    return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer.

    Attributes:
        up: ``[E, 2 F, H]`` (``[E, F, H]`` without a gate), or ``[E, H, 2 F]`` where ``transposed``.
        down: ``[E, H, F]``, or ``[E, F, H]`` where ``transposed``.
        up_bias, down_bias: ``[E, 2 F]`` and ``[E, H]``, or None.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    transposed: bool
    gate: Gate

    @property
    def count(self) -> int:
        """E."""
        return self.up.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.down.shape[2 if self.transposed else 1]

    @property
    def width(self) -> int:
        """F."""
        return self.down.shape[1 if self.transposed else 2]


def reference(x: torch.Tensor, experts: Experts, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The definition.

    Args:
        x: ``[T, H]``.
        chosen: ``[T, K]`` numbers of experts.
        weights: ``[T, K]``, of any floating type.

    Returns:
        ``[T, H]``: for each token the sum over its experts of weight times output, added in the order of ``chosen``
        in fp32, each term rounded to the wider type of weight and output first.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for k in range(chosen.shape[1]):
        up, down = experts.up[chosen[:, k]], experts.down[chosen[:, k]]
        if experts.transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        y = torch.bmm(up, x[:, :, None])[:, :, 0]
        if experts.up_bias is not None:
            y = y + experts.up_bias[chosen[:, k]]
        y = torch.bmm(down, experts.gate(y)[:, :, None])[:, :, 0]
        if experts.down_bias is not None:
            y = y + experts.down_bias[chosen[:, k]]
        total += (y * weights[:, k, None]).float()
    return total.to(x.dtype)


def recognise(module: nn.Module) -> Experts | None:
    """The experts that ``module`` holds, or None if it holds none, or some of another kind."""
    m: Any = module
    flags = [getattr(module, name, None) for name in ("has_gate", "has_bias", "is_transposed")]
    if any(not isinstance(flag, bool) for flag in flags) or getattr(module, "has_post_expert_norm", False):
        return None
    gated, bias, transposed = flags
    name = "gate_up_proj" if gated else "up_proj"
    names = [name, "down_proj", *([f"{name}_bias", "down_proj_bias"] if bias else [])]
    held = dict(module.named_parameters(recurse=False))
    if set(held) != set(names) or any(held[n].dim() != (2 if n.endswith("bias") else 3) for n in names):
        return None
    up, down = held[name], held["down_proj"]
    gate = _gate(m, bool(gated), down.shape[1 if transposed else 2])
    if gate is None:
        return None
    up_bias, down_bias = (held[f"{name}_bias"], held["down_proj_bias"]) if bias else (None, None)
    found = Experts(up, down, up_bias, down_bias, bool(transposed), gate)
    wide = (2 if gated else 1) * found.width
    shape = (found.count, found.hidden, wide) if transposed else (found.count, wide, found.hidden)
    return found if tuple(up.shape) == shape else None


def _gate(module: Any, gated: bool, width: int) -> Gate | None:
    """The form that gives what the module's own gate gives, on random numbers that reach beyond any limit."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    device = next(module.parameters()).device
    x = (8 * torch.randn(6, (2 if gated else 1) * width, generator=generator)).to(device)
    with torch.no_grad():
        theirs = module._apply_gate(x) if gated else module.act_fn(x)
    constants = {name: _number(module, name) for name in ("alpha", "limit", "swiglu_limit", "swiglu_alpha")}
    limits = {0.0, *(v for n, v in constants.items() if v and "limit" in n)}
    alphas = {1.0, *(v for n, v in constants.items() if v and "alpha" in n)}
    forms = [
        Gate(name, gated, interleaved, alpha, limit, offset)
        for limit in sorted(limits)
        for interleaved in ((False, True) if gated else (False,))
        for offset in ((0.0, 1.0) if gated else (0.0,))
        for name in ACTIVATIONS
        for alpha in (sorted(alphas) if name == "silu" else (1.0,))
    ]
    for form in forms:
        if torch.allclose(form(x), theirs, rtol=1e-5, atol=1e-5):  # sync-ok: at load
            return form
    return None


def _number(module: Any, name: str) -> float:
    value = getattr(module, name, None)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


def install(model: nn.Module, run: Callable[[torch.Tensor, Experts, torch.Tensor, torch.Tensor], torch.Tensor]) -> int:
    """Let the experts of a private copy be computed by ``run``; how many layers have such.

    Each is compared with the module's own forward on random tokens first; one that differs keeps its own.
    """
    done = 0
    for module in model.modules():
        found = recognise(module)
        if found is not None and _agrees(module, found, run):
            module.forward = _bound(found, run)
            done += 1
    return done


def _bound(
    experts: Experts, run: Callable[[torch.Tensor, Experts, torch.Tensor, torch.Tensor], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """A module's forward that knows the parameters and not the module, which would keep itself alive."""

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return run(flat, experts, top_k_index, top_k_weights).view_as(hidden_states)

    return forward


@torch.no_grad()
def _agrees(
    module: Any, experts: Experts, run: Callable[[torch.Tensor, Experts, torch.Tensor, torch.Tensor], torch.Tensor]
) -> bool:
    generator = torch.Generator(device="cpu").manual_seed(0)
    tokens, chosen = 5, min(2, experts.count)
    x = torch.randn(tokens, experts.hidden, generator=generator).to(experts.up.device, experts.up.dtype)
    which = torch.stack([torch.randperm(experts.count, generator=generator)[:chosen] for _ in range(tokens)])
    which, weights = which.to(x.device), torch.rand(tokens, chosen, generator=generator).to(x.device, x.dtype)
    theirs = module(x, which, weights).float()
    ours = run(x, experts, which, weights).float()
    tolerance = 1e-4 if x.dtype == torch.float32 else 3e-2
    scale = theirs.square().mean().sqrt()
    return bool((ours - theirs).abs().max() <= tolerance * max(float(scale), 1e-6) * 4)  # sync-ok: at load
