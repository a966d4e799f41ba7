"""A few tokens through a model by its own modules, watched: what each module was given and what it gave.

From that a decoder is described (`gapless.model.describe`): what feeds what is seen, not guessed from names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from gapless.model import checks

NAME = "gapless_watch"
TOKENS = 7


@dataclass(slots=True)
class Call:
    """Of one module: its first tensor, its other arguments, and its first result; ``[T, ...]``."""

    x: torch.Tensor
    options: dict[str, Any]
    y: torch.Tensor


@dataclass(slots=True)
class Heads:
    """What an attention module attended with: ``q [T, HQ, D]``, ``k, v [T, HK, D]``; and the result ``[T, HQ * D]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


@dataclass(slots=True)
class Watch:
    """By ``id`` of the module; only of modules that ran exactly once are the calls of use."""

    ids: torch.Tensor
    calls: dict[int, list[Call]] = field(default_factory=dict)
    heads: dict[int, Heads] = field(default_factory=dict)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def of(self, module: nn.Module) -> Call | None:
        """The one call of a module."""
        calls = self.calls.get(id(module), [])
        return calls[0] if len(calls) == 1 else None


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *unused: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Notes what it is given. What it gives is causal attention of some scale: any function would do."""
    watch = options.get("gapless_step")
    groups = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, k, v, is_causal=True).transpose(1, 2)
    if isinstance(watch, Watch):
        q, k, v = (x[0].transpose(0, 1).clone() for x in (query, key, value))
        watch.heads[id(module)] = Heads(q, k, v, out[0].flatten(1).clone())
    return out, None


AttentionInterface.register(NAME, _attention)


def watch(model: PreTrainedModel, attention_name: str) -> Watch:
    """Run a private copy; it is left with the attention ``attention_name``."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.get_input_embeddings().weight.shape[0], (TOKENS,), generator=generator).to(device)
    seen = Watch(ids)

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = [*args, *kwargs.values()]
        x = next((a for a in given if isinstance(a, torch.Tensor)), None)
        y = output[0] if isinstance(output, tuple) else output
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            options = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
            seen.calls.setdefault(id(module), []).append(Call(_flat(x), options, _flat(y)))

    handles = [m.register_forward_hook(note, with_kwargs=True) for m in model.modules() if m is not model]
    checks.set_attention(model, NAME)
    try:
        with torch.no_grad():
            output = model(
                input_ids=ids[None], position_ids=torch.arange(TOKENS, device=device)[None], attention_mask=None,
                use_cache=False, gapless_step=seen,
            )  # fmt: skip
    finally:
        checks.set_attention(model, attention_name)
        for handle in handles:
            handle.remove()
    seen.logits = output.logits[0]
    return seen


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Without the batch; a copy, since modules may write in place."""
    return x[0].clone() if x.dim() > 2 and x.shape[0] == 1 else x.clone()
