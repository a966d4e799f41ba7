"""The kernels of a step and the hash model in numpy: the same results as the reference, at a tenth of the time.

For the many thousand short runs of the simulated device, where steps are so small that torch's overhead is all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gapless.attention.context import AttentionContext
from gapless.batch.arena import Arena
from gapless.batch.row_layout import NULL_BLOCK, RowLayout
from gapless.batch.row_params import Feature
from gapless.batch.slot_layout import StepInputs
from gapless.cache.spec import KVSpec, VectorSpec
from gapless.runner.kernels import Kernels
from gapless.runner.prepare import StepIndices
from gapless.sampling.reference import sample_and_store
from proof.hash_model import HashModel

MASK = 2**61 - 1


def prepare(step: StepInputs, arena: Arena, layout: RowLayout, out: StepIndices) -> None:
    """`gapless.runner.prepare.prepare`."""
    words = arena.words.numpy()
    num_tokens, num_seqs, num_updates = step.header.numpy()[:3].tolist()
    updates = step.updates.numpy()[:num_updates]
    words[updates[:, 0]] = updates[:, 1]
    table, blocks = arena.token_table.numpy(), arena.block_tables.numpy()
    loc, starts = step.query_start_loc.numpy(), step.starts.numpy()
    t = np.arange(len(step.input_ids))
    real = t < num_tokens
    seq = np.where(real, np.searchsorted(loc[1 : num_seqs + 1], t, side="right"), 0)
    rows = np.where(real, step.rows.numpy()[seq], layout.null_row)
    positions = np.where(real, starts[seq] + t - loc[seq], 0)
    ids = np.where(step.carry.numpy(), table[rows, positions], step.input_ids.numpy())
    table[rows, positions] = ids
    where = np.where(real, blocks[:, rows, positions // layout.block_size], NULL_BLOCK).astype(np.int64)
    out.input_ids.numpy()[:] = ids
    out.positions.numpy()[:] = positions
    out.slot_mapping.numpy()[:] = where * layout.block_size + np.where(real, positions, t) % layout.block_size
    lens = loc[1:] - loc[:-1]
    out.seq_lens.numpy()[:] = out.sample_positions.numpy()[:] = starts + lens
    out.logits_index.numpy()[:] = np.where(lens > 0, loc[1:] - 1, 0)


def sample(
    logits: torch.Tensor,
    arena: torch.Tensor,
    layout: RowLayout,
    rows: torch.Tensor,
    positions: torch.Tensor,
    sample_flags: torch.Tensor,
    features: Feature,
    out_tokens: torch.Tensor,
    out_records: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """`gapless.sampling.reference.sample_and_store`, itself where more than greedy is asked for."""
    if features != Feature.GREEDY:
        arguments = (logits, arena, layout, rows, positions, sample_flags, features, out_tokens, out_records)
        sample_and_store(*arguments, **options)
        return
    x, words, where = logits.numpy(), arena.numpy(), positions.numpy()
    token = x.argmax(-1)
    valid = np.isfinite(x[np.arange(len(x)), token])
    flags = (sample_flags.numpy() & 1) != 0
    out_tokens.numpy()[:] = np.where(flags, np.where(valid, token, -1), 0)
    stored = flags & valid & (where >= 0) & (where < layout.max_model_len)
    place = np.where(stored, rows.numpy() * layout.max_model_len + where, layout.null_row * layout.max_model_len)
    words[place] = np.where(stored, token, 0)


KERNELS = Kernels(prepare, sample)


def mix(h: int, token: int, position: int) -> int:
    """The word that a token leaves in the cache: it depends on all tokens before it, as a real model's do."""
    return (h * 31_337 + token * 7_919 + position * 104_729 + 12_345) % 8_388_593  # exact in a float32


