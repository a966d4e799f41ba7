"""Estimates of a model's operations and of the bytes that it moves, from counts of what steps computed.

They are what the arithmetic of the layers asks for, not what a GPU was seen to do: padding, activations, adapters,
drafts' own models and what stays in caches are left out. Of a mixture of experts all weights are counted, and of sparse
attention all positions, so that there they are upper bounds.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gapless.cache.groups import Windows, group_of
from gapless.cache.spec import KVSpec, StateSpec
from gapless.scheduler.stats import SchedulerStats


class Estimates(msgspec.Struct, frozen=True):
    """Sums of floating-point operations, and of bytes read and written in the device's memory."""

    flops: int = 0
    read: int = 0
    written: int = 0


class ModelSizes(msgspec.Struct, array_like=True):
    """What a step, a sequence of it, a token of it and a key cost. Lists have an entry for each group of layers.

    Attributes:
        weight_bytes: that each step reads: all but a table of embeddings that is not also the head.
        token_flops, head_flops: of all products with weights, for a token; of the head, for a sequence.
        key_bytes: of the keys and values of one position.
        pair_flops: of attention, for a token and a position that it sees.
        state_bytes: of recurrent states, read and written for each sequence of a step.
    """

    weight_bytes: int
    token_flops: int
    head_flops: int
    key_bytes: list[int]
    pair_flops: list[int]
    state_bytes: int

    @classmethod
    def of(cls, model: Any, windows: Windows) -> ModelSizes:
        """Of a `CausalModel`. One without a ``config`` counts its whole weights for each token.

        Args:
            windows: of the engine's groups.
        """
        config = getattr(model, "config", None)
        width = int(getattr(config, "hidden_size", 0))
        table = width * int(model.vocab_size)  # numbers of the head
        tied = bool(getattr(config, "tie_word_embeddings", False))
        size = int(model.dtype.itemsize)
        key_bytes, pair_flops, state_bytes = [0] * len(windows), [0] * len(windows), 0
        for spec in model.kv_specs:
            if isinstance(spec, StateSpec):
                state_bytes += spec.bytes_per_row // spec.slots
                continue
            group = group_of(spec.window, windows)
            key_bytes[group] += spec.bytes_per_token
            if isinstance(spec, KVSpec):
                heads = int(getattr(config, "num_attention_heads", spec.num_kv_heads))
                pair_flops[group] += 2 * heads * (spec.head_dim_k + spec.head_dim_v)
            else:
                pair_flops[group] += 2 * spec.width
        return cls(
            weight_bytes=model.weight_bytes - (0 if tied else table * size),
            token_flops=2 * (model.weight_bytes // size - table * (1 if tied else 2)),
            head_flops=2 * table,
            key_bytes=key_bytes,
            pair_flops=pair_flops,
            state_bytes=state_bytes,
        )

    def estimate(self, done: SchedulerStats) -> Estimates:
        """Of all steps that were counted."""
        reads = done.reads
        keys = sum(n * size for n, size in zip(reads.keys, self.key_bytes, strict=False))
        pairs = sum(n * cost for n, cost in zip(reads.pairs, self.pair_flops, strict=False))
        states = reads.sequences * self.state_bytes
        return Estimates(
            flops=done.tokens_computed * self.token_flops + reads.sequences * self.head_flops + pairs,
            read=done.steps * self.weight_bytes + keys + states,
            written=done.tokens_computed * sum(self.key_bytes) + states,
        )
