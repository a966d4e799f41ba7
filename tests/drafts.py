"""Proposers for tests: drafts that are right as far as a chosen place, so that every acceptance length occurs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from gapless.attention.context import AttentionContext
from gapless.batch.plan import SeqFlag
from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import Feature, Word
from gapless.device.base import Device
from gapless.runner.kernels import reference_kernels
from gapless.speculative.base import DraftKernels, Sequences, Speculation
from gapless.speculative.steps import accept, expand, place


class OracleProposer:
    """Knows what every prompt is continued with, and spoils it from a random place on.

    Args:
        truths: whole sequences, prompt and continuation; found by the tokens that a row has so far.
        num_drafts: K.
        seed: of what is spoilt, together with the row's length: the same whenever it is asked.
        vocab_size: spoilt drafts are other tokens of it.
    """

    samples = False
    state: tuple[torch.Tensor, ...] = ()

    def __init__(self, truths: list[list[int]], num_drafts: int, seed: int, vocab_size: int) -> None:
        self._truths, self._num_drafts, self._seed, self._vocab = truths, num_drafts, seed, vocab_size

    def propose(self, sequences: Sequences, features: Feature) -> None:
        params, table = sequences.arena.params, sequences.arena.token_table
        for s, row in enumerate(sequences.rows.tolist()):
            flags = int(sequences.flags[s])
            if not flags & SeqFlag.DRAFTS:
                continue
            length = int(params[row, Word.LENGTH]) if flags & SeqFlag.DEVICE_START else int(sequences.starts[s]) + 1
            drafts = self._drafts(table[row, :length].tolist())
            table[row, length : length + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
            params[row, Word.NUM_DRAFTS] = len(drafts)

    def _drafts(self, tokens: list[int]) -> list[int]:
        rng = random.Random(f"{self._seed} {tokens}")
        known = next((t for t in self._truths if t[: len(tokens)] == tokens), [])
        right = known[len(tokens) :][: rng.randint(0, self._num_drafts)]
        count = rng.choice([self._num_drafts, self._num_drafts, rng.randint(0, self._num_drafts)])
        wrong = [rng.randrange(self._vocab) for _ in range(self._num_drafts)]
        return (right + wrong)[:count]

    def follow(self, input_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> None:
        pass

    def drop_pool(self) -> None:
        pass

    def take_pool(self) -> None:
        pass


REFERENCE = DraftKernels(place, expand, accept)


def oracle(truths: list[list[int]], num_drafts: int, seed: int, vocab_size: int) -> Speculation:
    """For the harness."""

    def make(device: Device, layout: RowLayout, num_blocks: Sequence[int], max_seqs: int) -> OracleProposer:
        return OracleProposer(truths, num_drafts, seed, vocab_size)

    return Speculation(num_drafts, REFERENCE, make)


SAMPLE: Callable[..., None] = reference_kernels().sample