class FastHashModel(HashModel):
    """A token leaves its id, its position and a hash of its prefix in the cache, the latter from what it finds there.

    The next token is an exact hash of every word of the sequence, so that a wrong block, order, id, position, or a
    block that was computed behind another prefix shows. The logits are one-hot.
    """

    def __init__(self, vocab_size: int = 61) -> None:
        super().__init__(vocab_size, max_position=4096)

    def next_token(self, tokens: list[int]) -> int:
        h = total = 0
        for position, token in enumerate(tokens):
            h = mix(h, token, position)
            total = (total * 1_000_003 + token + 61 * position + 8_191 * h) & MASK
        return total % self.vocab_size

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        logits_index: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        (cache,) = (c.numpy().reshape(2, -1, 2) for c in context.kv_caches)
        ids, places, slots = input_ids.numpy(), positions.numpy(), context.slot_mapping.numpy()
        cache[0, slots, 0] = cache[1, slots, 1] = ids
        cache[0, slots, 1] = places
        tables, size, logits = context.block_tables.numpy(), context.block_size, out.numpy()
        logits[:] = 0
        loc = context.query_start_loc.tolist()
        for s, (row, length) in enumerate(zip(context.rows.tolist(), context.seq_lens.tolist(), strict=True)):
            blocks = tables[row, : -(-length // size)].astype(np.int64)
            where = (blocks[:, None] * size + np.arange(size)).reshape(-1)[:length]
            first = length - (loc[s + 1] - loc[s])
            h = int(cache[1, where[first - 1], 0]) if first else 0
            for t in range(loc[s], loc[s + 1]):
                h = mix(h, int(ids[t]), int(places[t]))
                cache[1, slots[t], 0] = h
            self.finish(s, cache[0, where], cache[1, where], logits)

    def finish(self, s: int, keys: np.ndarray, values: np.ndarray, logits: np.ndarray) -> None:
        """The next token of sequence ``s`` from its words of the cache."""
        total = 0
        for token, position, h, again in zip(*keys.T.tolist(), *values.T.tolist(), strict=True):
            if token != again:
                raise RuntimeError("key and value of a token disagree")
            total = (total * 1_000_003 + int(token) + 61 * int(position) + 8_191 * int(h)) & MASK
        logits[s, total % self.vocab_size] = 20.0


class FailingHashModel(FastHashModel):
    """Spoils the cache and the logits of a sequence that holds the token `BAD`."""

    BAD = 60

    def finish(self, s: int, keys: np.ndarray, values: np.ndarray, logits: np.ndarray) -> None:
        super().finish(s, keys, values, logits)
        if self.BAD in keys[:, 0]:
            logits[s] = np.nan

    def forward(self, input_ids, positions, context, logits_index, out):  # type: ignore[no-untyped-def]
        super().forward(input_ids, positions, context, logits_index, out)
        loc, (cache,) = context.query_start_loc.tolist(), context.kv_caches
        for s in range(len(loc) - 1):
            if bool(out[s].isnan().any()):
                cache.view(2, -1, 2)[1, context.slot_mapping[loc[s] : loc[s + 1]], 0] += 1


class FastWindowModel(HashModel):
    """Layers with the given windows, None for none; each token's word in a layer is a hash of the words that it sees.

    As in a real model the word goes on to the next layer, and that of the last layer gives the next token. So a block
    that is read after it left its row, or one of another prefix, shows. Layers in ``vectors`` keep a single vector for
    each token, as a short convolution or an indexer does.
    """

    def __init__(
        self, windows: tuple[int | None, ...] = (None, 10), vocab_size: int = 61, vectors: tuple[int, ...] = ()
    ) -> None:
        super().__init__(vocab_size, max_position=4096)
        self.windows = windows
        self.kv_specs = tuple(
            VectorSpec(2, "float32", window) if layer in vectors else KVSpec(1, 2, 2, "float32", window)
            for layer, window in enumerate(windows)
        )

    def word(self, layer: int, x: int, position: int, past: list[int]) -> int:
        """What a token leaves in a layer; ``past`` are the words of the positions just before that it sees."""
        h = layer + 1
        for i, other in enumerate(past, position - len(past)):
            h = mix(h, other, i)
        return mix(h, x, position)

    def next_token(self, tokens: list[int]) -> int:
        words: list[list[int]] = [[] for _ in self.windows]
        for position, token in enumerate(tokens):
            x = token
            for layer, window in enumerate(self.windows):
                seen = position if window is None else min(position, window - 1)
                x = self.word(layer, x, position, words[layer][position - seen :])
                words[layer].append(x)
        return words[-1][-1] % self.vocab_size

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        logits_index: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        logits, size = out.numpy(), context.block_size
        logits[:] = 0
        loc, lengths, rows = (x.tolist() for x in (context.query_start_loc, context.seq_lens, context.rows))
        xs = input_ids.tolist()
        for layer, window in enumerate(self.windows):
            own = context.of(layer)
            tables, slots = own.block_tables.numpy(), own.slot_mapping.tolist()
            places, words = context.kv_caches[layer].numpy().reshape(-1, 2).T  # of keys and values the keys
            places[slots] = positions.numpy()  # every token's, padding's too, before any of them looks
            for s, length in enumerate(lengths):
                for t in range(loc[s], loc[s + 1]):
                    position = length - (loc[s + 1] - t)
                    first = 0 if window is None else max(0, position + 1 - window)
                    at = np.arange(first, position)
                    where = tables[rows[s], at // size].astype(np.int64) * size + at % size
                    if places[where].tolist() != at.tolist():
                        raise RuntimeError("the cache holds other positions than the table names")
                    xs[t] = self.word(layer, xs[t], position, [int(w) for w in words[where]])
                    words[slots[t]] = xs[t]
        for s in range(len(lengths)):
            if loc[s + 1] > loc[s]:
                logits[s, xs[loc[s + 1] - 1] % self.vocab_size] = 20.0
