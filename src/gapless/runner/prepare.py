"""The start of a step on the compute stream, in plain torch: apply changes, find tokens, positions and cache slots.

The input id of a token is ``token_table[row, position]``. Where the host knew the id, it came in the slot and is
written to the table here; where it did not (the carry-over mask), an earlier step on this stream has written it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gapless.batch.arena import Arena
from gapless.batch.row_layout import NULL_BLOCK, RowLayout
from gapless.batch.slot_layout import NUM_UPDATES, StepInputs


@dataclass(frozen=True, slots=True)
class StepIndices:
    """What the device derives for a step. One set for all slots: only the compute stream touches it."""

    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [G, T]
    seq_lens: torch.Tensor  # int32 [S]
    logits_index: torch.Tensor  # int64 [S]
    sample_positions: torch.Tensor  # int64 [S]

    def cut(self, num_tokens: int, num_seqs: int) -> StepIndices:
        """The part for T = ``num_tokens`` and S = ``num_seqs``."""
        return StepIndices(
            self.input_ids[:num_tokens],
            self.positions[:num_tokens],
            self.slot_mapping[:, :num_tokens],
            self.seq_lens[:num_seqs],
            self.logits_index[:num_seqs],
            self.sample_positions[:num_seqs],
        )


def apply_updates(step: StepInputs, arena: Arena) -> None:
    """``arena[word] = value`` for the step's changes. Twice is as good as once."""
    updates = step.updates[: int(step.header[NUM_UPDATES])]  # sync-ok: the reference runs on a CPU only
    arena.words[updates[:, 0].long()] = updates[:, 1]


def prepare(step: StepInputs, arena: Arena, layout: RowLayout, out: StepIndices) -> None:
    """The reference. Runs where host and device share memory: it reads true sizes from the header."""
    apply_updates(step, arena)
    num_tokens, num_seqs = step.header[:2].tolist()  # sync-ok: the reference runs on a CPU only
    t = torch.arange(len(step.input_ids))
    real = t < num_tokens
    seq = torch.searchsorted(step.query_start_loc[1 : num_seqs + 1], t, right=True, out_int32=True).long()
    seq = torch.where(real, seq, 0)
    rows = torch.where(real, step.rows[seq].long(), layout.null_row)
    positions = torch.where(real, step.starts[seq] + t - step.query_start_loc[seq], 0)
    ids = torch.where(step.carry.bool(), arena.token_table[rows, positions], step.input_ids)
    arena.token_table[rows, positions] = ids
    blocks = torch.where(real, arena.block_tables[:, rows, positions // layout.block_size].long(), NULL_BLOCK)
    out.input_ids.copy_(ids)
    out.positions.copy_(positions)
    out.slot_mapping.copy_(blocks * layout.block_size + torch.where(real, positions, t) % layout.block_size)

    lens = step.query_start_loc[1:] - step.query_start_loc[:-1]
    out.seq_lens.copy_(step.starts + lens)
    out.logits_index.copy_(torch.where(lens > 0, step.query_start_loc[1:] - 1, 0))
    out.sample_positions.copy_(out.seq_lens)
