"""What the pipeline asks of speculative decoding: a proposer, and three small kernels around the model.

Everything runs on the compute stream and waits for nothing. State that outlives a step lies in the rows' words
(`Word.LENGTH`, `Word.NUM_DRAFTS`, and the drafts themselves in the token table from the row's length on), and in what
a proposer allocates for itself.

Shape legend: S sequences, T tokens, K drafts of a sequence, W = K + 1, L logits. A step without prompts has logits of
every token, in their order, L = T; one with prompts W for each sequence, L = S * W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gapless.attention.context import AttentionContext
from gapless.batch.arena import Arena
from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import Feature
from gapless.device.base import Device


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a step as the slot brings them, and the rows' words.

    Attributes:
        rows, starts, flags: int32 ``[S]``. ``starts`` is not to be trusted where they say `SeqFlag.DEVICE_START`.
        query_start_loc: int32 ``[S + 1]``.
        arena, layout: the words of all rows, and where they lie.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    flags: torch.Tensor
    query_start_loc: torch.Tensor
    arena: Arena
    layout: RowLayout


@dataclass(frozen=True, slots=True)
class DraftIndices:
    """What the device derives for a step with drafts. One set for all slots: only the compute stream touches it.

    Attributes:
        starts: int32 ``[S]``, the true ones.
        rows, flags: int32 ``[L]``, what the sampler is given as its sequences.
        logits_index, positions: int64 ``[L]``, the token whose logits are meant, and the position after it.
        width: W.
        by_token: the logits are those of every token, else W for each sequence.
    """

    starts: torch.Tensor
    rows: torch.Tensor
    flags: torch.Tensor
    logits_index: torch.Tensor
    positions: torch.Tensor
    width: int
    by_token: bool = False

    def cut(self, num_seqs: int, num_logits: int, by_token: bool) -> DraftIndices:
        """The part for S = ``num_seqs`` and L = ``num_logits``."""
        longs = self.logits_index[:num_logits], self.positions[:num_logits]
        return DraftIndices(
            self.starts[:num_seqs], self.rows[:num_logits], self.flags[:num_logits], *longs, self.width, by_token
        )


class Proposer(Protocol):
    """Makes drafts. One for each runner, whose buffers it holds.

    Attributes:
        samples: drafts depend on whether rows draw; else a step's features do not matter to it.
        state: buffers that it reads and writes.
    """

    samples: bool
    state: tuple[torch.Tensor, ...]

    def propose(self, sequences: Sequences, features: Feature) -> None:
        """For each sequence whose flags say `SeqFlag.DRAFTS`: write up to K drafts into the token table from the row's
        length on, and how many into `Word.NUM_DRAFTS`. Any token of the vocabulary is a legal draft.

        Runs before the step's own forward, when the changes of the step are in the arena already.
        """
        ...

    def follow(self, input_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> None:
        """The model has computed these tokens ``[T]`` of a step with prompts in it."""
        ...

    def drop_pool(self) -> None:
        """Let go of what is large; no step is in flight."""
        ...

    def take_pool(self) -> None:
        """Take it again. ``state`` may name other buffers afterwards."""
        ...


class Place(Protocol):
    """See `gapless.speculative.steps.place`."""

    def __call__(self, sequences: Sequences, starts: torch.Tensor) -> None: ...


class Expand(Protocol):
    """See `gapless.speculative.steps.expand`."""

    def __call__(self, sequences: Sequences, positions: torch.Tensor, out: DraftIndices) -> None: ...


class Accept(Protocol):
    """See `gapless.speculative.steps.accept`."""

    def __call__(
        self,
        sequences: Sequences,
        indices: DraftIndices,
        input_ids: torch.Tensor,
        tokens: torch.Tensor,
        counts: torch.Tensor,
        proposed: torch.Tensor,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class DraftKernels:
    """What runs around the model in a step with drafts."""

    place: Place
    expand: Expand
    accept: Accept


MakeProposer = Callable[[Device, RowLayout, Sequence[int], int], Proposer]
"""``(device, layout, num_blocks, max_seqs)``, blocks of each group; its buffers are the device's."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding as the runner sees it.

    Attributes:
        num_drafts: K.
        kernels: for this device.
        make_proposer: see `MakeProposer`.
    """

    num_drafts: int
    kernels: DraftKernels
    make_proposer: MakeProposer

    @property
    def query_width(self) -> int:
        """W, most tokens that a sequence draws in one step."""
        return self.num_drafts + 1
