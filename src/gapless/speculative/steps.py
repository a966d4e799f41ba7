"""A step with drafts around its model, in plain torch: the definition, and what the CPU runs.

    place    where each sequence begins: the host does not know it of a row whose steps with drafts are in flight
    expand   which logits are needed, and which tokens lie beyond the row's end
    accept   how many of the drawn tokens are true, and the row's new length

The sampler stands between the last two and knows nothing of drafts: for a sequence with K of them it gets W = K + 1,
the j-th of which draws the token after j drafts. Its random number is keyed by the position, its penalties read the
tokens before that position from the token table, where the drafts lie. So each of its tokens *is* the token that a step
without drafts draws, if the drafts before it are right; and a draft is right if it equals the token drawn in its place.
The output is that of no drafts, greedy or sampled, whatever the drafts are. For one draft d this accepts with
probability p(d), which is the most that any rule can do for a draft that is not itself drawn (Leviathan et al., 2023,
with a distribution that has all its mass on d).

Shape legend: see `gapless.speculative.base`.
"""

from __future__ import annotations

import torch

from gapless.batch.plan import SeqFlag
from gapless.batch.row_params import Word
from gapless.speculative.base import DraftIndices, Sequences


def place(sequences: Sequences, starts: torch.Tensor) -> None:
    """``starts [S]``: one before the row's length where the flags say so, else what the slot brought."""
    lengths = sequences.arena.params[sequences.rows.long(), Word.LENGTH]
    starts.copy_(torch.where((sequences.flags & SeqFlag.DEVICE_START) != 0, lengths - 1, sequences.starts))


def expand(sequences: Sequences, positions: torch.Tensor, out: DraftIndices) -> None:
    """What the sampler shall see; and drafts beyond a row's end get a position that the model knows.

    Args:
        sequences: of the step.
        positions: int64 ``[T]``; that of a token at or beyond the row's limit becomes 0. Nothing depends on such a
            token, since a draw beyond the limit does not count.
        out: ``starts`` is read, the rest written.
    """
    first, end = sequences.query_start_loc[:-1, None], sequences.query_start_loc[1:, None]
    rows, flags, starts = sequences.rows[:, None], sequences.flags[:, None], out.starts[:, None]
    lens = end - first
    j = torch.arange(out.width, device=rows.device, dtype=torch.int32)[None]
    drafts = (flags & SeqFlag.DRAFTS) != 0
    limit = sequences.arena.params[sequences.rows.long(), Word.LIMIT][:, None]
    exists = torch.where(drafts, j < lens, (j == 0) & (lens > 0))
    at = torch.where(drafts, starts, starts + lens - 1) + j
    token = torch.where(drafts, first, end - 1) + j
    kept = torch.where(at + 1 < limit, flags & SeqFlag.DRAWS, 0) | torch.where(j == 0, flags & SeqFlag.SCORES, 0)
    place = token if out.by_token else torch.arange(len(sequences.rows))[:, None] * out.width + j
    place = place[exists].long()  # sync-ok: the reference runs on a CPU only
    out.rows.fill_(sequences.layout.null_row)
    for tensor, value in ((out.flags, kept), (out.logits_index, token), (out.positions, at + 1)):
        tensor.zero_()
        tensor[place] = value[exists].to(tensor.dtype)  # sync-ok: the reference runs on a CPU only
    out.rows[place] = rows.expand_as(exists)[exists]  # sync-ok: the reference runs on a CPU only

    beyond = exists & (at >= limit)
    positions[token[beyond].long()] = 0  # sync-ok: the reference runs on a CPU only


def accept(
    sequences: Sequences,
    indices: DraftIndices,
    input_ids: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    proposed: torch.Tensor,
) -> None:
    """How many of the drawn tokens are true.

    Args:
        sequences: of the step; `Word.LENGTH` of the rows that draw is written.
        indices: of the step.
        input_ids: int64 ``[T]``, the drafts among them.
        tokens: int32 ``[L]``, what the sampler drew.
        counts: int32 ``[S]``, written: the accepted drafts and the token after them, but no more than the row may take;
            0 where the sequence does not draw, or the row is full.
        proposed: int32 ``[S]``, written: how many drafts could have been accepted.
    """
    first, end = sequences.query_start_loc[:-1], sequences.query_start_loc[1:]
    lens, drafts = end - first, (sequences.flags & SeqFlag.DRAFTS) != 0
    width = indices.width
    params = sequences.arena.params
    index = sequences.rows.long()
    base = indices.starts + torch.where(drafts, 1, lens)
    room = params[index, Word.LIMIT] - base
    count = torch.minimum(torch.minimum(params[index, Word.NUM_DRAFTS], lens - 1), room - 1).clamp_min(0)
    count = torch.where(drafts, count, 0)
    j = torch.arange(width - 1, device=tokens.device)
    drafted = input_ids[(first[:, None] + 1 + j).clamp_max(len(input_ids) - 1)]
    begin = first if indices.by_token else torch.arange(len(index)) * width
    drawn = tokens[(begin[:, None] + j).clamp_max(len(tokens) - 1)]
    right = (drawn == drafted) & (j < count[:, None])
    accepted = right.int().cumprod(1).sum(1)
    drew = (sequences.flags & SeqFlag.DRAWS) != 0
    emitted = torch.where(drew, torch.minimum(accepted + 1, room).clamp_min(0), 0)
    counts.copy_(emitted)
    proposed.copy_(torch.where(drew, count, 0))
    to = torch.where(drew, index, sequences.layout.null_row)
    params[to, Word.LENGTH] = (base + emitted).int()
