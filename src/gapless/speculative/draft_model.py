"""Drafts by a second, smaller model with the target's vocabulary.

Its keys and values lie in a pool of its own under the target's block ids: both models read the same block tables, and
the scheduler knows one set of blocks. A draft step is an ordinary decode step of the draft model; K of them follow each
other in one graph.

What of its cache is right: after a step with prompts it has computed the tokens that the target has (`follow`); after
one with drafts the row's tokens short of the last two, since the last draft is drawn but never computed. So the first
of the K steps computes two tokens of a row and the others one. Tokens of plain decode steps, those of rows that do not
draft, are missing in it, and a later draft that reads their places is a bad draft; no more depends on them.

A row that draws gets drafts that are drawn too, with the target's parameters *and its random number*: the two draws
invert the cumulative weights at the same point, so that they are mostly equal where the distributions are close. The
rule of acceptance stays equality (see `gapless.speculative.steps`), and with it the output stays that of no drafts.
Rejection sampling would accept with probability 1 - TV(p, q), of which this rule takes a part; it would give up that
the tokens are the same with and without drafts.

Shape legend: see `gapless.speculative.base`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gapless.attention.context import AttentionContext
from gapless.attention.kv_format import kv_scales
from gapless.batch.plan import SeqFlag
from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import Feature, Word
from gapless.cache.groups import group_of
from gapless.cache.spec import StateSpec
from gapless.device.base import Device
from gapless.model.base import CausalModel
from gapless.speculative.base import Sequences

SampleAndStore = Callable[..., None]
"""See `gapless.sampling.reference.sample_and_store`."""


class DraftModelProposer:
    """See the module and `gapless.speculative.base.Proposer`.

    Args:
        model: on the device.
        sample: chooses tokens and writes them into the token table.
        num_drafts: K.
        device, layout, num_blocks, max_seqs: see `gapless.speculative.base.MakeProposer`.
    """

    samples = True

    def __init__(
        self,
        model: CausalModel,
        sample: SampleAndStore,
        num_drafts: int,
        device: Device,
        layout: RowLayout,
        num_blocks: Sequence[int],
        max_seqs: int,
    ) -> None:
        self._model, self._sample, self._num_drafts = model, sample, num_drafts
        self._device, self._layout, self._num_blocks = device, layout, num_blocks
        self._group_of_layer = tuple(group_of(spec.window, layout.windows) for spec in model.kv_specs)
        self._logits = device.device_buffer((max_seqs, model.vocab_size), model.dtype, "draft_logits")
        self._tokens = device.device_buffer((max_seqs,), torch.int32, "draft_tokens")
        self._kv: list[torch.Tensor] = []
        self._scales = kv_scales(model.kv_specs, model.device)
        self.take_pool()

    def take_pool(self) -> None:
        """See `gapless.speculative.base.Proposer`: zeroed, a tensor for each layer."""
        for i, (spec, group) in enumerate(zip(self._model.kv_specs, self._group_of_layer, strict=True)):
            assert not isinstance(spec, StateSpec)  # refused at start
            shape = spec.shape(self._num_blocks[group], self._layout.block_size)
            self._kv.append(self._device.device_buffer(shape, getattr(torch, spec.dtype), f"draft_kv{i}"))
        self.state: tuple[torch.Tensor, ...] = (*self._kv, self._logits, self._tokens)

    def drop_pool(self) -> None:
        """See `gapless.speculative.base.Proposer`. The weights stay."""
        for i in range(len(self._kv)):
            self._device.release_buffer(f"draft_kv{i}")
        self._kv.clear()
        self.state = (self._logits, self._tokens)

    def propose(self, sequences: Sequences, features: Feature) -> None:
        """See `gapless.speculative.base.Proposer`. Sequences without drafts compute something on the null row."""
        layout, flags, seqs = sequences.layout, sequences.flags, len(sequences.rows)
        params = sequences.arena.params
        drafting = (flags & SeqFlag.DRAFTS) != 0
        row = torch.where(drafting, sequences.rows, layout.null_row)
        index = row.long()
        device_start = (flags & SeqFlag.DEVICE_START) != 0
        length = torch.where(device_start, params[index, Word.LENGTH], sequences.starts + 1)
        length = torch.where(drafting, length, 2)
        limit = torch.where(drafting, params[index, Word.LIMIT], 0)
        for i in range(self._num_drafts):
            self._draft(sequences, row, length + i, limit, drafting, 2 if i == 0 else 1, seqs, features)
        # A draft at the limit has no place; the row's own last token is no draft.
        count = (limit - 1 - length).clamp(0, self._num_drafts)
        params[index, Word.NUM_DRAFTS] = count

    def _draft(
        self,
        sequences: Sequences,
        row: torch.Tensor,
        length: torch.Tensor,
        limit: torch.Tensor,
        drafting: torch.Tensor,
        new: int,
        seqs: int,
        features: Feature,
    ) -> None:
        """One forward of ``new`` tokens a sequence, and its token at the position ``length``."""
        arena, layout = sequences.arena, sequences.layout
        device, size = arena.words.device, layout.block_size
        table, tables = arena.token_table, arena.block_tables
        at = (length[:, None] - new + torch.arange(new, device=device, dtype=torch.int32)).flatten().long()  # [T]
        rows = row[:, None].expand(-1, new).flatten().long()
        inside = at < limit[:, None].expand(-1, new).flatten()
        ids = table[rows, at].long()
        blocks = tables[:, rows, at // size].long()
        every = torch.arange(seqs + 1, device=device, dtype=torch.int32)
        context, *others = (
            AttentionContext(
                kv_caches=self._kv,
                kv_scales=self._scales,
                slot_mapping=blocks[group] * size + at % size,
                query_start_loc=every * new,
                seq_lens=length.int(),
                rows=row,
                block_tables=tables[group],
                block_size=size,
                decode_only=new == 1,
                max_query_len=new,
            )
            for group in range(layout.num_groups)
        )
        context.group_of_layer, context.others = self._group_of_layer, tuple(others)
        last = every[1:].long() * new - 1
        logits = self._logits[:seqs]
        self._model.forward(ids, torch.where(inside, at, 0), context, last, logits)
        flags, tokens = drafting.int(), self._tokens[:seqs]
        self._sample(logits, arena.words, layout, row, length.long(), flags, features, tokens, None)

    def follow(self, input_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> None:
        """See `gapless.speculative.base.Proposer`: the cache is written, one row of logits is made for nothing."""
        changes: dict[str, Any] = {"kv_caches": self._kv, "kv_scales": self._scales, "row_loras": None}
        changes |= {"scratch": {}, "group_of_layer": (), "others": ()}
        own, *others = (
            dataclasses.replace(part, **changes)
            for part in (context, *context.others)
        )
        own.group_of_layer, own.others = self._group_of_layer, tuple(others)
        first = torch.zeros(1, dtype=torch.int64, device=input_ids.device)
        self._model.forward(input_ids, positions, own, first, self._logits[:1])
