"""The products of adapters in plain torch: what the CPU runs, and what the kernels must equal.

For each adapter of the step one product over all of its tokens, with the other tokens' part set to zero before B. So
what is added to a token depends on its own x and adapter and on the number of tokens, and not on which adapters its
neighbours have; the shapes of the products do not change with the mix. It costs the low-rank products once per adapter
in the step, which is little beside the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gapless.attention.context import AttentionContext
from gapless.lora.bank import SiteWeights


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """``slots`` int ``[T]``; for each adapter of the step its slot and the mask ``[T, 1]`` of the other tokens."""

    slots: torch.Tensor
    others: list[tuple[int, torch.Tensor]]


def slots_of_tokens(context: AttentionContext, count: int) -> torch.Tensor:
    """Slot of each of ``count`` tokens, int32 ``[T]``; 0 for padding."""
    assert context.row_loras is not None
    loc = context.query_start_loc
    t = torch.arange(count, dtype=loc.dtype, device=loc.device)
    sequence = torch.searchsorted(loc[1:], t, right=True).clamp_(max=len(context.rows) - 1)
    slots = context.row_loras[context.rows[sequence].long()]
    return torch.where(t < loc[-1], slots, 0)


def token_slots(context: AttentionContext, count: int) -> TokenSlots:
    """See `gapless.lora.bank.AdapterBank.tokens`."""
    slots = slots_of_tokens(context, count)
    present = [s for s in torch.unique(slots).tolist() if s]  # sync-ok: the reference runs on a CPU only
    return TokenSlots(slots, [(s, (slots != s)[:, None]) for s in present])


def add(x: torch.Tensor, y: torch.Tensor, weights: SiteWeights, tokens: TokenSlots) -> None:
    """See `gapless.lora.bank.AdapterBank.add`."""
    rank = weights.b.shape[2]
    for slot, others in tokens.others:
        low = (x @ weights.a[slot].t()).masked_fill_(others, 0)
        first = 0
        for p, end in enumerate(weights.ends):
            y[:, first:end].addmm_(low[:, p * rank : (p + 1) * rank], weights.b[slot, first:end].t())
            first = end
