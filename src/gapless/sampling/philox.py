"""Philox4x32-10 in torch integer operations: random numbers that depend on their key and on nothing else.

A number is keyed by (seed, position, purpose, sample); there is no counter to keep, so a draw is the same
whatever the batch, the step or the device. The words equal those of ``triton.language.philox`` bit for bit.
"""

from __future__ import annotations

import enum

import torch

_MASK = 0xFFFFFFFF
_ROUND_A = 0xD2511F53
_ROUND_B = 0xCD9E8D57
_KEY_A = 0x9E3779B9
_KEY_B = 0xBB67AE85
_ROUNDS = 10


class Purpose(enum.IntEnum):
    """What a random number is for; part of its key, so that two uses at one position are independent."""

    SAMPLE = 0
    DRAFT = 1


def philox(
    key: tuple[torch.Tensor, torch.Tensor],
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four random words for each key and counter.

    Args:
        key: low and high word of the seed, any integer dtype; only the low 32 bits of each count.
        counter: four words, likewise.

    Returns:
        Four int64 tensors with values in [0, 2**32).
    """
    k0, k1 = (k.long() & _MASK for k in key)
    c0, c1, c2, c3 = (c.long() & _MASK for c in counter)
    for _ in range(_ROUNDS):
        # The product of two 32-bit words wraps around as int64, but its bits are right.
        a, b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c2 = ((b >> 32) & _MASK) ^ c1 ^ k0, ((a >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = b & _MASK, a & _MASK
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0, c1, c2, c3


def uniform(
    seed_low: torch.Tensor,
    seed_high: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
    sample: int = 0,
) -> torch.Tensor:
    """One number in [0, 1) for each row: float64 with 32 random bits, never rounded up to 1.

    Args:
        seed_low: ``[S]``, low words of the seeds.
        seed_high: ``[S]``, high words.
        positions: ``[S]``, the position that the drawn token takes.
        purpose: what the number is for.
        sample: which of several draws for the same position and purpose.
    """
    zero = torch.zeros_like(positions, dtype=torch.int64)
    word = philox((seed_low, seed_high), (positions, zero + int(purpose), zero + sample, zero))[0]
    return word.double() * 2.0**-32
