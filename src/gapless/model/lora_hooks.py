"""Adapters on the modules of a plain ``transformers`` model, found by what they do and not by their names.

A linear layer can have an adapter if it maps each token of a step to one output, in order and once: then x and y are
``[T, ...]`` and the slots of the tokens apply. That is tried, with two short runs that differ in the last token only.
What runs on some of the tokens, or in another order, as experts do, cannot; nor can the head, which sees the ends of
the sequences only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from gapless.model.products.cpu_linear import FewRowsLinear

_TOKENS = 7
"""Of the trial. No size in a model is likely to be the same."""

Add = Callable[[int, torch.Tensor, torch.Tensor], None]


def token_linears(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """Linear layers of ``model``, a private copy that can run by itself, that can have an adapter; with their names."""
    head = model.get_output_embeddings()
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, FewRowsLinear) and isinstance(module, nn.Linear) and module is not head
    ]
    first, second = (_inputs(model, found, last) for last in (1, 2))
    return [(name, module) for name, module in found if _tokenwise(first[name], second[name])]


def _inputs(model: PreTrainedModel, linears: list[tuple[str, nn.Linear]], last: int) -> dict[str, list[torch.Tensor]]:
    seen: dict[str, list[torch.Tensor]] = {name: [] for name, _ in linears}

    def keep(name: str) -> Any:
        return lambda module, inputs: seen[name].append(inputs[0].detach())

    handles = [module.register_forward_pre_hook(keep(name)) for name, module in linears]
    try:
        device = next(model.parameters()).device
        ids = torch.tensor([[3, 4, 5, 6, 7, 8, last]], device=device) % model.config.vocab_size
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _tokenwise(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """One call, of all tokens in order: only the last of them, which is another one, has another input."""
    if len(first) != 1 or len(second) != 1:
        return False
    a, b = first[0], second[0]
    if a.shape != b.shape or a.dim() != 3 or a.shape[:2] != (1, _TOKENS):
        return False
    same = torch.isclose(a[0].float(), b[0].float(), rtol=1e-2, atol=1e-4).all(-1).tolist()  # sync-ok: at load
    return all(same[:-1]) and not same[-1]


def attach(linears: list[tuple[str, nn.Linear]], add: Add) -> list[Any]:
    """After each run of linear layer i, ``add(i, x [T, K], y [T, N])``; returns handles to remove that again."""

    def hook(index: int) -> Any:
        def run(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            add(index, inputs[0].flatten(0, -2), output.view(-1, output.shape[-1]))

        return run

    return [module.register_forward_hook(hook(i)) for i, (_, module) in enumerate(linears)]
