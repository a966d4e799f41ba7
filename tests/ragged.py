"""Random ragged steps for parts of a model that keep a past: chunks of many rows, padding, rejected drafts.

`Ragged` keeps, for some rows, how far each has come and where its blocks lie, and makes the tensors of a step.
`drive` feeds each row's own sequence of inputs in random pieces, with wrong tokens behind the right ones now and then
(drafts that are rejected), and returns what came out for the right ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gapless.model.token_rows import token_rows

BLOCK = 4


@dataclass(frozen=True)
class Step:
    """Tensors of one step; see `gapless.attention.context.AttentionContext`."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    token_rows: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor


class Ragged:
    """Rows of up to ``longest`` tokens over scrambled blocks; the last row of the table is the null row."""

    def __init__(self, num_rows: int, longest: int, seed: int = 0, device: str = "cpu") -> None:
        per_row = -(-longest // BLOCK)
        blocks = list(range(1, num_rows * per_row + 1))
        random.Random(seed).shuffle(blocks)
        table = torch.tensor(blocks, dtype=torch.int32).view(num_rows, per_row)
        self.tables = torch.cat([table, torch.zeros(1, per_row, dtype=torch.int32)]).to(device)
        self.num_blocks = len(blocks) + 1
        self.null_row = num_rows
        self.done = [0] * num_rows
        self.device = device

    def cache(self, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A per-token cache with stale contents that would be noticed."""
        return torch.full((self.num_blocks, BLOCK, width), float("nan"), dtype=dtype, device=self.device)

    def step(self, plan: Sequence[tuple[int, int]], pad_tokens: int = 0, pad_sequences: int = 0) -> Step:
        """The next ``count`` positions of each (row, count); a row may come several times, side by side."""
        starts, lens, positions, slots = [0], list[int](), list[int](), list[int]()
        at = list(self.done)
        for row, count in plan:
            for position in range(at[row], at[row] + count):
                positions.append(position)
                slots.append(int(self.tables[row, position // BLOCK]) * BLOCK + position % BLOCK)
            at[row] += count
            starts.append(len(positions))
            lens.append(at[row])
        starts += [starts[-1]] * pad_sequences
        rows = [row for row, _ in plan] + [self.null_row] * pad_sequences
        pad = [0] * pad_tokens
        loc = torch.tensor(starts, dtype=torch.int32, device=self.device)
        row_tensor = torch.tensor(rows, dtype=torch.int32, device=self.device)
        total = len(positions) + pad_tokens
        return Step(
            query_start_loc=loc,
            seq_lens=torch.tensor(lens + [0] * pad_sequences, dtype=torch.int32, device=self.device),
            rows=row_tensor,
            positions=torch.tensor(positions + pad, device=self.device),
            token_rows=token_rows(loc, row_tensor, total, self.null_row),
            slot_mapping=torch.tensor(slots + [i % BLOCK for i in range(pad_tokens)], device=self.device),
            block_tables=self.tables,
        )


Part = Callable[[torch.Tensor, Step], torch.Tensor]
"""From the inputs of a step's tokens ``[T, ...]`` and the step to the outputs ``[T, ...]``."""


def drive(
    ragged: Ragged, inputs: list[torch.Tensor], part: Part, *, style: str, drafts: int = 0, seed: int = 0
) -> list[torch.Tensor]:
    """Outputs of each row's inputs ``[L, ...]``, fed as ``style`` says.

    Args:
        style: "whole" (all rows at once), "chunks" (random pieces, mixed), "steps" (one token of each row at a time),
            "ones" (several tokens of a row as sequences of one token).
        drafts: up to so many wrong tokens follow the right ones, in steps of few tokens; they are computed, and then
            taken back.
        seed: of all choices.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    got: list[list[torch.Tensor]] = [[] for _ in inputs]
    while any(ragged.done[row] < len(x) for row, x in enumerate(inputs)):
        plan: list[tuple[int, int]] = []
        pieces: list[torch.Tensor] = []
        good: list[tuple[int, int, int]] = []  # row, first token of the step, count
        total = 0
        order = [row for row, x in enumerate(inputs) if ragged.done[row] < len(x)]
        rng.shuffle(order)
        for row in order:
            left = len(inputs[row]) - ragged.done[row]
            count = {"whole": left, "steps": 1}.get(style, rng.randint(0, min(left, 11)))
            if not count:
                continue
            bad = rng.randint(0, drafts + 1 - count) if count <= drafts else 0
            bad = min(bad, ragged.tables.shape[1] * BLOCK - ragged.done[row] - count)
            pieces.append(inputs[row][ragged.done[row] : ragged.done[row] + count])
            wrong = torch.randn(bad, *inputs[row].shape[1:], generator=generator)
            pieces.append((wrong * 3).to(inputs[row]) if inputs[row].is_floating_point() else wrong.abs().long() + 2)
            plan += [(row, 1)] * (count + bad) if style == "ones" else [(row, count + bad)]
            good.append((row, total, count))
            total += count + bad
        if not plan:
            continue
        pad_tokens, pad_sequences = rng.randint(0, 3), rng.randint(0, 2)
        step = ragged.step(plan, pad_tokens, pad_sequences)
        x = torch.cat(pieces).to(ragged.device)
        x = torch.cat([x, torch.full((pad_tokens, *x.shape[1:]), 9, dtype=x.dtype, device=x.device)])
        out = part(x, step)
        for row, first, count in good:
            got[row].append(out[first : first + count].cpu())
            ragged.done[row] += count
    return [torch.cat(parts) for parts in got]
