"""A model without weights whose next token is an exact hash of every cache word that it should read.

It keeps each token's id and position in the KV cache and reads them back through the block table, so a wrong block, a
lost write, a stale token or a wrong position always shows as another token. `next_token` is the same hash over a plain
list: an oracle that knows nothing of engines.
"""

from __future__ import annotations

import bisect

import torch

from gapless.attention.context import AttentionContext
from gapless.cache.spec import KVSpec, LayerSpec

EOS = 1
_MASK = 2**61 - 1


def sequence_hash(tokens: list[int], positions: list[int] | None = None) -> int:
    h = 0
    for i, token in enumerate(tokens):
        position = i if positions is None else positions[i]
        h = (h * 1_000_003 + token * 7_919 + position * 104_729 + 12_345) & _MASK
    return h


class HashModel:
    """See `gapless.model.base.CausalModel`. With ``peaked`` the logits are one-hot, else random by the hash."""

    def __init__(
        self, vocab_size: int = 61, *, peaked: bool = True, max_position: int = 512, layers: int = 1
    ) -> None:
        self.name = "hash"
        self.kv_specs: tuple[LayerSpec, ...] = tuple(KVSpec(1, 2, 2, "float32") for _ in range(layers))
        self.vocab_size = vocab_size
        self.max_position = max_position
        self.eos_token_ids: tuple[int, ...] = (EOS,)
        self.weight_bytes = 0
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.peaked = peaked

    def logits(self, h: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(h)
        row = torch.randn(self.vocab_size, generator=generator)
        if self.peaked:
            row[h % self.vocab_size] = 20.0
        return row

    def next_token(self, tokens: list[int]) -> int:
        return int(self.logits(sequence_hash(tokens)).argmax())

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        logits_index: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        for cache in context.kv_caches:
            flat = cache.view(2, -1, 2)
            flat[0, context.slot_mapping, 0] = input_ids.float()
            flat[0, context.slot_mapping, 1] = positions.float()
            flat[1, context.slot_mapping, 0] = positions.float()
            flat[1, context.slot_mapping, 1] = input_ids.float()
        starts, lengths = context.query_start_loc.tolist(), context.seq_lens.tolist()
        hashes: dict[int, int] = {}
        for place, token in enumerate(logits_index.tolist()):
            if token not in hashes:
                s = bisect.bisect_right(starts, token, hi=len(lengths)) - 1
                hashes[token] = self._hash(int(context.rows[s]), lengths[s] - (starts[s + 1] - 1 - token), context)
            out[place] = self.logits(hashes[token])

    def _hash(self, row: int, length: int, context: AttentionContext) -> int:
        """Of the row's first ``length`` tokens, as the cache has them."""
        at = torch.arange(length)
        blocks = context.block_tables[row, at // context.block_size].long()
        where = blocks * context.block_size + at % context.block_size
        words = context.kv_caches[-1].view(2, -1, 2)[:, where].long()
        tokens, places = words[0, :, 0].tolist(), words[0, :, 1].tolist()
        assert tokens == words[1, :, 1].tolist()
        assert places == words[1, :, 0].tolist()
        return sequence_hash(tokens, places)
