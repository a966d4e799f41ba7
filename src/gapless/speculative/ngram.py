"""Drafts by looking up: where the row's latest tokens occurred before, they may go on in the same way.

The rule, for a row with the tokens t[0, L): among all e < L, let m(e) be how many tokens before e equal those before L,
at most ``max_ngram``. The longest match wins, then the rightmost; it must have ``min_ngram`` tokens. The drafts are
t[e], t[e + 1], ..., and where these reach the end of the row they go on with the drafts themselves, so that a text of
period P is continued with that period. No match, no drafts.

The idea is "prompt lookup decoding" (Saxena, 2023), here over prompt and output, on the device: the token table holds
the tokens that the host does not know yet.

Shape legend: see `gapless.speculative.base`.
"""

from __future__ import annotations

import torch

from gapless.attention.context import AttentionContext
from gapless.batch.plan import SeqFlag
from gapless.batch.row_params import Feature, Word
from gapless.speculative.base import Sequences


def lookup(tokens: torch.Tensor, num_drafts: int, min_ngram: int, max_ngram: int) -> torch.Tensor:
    """Drafts ``[num_drafts]``, or ``[0]``, for one row's ``tokens [L]``."""
    length = len(tokens)
    matches = torch.zeros(length, dtype=torch.int64)  # of the places e in [0, length)
    going_on = torch.ones(length, dtype=torch.bool)
    for k in range(min(max_ngram, length - 1)):
        going_on = going_on.clone()
        going_on[: k + 1] = False
        going_on[k + 1 :] &= tokens[: length - k - 1] == tokens[length - 1 - k]
        matches += going_on
    best = int(matches.max()) if length else 0
    if best < min_ngram:
        return tokens[:0]
    place = int(torch.nonzero(matches == best)[-1])
    return tokens[place + torch.arange(num_drafts) % (length - place)]


class NgramProposer:
    """See the module and `gapless.speculative.base.Proposer`. Runs on a CPU only."""

    samples = False
    state: tuple[torch.Tensor, ...] = ()

    def __init__(self, num_drafts: int, min_ngram: int, max_ngram: int) -> None:
        self._num_drafts, self._min, self._max = num_drafts, min_ngram, max_ngram

    def propose(self, sequences: Sequences, features: Feature) -> None:
        """See `gapless.speculative.base.Proposer`."""
        params, table = sequences.arena.params, sequences.arena.token_table
        columns = (sequences.rows, sequences.starts, sequences.flags)
        listed = zip(*(column.tolist() for column in columns), strict=True)  # sync-ok: on a CPU only
        for row, start, flags in listed:
            if flags & SeqFlag.DRAFTS:
                length = int(params[row, Word.LENGTH]) if flags & SeqFlag.DEVICE_START else start + 1
                drafts = lookup(table[row, :length], self._num_drafts, self._min, self._max)
                drafts = drafts[: sequences.layout.max_model_len - length]
                table[row, length : length + len(drafts)] = drafts
                params[row, Word.NUM_DRAFTS] = len(drafts)

    def follow(self, input_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> None:
        """Nothing: the token table has them."""

    def drop_pool(self) -> None:
        """Nothing is large."""

    def take_pool(self) -> None:
        """Nothing was dropped."""
