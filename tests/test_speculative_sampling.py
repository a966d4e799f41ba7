"""Sampled tokens keep the target's distribution, whatever the drafts are."""

from __future__ import annotations

import numpy as np
import torch

from gapless.batch.arena import arena_views
from gapless.batch.plan import SeqFlag
from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import Feature, Word
from gapless.sampling.reference import sample_and_store
from gapless.speculative.base import DraftIndices, Sequences
from gapless.speculative.steps import accept, expand, place

VOCAB, ROWS = 5, 4000
PROMPT = 2


def run(
    drafts_from: torch.Tensor, first: torch.Tensor, then: torch.Tensor, seed: int, batches: int
) -> tuple[np.ndarray, float]:
    """Count pairs of the first two tokens, drafted and verified two at a time; and the share of accepted first drafts.

    ``drafts_from [V]`` is the draft's distribution; ``first [V]`` and ``then [V, V]`` are the target's logits.
    """
    layout = RowLayout(ROWS, 8, 8, VOCAB)
    generator = torch.Generator().manual_seed(seed)
    counts, accepted = np.zeros((VOCAB, VOCAB)), 0
    arena = arena_views(torch.zeros(layout.num_words, dtype=torch.int32), layout)
    table, params = arena.token_table, arena.params
    params[:, Word.TEMPERATURE] = torch.tensor(1.0).view(torch.int32)
    params[:, Word.LIMIT], params[:, Word.NUM_DRAFTS], params[:, Word.PROMPT_LEN] = PROMPT + 2, 1, PROMPT
    every = torch.arange(ROWS, dtype=torch.int32)
    for batch in range(batches):
        params[:ROWS, Word.SEED_LOW] = every + batch * ROWS
        params[:ROWS, Word.SEED_HIGH] = seed
        drafts = torch.multinomial(drafts_from, ROWS, replacement=True, generator=generator).int()

        def step(start: int, width: int, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            flags = torch.full((ROWS,), SeqFlag.DRAWS | (SeqFlag.DRAFTS if width > 1 else 0), dtype=torch.int32)
            loc = torch.arange(ROWS + 1, dtype=torch.int32) * width
            sequences = Sequences(every, torch.full((ROWS,), start, dtype=torch.int32), flags, loc, arena, layout)
            ints = [torch.zeros(n, dtype=torch.int32) for n in (ROWS, ROWS * width, ROWS * width)]
            indices = DraftIndices(*ints, *(torch.zeros(ROWS * width, dtype=torch.int64) for _ in range(2)), width)
            place(sequences, indices.starts)
            expand(sequences, torch.zeros(ROWS * width, dtype=torch.int64), indices)
            tokens = torch.zeros(ROWS * width, dtype=torch.int32)
            sample_and_store(
                logits, arena.words, layout, indices.rows, indices.positions, indices.flags, Feature.SAMPLE, tokens
            )
            taken, proposed = (torch.zeros(ROWS, dtype=torch.int32) for _ in range(2))
            accept(sequences, indices, ids, tokens, taken, proposed)
            return taken

        logits = torch.stack([first.expand(ROWS, -1), then[drafts.long()]], 1).view(-1, VOCAB)
        ids = torch.stack([torch.zeros_like(drafts), drafts], 1).flatten().long()
        taken = step(PROMPT - 1, 2, logits, ids)
        accepted += int((taken == 2).sum())
        kept = table[:ROWS, PROMPT : PROMPT + 2].clone()
        step(PROMPT, 1, then[kept[:, 0].long()], torch.zeros(ROWS, dtype=torch.int64))  # after a rejected draft
        second = torch.where(taken == 2, kept[:, 1], table[:ROWS, PROMPT + 1])
        np.add.at(counts, (kept[:, 0].numpy(), second.numpy()), 1)
    return counts, accepted / (ROWS * batches)


def test_chi_square_of_drafted_and_verified_pairs() -> None:
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(VOCAB, generator=generator)
    then = torch.randn(VOCAB, VOCAB, generator=generator)
    target = (first.softmax(-1)[:, None] * then.softmax(-1)).double().numpy()
    kinds = [(first.softmax(-1), 25), (torch.eye(VOCAB)[1], 3), (torch.ones(VOCAB) / VOCAB, 3)]  # 100,000 pairs first
    for seed, (drafts_from, batches) in enumerate(kinds):
        counts, share = run(drafts_from, first, then, seed, batches)
        expected = target * counts.sum()
        chi = float(((counts - expected) ** 2 / expected).sum())
        assert chi < 52.6, (seed, chi)  # 24 degrees of freedom: 1 of 1,500 true runs is beyond it
        assert abs(share - float((first.softmax(-1) * drafts_from).sum())) < 0.02, "the share that agrees"
