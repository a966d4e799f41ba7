"""Steps with drafts: what the runner does around model and sampler, beyond a plain step.

    draft     changes of the arena ; the proposer's drafts
    forward   place: true starts ; prepare ; expand: a sampler's sequence for each logit ; model
    sample    sampler ; accept: how many of the tokens count

The parts are enqueued on the compute stream, see `gapless.runner.graphs`; their kernels are those of
`gapless.speculative`. A step's output is tokens[L], counts[S], number of drafts[S], records[L, Record.COUNT].

L logits: of each token in a step without prompts, in their order; else W = ``query_width`` for each of S sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from gapless.attention.context import AttentionContext
from gapless.batch.arena import Arena
from gapless.batch.plan import StepPlan
from gapless.batch.row_layout import I32, Record, RowLayout
from gapless.batch.row_params import Feature
from gapless.batch.slot_layout import StepInputs
from gapless.device.base import Device
from gapless.runner.kernels import Kernels
from gapless.runner.keys import DRAWS, Key
from gapless.runner.prepare import StepIndices
from gapless.runner.slot import Slot
from gapless.speculative.base import DraftIndices, Sequences, Speculation


class DraftSteps:
    """See the module. Buffers are written by the compute stream only.

    Args:
        device, layout: see `gapless.runner.runner.Runner`.
        speculation: what drafts.
        arena: the words of all rows.
        num_blocks: of each group's pool.
        max_seqs: of a step, padded.
    """

    def __init__(
        self,
        device: Device,
        layout: RowLayout,
        speculation: Speculation,
        arena: Arena,
        num_blocks: Sequence[int],
        max_seqs: int,
    ) -> None:
        self._layout, self._arena, self._kernels = layout, arena, speculation.kernels
        self.query_width = speculation.query_width
        self.proposer = speculation.make_proposer(device, layout, num_blocks, max_seqs)
        s, n = max_seqs, max_seqs * self.query_width
        words = self._words = device.device_buffer((s + 2 * n,), torch.int32, "draft_words")
        places = self._places = device.device_buffer((2 * n,), torch.int64, "draft_places")
        self._indices = DraftIndices(
            words[:s], words[s : s + n], words[s + n :], places[:n], places[n:], self.query_width
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All buffers that a step writes."""
        return (self._words, self._places, *self.proposer.state)

    def features(self, features: Feature) -> Feature:
        """What of a step's features matters to its drafts."""
        return DRAWS if self.proposer.samples and features & Feature.SAMPLE else Feature.GREEDY

    # ---- what is enqueued -----------------------------------------------------------------------------------------

    def _sequences(self, step: StepInputs) -> Sequences:
        return Sequences(step.rows, step.starts, step.flags, step.query_start_loc, self._arena, self._layout)

    def _cut(self, key: Key, num_logits: int) -> DraftIndices:
        return self._indices.cut(key.num_seqs, num_logits, key.max_query_len is not None)

    def propose(self, key: Key, step: StepInputs, kernels: Kernels) -> Callable[[], None]:
        """The part ``draft``."""

        def work() -> None:
            kernels.apply_updates(step, self._arena)
            self.proposer.propose(self._sequences(step), key.features)

        return work

    def prepare(
        self, key: Key, step: StepInputs, indices: StepIndices, kernels: Kernels
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """What comes before the model, and the place ``[L]`` of each logit's token."""
        drafts = self._cut(key, num_logits(key.num_tokens, key.num_seqs, key.query_width, key.max_query_len))
        sequences = self._sequences(step)
        moved = dataclasses.replace(step, starts=drafts.starts)

        def work() -> None:
            self._kernels.place(sequences, drafts.starts)
            kernels.prepare(moved, self._arena, self._layout, indices)
            self._kernels.expand(sequences, indices.positions, drafts)

        return work, drafts.logits_index

    def follow(self, key: Key, indices: StepIndices, context: AttentionContext) -> None:
        """The model has run; the proposer computes what it needs of prompts."""
        if not key.decode_only and key.max_query_len is None:
            self.proposer.follow(indices.input_ids, indices.positions, context)

    def sampled(self, key: Key) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row, position and flags ``[L]`` of the sampler's sequences; a sample's T is its logits."""
        drafts = self._cut(key, key.num_tokens)
        return drafts.rows, drafts.positions, drafts.flags

    def accept(self, key: Key, slot: Slot, step: StepInputs, input_ids: torch.Tensor) -> Callable[[], None]:
        """What comes after the sampler."""
        n, s = key.num_tokens, key.num_seqs
        drafts, sequences = self._cut(key, n), self._sequences(step)
        counts, proposed = slot.out[n : n + s], slot.out[n + s : n + 2 * s]
        return lambda: self._kernels.accept(sequences, drafts, input_ids, slot.tokens_out(n), counts, proposed)


def num_logits(num_tokens: int, num_seqs: int, query_width: int, max_query_len: int | None) -> int:
    """L of a step of padded T tokens and S sequences."""
    if query_width == 1:
        return num_seqs
    return num_tokens if max_query_len is not None else num_seqs * query_width


def read(slot: Slot, plan: StepPlan, padded: int, num_logits: int) -> tuple[I32, I32 | None]:
    """Of a finished step with drafts, copied: int32 ``[S, W + 2]``, its tokens, how many of them are true, and how many
    drafts there were; and its log-probabilities ``[S, W, Record.COUNT]``, if it has any. Only after `d2h_done`.

    Args:
        slot: of the step.
        plan: of the step.
        padded: S of its graphs.
        num_logits: L of its graphs.
    """
    seqs, width, size = plan.num_seqs, plan.query_width, int(Record.COUNT)
    j = np.arange(width, dtype=np.int32)
    if plan.max_query_len is None:
        places: I32 = np.arange(seqs, dtype=np.int32)[:, None] * np.int32(width) + j
    else:  # what a sequence has not is repeated
        ends: I32 = np.cumsum(plan.query_lens, dtype=np.int32)[:, None]
        places = np.minimum(ends - plan.query_lens[:, None] + j, ends - 1)
    words, brought = slot.out_words, np.empty((seqs, width + 2), np.int32)
    brought[:, :width] = words[places]
    brought[:, width] = words[num_logits : num_logits + seqs]
    brought[:, width + 1] = words[num_logits + padded : num_logits + padded + seqs]
    if not plan.features & Feature.LOGPROBS:
        return brought, None
    first = num_logits + 2 * padded
    return brought, words[first : first + num_logits * size].reshape(num_logits, size)[places]
