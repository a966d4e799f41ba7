"""A minimal engine for tests: greedy generation with a paged cache, no scheduler, no pipeline."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from gapless.attention.context import AttentionContext
from gapless.cache.spec import StateSpec
from gapless.model.base import CausalModel

BLOCK = 4


class PagedDriver:
    """Runs steps of rows whose tokens it keeps, over scrambled blocks; the last row of the tables is the null
    row."""

    def __init__(self, model: CausalModel, num_rows: int, max_len: int, seed: int = 0) -> None:
        self.model = model
        per_row = -(-max_len // BLOCK)
        blocks = list(range(1, num_rows * per_row + 1))
        random.Random(seed).shuffle(blocks)
        table = torch.tensor(blocks, dtype=torch.int32).view(num_rows, per_row)
        self.tables = torch.cat([table, torch.zeros(1, per_row, dtype=torch.int32)])
        self.caches = [
            torch.full(
                spec.shape(num_rows + 1) if isinstance(spec, StateSpec) else spec.shape(len(blocks) + 1, BLOCK),
                1e3,
                dtype=getattr(torch, spec.dtype),
            )
            for spec in model.kv_specs
        ]
        self.table = torch.zeros(num_rows + 1, per_row * BLOCK, dtype=torch.int32)
        self.tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self.done = [0] * num_rows

    def step(
        self, new: Sequence[tuple[int, int]], pad_sequences: int = 0, pad_tokens: int = 0, every: bool = False
    ) -> torch.Tensor:
        """Compute (row, number of tokens) pairs; logits ``[S, vocab_size]`` of each row's last new token, or of every
        token."""
        ids, positions, slots, starts = [], [], [], [0]
        for row, count in new:
            for position in range(self.done[row], self.done[row] + count):
                ids.append(self.tokens[row][position])
                self.table[row, position] = ids[-1]
                positions.append(position)
                slots.append(int(self.tables[row, position // BLOCK]) * BLOCK + position % BLOCK)
            self.done[row] += count
            starts.append(len(ids))
        context = AttentionContext(
            kv_caches=self.caches,
            slot_mapping=torch.tensor(slots + [0] * pad_tokens),
            query_start_loc=torch.tensor(starts + [starts[-1]] * pad_sequences, dtype=torch.int32),
            seq_lens=torch.tensor(
                [self.done[row] for row, _ in new] + [0] * pad_sequences, dtype=torch.int32
            ),
            rows=torch.tensor(
                [row for row, _ in new] + [len(self.tables) - 1] * pad_sequences, dtype=torch.int32
            ),
            block_tables=self.tables,
            block_size=BLOCK,
            decode_only=len(ids) == len(new),
            token_table=self.table,
        )
        last = torch.tensor(range(starts[-1]) if every else [end - 1 for end in starts[1:]] + [0] * pad_sequences)
        logits = torch.empty(len(last), self.model.vocab_size, dtype=self.model.dtype)
        tokens = torch.tensor(ids + [0] * pad_tokens)
        self.model.forward(tokens, torch.tensor(positions + [0] * pad_tokens), context, last, logits)
        return logits if every else logits[: len(new)]


def greedy(
    model: CausalModel, prompts: list[list[int]], steps: int, pad: int = 0
) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens of each prompt, all in one batch, the first prompt in chunks so that steps are mixed.

    Returns the new tokens and the logits ``[prompts, steps, vocab_size]``.
    """
    driver = PagedDriver(model, len(prompts), max(map(len, prompts)) + steps)
    driver.tokens = [list(prompt) for prompt in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(len(rows) < steps for rows in logits):
        plan = []
        for row, tokens in enumerate(driver.tokens):
            if len(logits[row]) < steps:
                left = len(tokens) - driver.done[row]
                plan.append((row, min(left, 7) if row == 0 else left))
        result = driver.step(plan, pad, pad)
        for (row, _), line in zip(plan, result, strict=True):
            if driver.done[row] == len(driver.tokens[row]):
                logits[row].append(line)
                driver.tokens[row].append(int(line.argmax()))
    new = [tokens[len(prompt) :] for tokens, prompt in zip(driver.tokens, prompts, strict=True)]
    return new, torch.stack([torch.stack(rows) for rows in logits])
