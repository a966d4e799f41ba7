"""Per-layer embeddings of Qwen4-Exp (PLE): a hashed memory of n-grams.

For each order n = 2 .. N the last n tokens are hashed with odd 64-bit multipliers and xor, once for each head modulo
a prime of its own; the results name rows of one large embedding. The context of a token is read from the token table,
which holds the whole past of each row on the device, so there is no state to keep, and none to roll back.

A context never crosses an end-of-sequence token: where one lies between a token and its n-th predecessor, and before
the start of the request, the end-of-sequence id stands in place of the predecessor.

Shape legend: T tokens of the step, R rows, L positions of a row, N the longest n-gram, H heads of all orders together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class NGramHash:
    """Constants of one layer's hash.

    Attributes:
        size: N.
        eos_token_id: ends a context, and stands for what lies beyond it.
        multipliers: int64 ``[N]``, for the token itself, its predecessor, and so on.
        moduli: int64 ``[H]``, heads of order 2 first.
        offsets: int64 ``[H]``, first row of each head in the embedding.
    """

    size: int
    eos_token_id: int
    multipliers: torch.Tensor
    moduli: torch.Tensor
    offsets: torch.Tensor


def contexts(
    token_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, size: int, eos_token_id: int
) -> torch.Tensor:
    """int64 ``[T, size]``: each token and its predecessors, as a hash of n-grams sees them.

    Args:
        token_table: int32 ``[R, L]``; the step's own tokens are in it already.
        rows, positions: int64 ``[T]``.
        size: how many ids for each token.
        eos_token_id: see the module.
    """
    back = torch.arange(size, device=positions.device)
    at = positions[:, None] - back
    tokens = token_table[rows[:, None], at.clamp_min(0)].long()
    # A predecessor is out of reach if it, or one nearer than it, is an end of sequence; the token itself is none.
    ended = (tokens == eos_token_id) | (at < 0)
    ended[:, 0] = False
    return torch.where(ended.cumsum(1) > 0, eos_token_id, tokens)


def ngram_ids(token_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, spec: NGramHash) -> torch.Tensor:
    """int64 ``[T, H]``: which rows of the embedding each token takes. Arguments as of `contexts`."""
    mixed = contexts(token_table, rows, positions, spec.size, spec.eos_token_id) * spec.multipliers
    orders, running = [], mixed[:, 0]
    for n in range(1, spec.size):
        running = torch.bitwise_xor(running, mixed[:, n])
        orders.append(running)
    heads = len(spec.moduli) // (spec.size - 1)
    hashed = torch.stack(orders, 1).repeat_interleave(heads, 1)
    return torch.remainder(hashed, spec.moduli) + spec.offsets
