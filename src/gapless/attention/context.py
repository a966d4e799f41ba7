"""AttentionContext: everything that the attention of one step needs to know besides q, k and v.

Shape legend, here and in the kernels:
    T  tokens of the step (padded)        S  sequences of the step (padded)      R  persistent rows
    N  blocks of the KV pool              B  block size in tokens                HQ, HK  query and KV heads
    D  head size                          P  blocks in one row of the block table

Half-open ranges. Sequence s owns the step's tokens [query_start_loc[s], query_start_loc[s + 1]); they sit at the
positions [seq_lens[s] - q_len, seq_lens[s]) of their request; each attends to the positions [0, own position].
A padding sequence has q_len 0 and seq_len 0 and the null row R. A padding token lies at or after
query_start_loc[S], and its slot_mapping points into block 0, the null block, which no real row ever reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class AttentionContext:
    """Read-only view of one step. All tensors are on the compute device; nothing here may be synced to the host.

    Attributes:
        kv_caches: one tensor per layer, for attention ``[2, N, B, HK, D]``; index 0 holds keys, 1 values. For other
            kinds of layers see `gapless.cache.spec`.
        kv_scales: by layer, fp32 ``[2, HK]`` of its keys and values, or None (see `gapless.attention.kv_format`); empty
            if no layer has scales.
        slot_mapping: int64 ``[T]``, flat place ``block * B + offset`` where token t's key and value go.
        query_start_loc: int32 ``[S + 1]``.
        seq_lens: int32 ``[S]``, tokens that are in the cache once this step's are written.
        rows: int32 ``[S]``, row of each sequence in ``block_tables``.
        block_tables: int32 ``[R + 1, P]``; entries past a row's length are stale and must not be trusted.
        decode_only: every real sequence has exactly one token (T == S). Known by the host, baked into graphs.
        row_loras: int32 ``[R + 1]``, any stride: slot of each row's LoRA adapter, 0 for none. None in steps in which no
            row has one. Which of the two is known by the host, baked into graphs.
        max_query_len: a bound on the tokens of each sequence that is small enough for the decode kernel, or None. Known
            by the host, baked into graphs.
        scratch: for values that one layer computes and the next ones of the same group and step reuse.
        group_of_layer: by layer, which group's slot mapping and block tables are its own (see `gapless.cache.groups`);
            empty if all layers share these.
        token_table: int32 ``[R + 1, max_model_len]``, the tokens of each row, this step's among them; None where no
            part of a model looks at it.
        prompt_embeds: ``[E, H]``, embeddings of tokens whose id is negative (see `gapless.model.embedding`); None in
            engines that take none.
        others: the contexts of groups 1, 2, ...; they differ in ``slot_mapping``, ``block_tables`` and ``scratch``.

    In a group with a window, entries of the block tables before the window of a sequence's first new token mean
    nothing either: those blocks may belong to others by now.
    """

    kv_caches: list[torch.Tensor]
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    decode_only: bool
    row_loras: torch.Tensor | None = None
    max_query_len: int | None = None
    scratch: dict[str, Any] = field(default_factory=dict)
    group_of_layer: tuple[int, ...] = ()
    token_table: torch.Tensor | None = None
    others: tuple[AttentionContext, ...] = ()
    kv_scales: Sequence[torch.Tensor | None] = ()
    prompt_embeds: torch.Tensor | None = None

    def of(self, layer: int) -> AttentionContext:
        """The step as the layer sees it, an index of ``kv_caches``."""
        group = self.group_of_layer[layer] if self.group_of_layer else 0
        return self.others[group - 1] if group else self

    def scales_of(self, layer: int) -> torch.Tensor | None:
        """The layer's ``kv_scales``."""
        return self.kv_scales[layer] if self.kv_scales else None


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Constants of one layer's attention.

    ``window``: positions a query sees, itself included. ``softcap``: ``softcap * tanh(score / softcap)`` before the
    softmax. ``sinks``: ``[HQ]``, a learned logit per head that takes part in the softmax's sum only.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
