"""How a product of few tokens is cut up, and the room that its parts need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How one product is cut up.

    Attributes:
        dot: tensor cores; else plain arithmetic, for one token.
        block_n: outputs of a program; with GLU, of each half.
        block_k: inputs of a step of its loop.
        split: programs that share the inputs of a tile; dot only.
        preload: whether the first block of weights is loaded into registers before the wait.
        prefetch: inputs per output whose weights are brought to the second-level cache before the wait.
        block_m: tokens of a program; 0 for all.
    """

    dot: bool
    block_n: int
    block_k: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    preload: bool = False
    prefetch: int = 0
    block_m: int = 0

    def tiles(self, n: int) -> int:
        return -(-n // self.block_n)

    def rows(self, m: int) -> int:
        """Tokens of a program."""
        return self.block_m or max(16, triton.next_power_of_2(m))

    def fit(self, k: int) -> GemmConfig:
        """The nearest that the kernel takes, for ``k`` inputs."""
        block_k = min(self.block_k, max(16, triton.next_power_of_2(k)))
        blocks = -(-k // block_k)
        split = max(1, min(self.split, blocks))
        prefetch = min(self.prefetch, blocks // split * block_k) if k % block_k == 0 else 0
        return GemmConfig(
            self.dot, self.block_n, block_k, split, self.warps, self.stages, self.preload, prefetch, self.block_m
        )


class Workspace:
    """Partials and counters of the split products of one stream.

    Captured graphs hold its addresses, so it must not grow after the first capture: `reserve` first.
    """

    def __init__(self, device: torch.device) -> None:
        self.partials = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = torch.zeros(0, dtype=torch.int32, device=device)

    def fits(self, partials: int, counters: int) -> bool:
        return partials <= self.partials.numel() and counters <= self.counters.numel()

    def reserve(self, partials: int, counters: int) -> None:
        """Make room. The numbers are those of `workspace_size`."""
        if not self.fits(partials, counters):
            device = self.counters.device
            self.partials = self.partials.new_empty(max(partials, self.partials.numel()))
            self.counters = torch.zeros(max(counters, self.counters.numel()), dtype=torch.int32, device=device)


def workspace_size(op: str, m: int, n: int, config: GemmConfig) -> tuple[int, int]:
    """Partials and counters that a product needs; ``n`` rows of weights."""
    if not config.dot or config.split == 1:
        return 0, 0
    halves = 2 if op == "glu" else 1
    rows = config.rows(m)
    tiles = config.tiles(n // halves) * -(-m // rows)
    return tiles * config.split * halves * config.block_n * rows, tiles
