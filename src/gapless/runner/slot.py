"""A slot: the memory and the events of one step in flight. The ring: as many slots as the pipeline is deep.

Life of a slot, and who may touch it:

    host     fills ``host``               only after `d2h_done` of the slot's previous step: the ring is as long as the
                                          pipeline is deep, so the step that had this slot has been committed
    h2d      copies host -> device        then records `h2d_done`
    compute  waits `h2d_done`; reads ``device``, writes ``out``; then records `compute_done`
    d2h      waits `compute_done`; copies out -> out_host; then records `d2h_done`
    host     waits `d2h_done`, copies the tokens out of ``out_host``; no view of it leaves `Slot.read`
"""

from __future__ import annotations

import operator

import numpy as np
import torch

from gapless.batch.plan import StepPlan
from gapless.batch.row_layout import I32, Record
from gapless.batch.slot_layout import NUM_SEQS, NUM_TOKENS, NUM_UPDATES, SlotLayout, slot_words, used_words
from gapless.device.base import Access, Device

MAX_PAIRS = 1024


class Slot:
    """Pinned region, device twin, output, pinned output twin, and the three events."""

    def __init__(
        self, device: Device, index: int, num_tokens: int, num_seqs: int, max_updates: int, width: int = 1
    ) -> None:
        words = slot_words(num_tokens, num_seqs, max_updates)
        self.index = index
        self.host = device.host_buffer(4 * words, f"slot{index}.host").view(torch.int32)
        self.device = device.device_buffer((words,), torch.int32, f"slot{index}.device")
        out = num_seqs * width * (1 + int(Record.COUNT)) + (2 * num_seqs if width > 1 else 0)
        self.out = device.device_buffer((out,), torch.int32, f"slot{index}.out")
        self.out_host = device.host_buffer(4 * out, f"slot{index}.out_host").view(torch.int32)
        self.filling, self.reading = Access(writes=(self.host,)), Access(reads=(self.out_host,))
        self.h2d_done = device.event()
        self.compute_done = device.event()
        self.d2h_done = device.event()
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._words: I32 = self.host.numpy()
        self._lasting: tuple[object, ...] = (None,) * 9  # what of a plan stands in the pinned region
        self._out_pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._out_words: I32 = self.out_host.numpy()

    def fill(self, plan: StepPlan, layout: SlotLayout, null_row: int) -> int:
        """Write the plan, padded to ``layout``, into the pinned region; returns the words that are to be copied.

        Plans are frozen, and those of a batch that goes on share all but their starts and updates. What is the same
        object as in the slot's previous step is there already.
        """
        w = self._words
        lasting = (
            layout, plan.rows, plan.query_lens, plan.samples, plan.input_ids, plan.carry,
            plan.scores, plan.drafts, plan.follows,
        )  # fmt: skip
        if not all(map(operator.is_, lasting, self._lasting)):
            self._fill_lasting(plan, layout, null_row)
            self._lasting = lasting
        w[layout.starts : layout.starts + len(plan.starts)] = plan.starts
        w[NUM_UPDATES] = len(plan.updates)
        used = used_words(plan, layout)
        if used > layout.updates:
            w[layout.updates : used] = plan.updates.reshape(-1)
        return used

    def _fill_lasting(self, plan: StepPlan, layout: SlotLayout, null_row: int) -> None:
        w, s, t = self._words, plan.num_seqs, plan.num_tokens
        n_seqs, n_tokens = layout.num_seqs, layout.num_tokens
        w[NUM_TOKENS], w[NUM_SEQS] = t, s
        w[layout.rows : layout.rows + s] = plan.rows
        loc = layout.query_start_loc
        w[loc] = 0
        np.cumsum(plan.query_lens, out=w[loc + 1 : loc + 1 + s])
        w[layout.flags : layout.flags + s] = plan.samples if plan.scores is None else plan.samples + 2 * plan.scores
        if plan.drafts is not None and plan.follows is not None:
            w[layout.flags : layout.flags + s] += 4 * plan.follows + 8 * plan.drafts
        if s < n_seqs:
            w[layout.rows + s : layout.rows + n_seqs] = null_row
            w[layout.starts + s : layout.starts + n_seqs] = 0
            w[loc + 1 + s : loc + 1 + n_seqs] = t
            w[layout.flags + s : layout.flags + n_seqs] = 0
        w[layout.input_ids : layout.input_ids + t] = plan.input_ids
        carry = w[layout.carry : layout.updates].view(np.uint8)
        carry[:t] = plan.carry
        if t < n_tokens:
            w[layout.input_ids + t : layout.input_ids + n_tokens] = 0
            carry[t:n_tokens] = 0

    def used(self, words: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``words`` words of the device twin and of the pinned region. Cut once: a steady batch asks for the
        same length again and again."""
        pair = self._pairs.get(words)
        if pair is None:
            if len(self._pairs) > MAX_PAIRS:
                self._pairs.clear()
            pair = self._pairs[words] = (self.device[:words], self.host[:words])
        return pair

    def tokens_out(self, num_logits: int) -> torch.Tensor:
        """Where a step writes the tokens of its logits: ``[S]``, with drafts ``[L]``."""
        return self.out[:num_logits]

    def counts_out(self, padded: int, num_logits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a step with drafts writes how many of the tokens are true, and how many drafts there were: ``[S]``."""
        first = num_logits
        return self.out[first : first + padded], self.out[first + padded : first + 2 * padded]

    def records_out(self, num_logits: int, drafts_of: int = 0) -> torch.Tensor:
        """Where it writes log-probabilities ``[L, Record.COUNT]``: behind all of these. ``drafts_of`` is the padded S
        of a step with drafts."""
        first = num_logits + 2 * drafts_of
        return self.out[first : first + num_logits * int(Record.COUNT)].view(num_logits, int(Record.COUNT))

    def used_out(self, num_logits: int, records: bool, drafts_of: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The part of the pinned output twin and of the output that the step's copy must bring back."""
        words = num_logits * (1 + int(Record.COUNT)) if records else num_logits
        words += 2 * drafts_of
        pair = self._out_pairs.get(words)
        if pair is None:
            pair = self._out_pairs[words] = (self.out_host[:words], self.out[:words])
        return pair

    def read(self, num_seqs: int) -> I32:
        """The step's tokens ``[S]``, copied. Only after `d2h_done`."""
        return self._out_words[:num_seqs].copy()

    def read_records(self, num_seqs: int, padded: int) -> I32:
        """The step's log-probabilities ``[S, Record.COUNT]``, copied. Only after `d2h_done`."""
        width = int(Record.COUNT)
        return self._out_words[padded : padded + num_seqs * width].reshape(num_seqs, width).copy()

    def read_drafts(self, places: I32, padded: int, num_logits: int) -> I32:
        """Of a step with drafts ``[S, W + 2]``: tokens, how many are true, how many drafts there were. A copy.

        ``places [S, W]`` says which of the logits are each sequence's.
        """
        seqs, width = places.shape
        brought = np.empty((seqs, width + 2), np.int32)
        words = self._out_words
        brought[:, :width] = words[places]
        brought[:, width] = words[num_logits : num_logits + seqs]
        brought[:, width + 1] = words[num_logits + padded : num_logits + padded + seqs]
        return brought

    def read_draft_records(self, places: I32, padded: int, num_logits: int) -> I32:
        """Its log-probabilities ``[S, W, Record.COUNT]``, copied."""
        first, size = num_logits + 2 * padded, int(Record.COUNT)
        records: I32 = self._out_words[first : first + num_logits * size].reshape(num_logits, size)[places]
        return records


class Ring:
    """Slots used in turn."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        self._next = 0

    def take(self) -> Slot:
        """The slot of the next step; its previous step must have been waited for."""
        slot = self.slots[self._next]
        self._next = (self._next + 1) % len(self.slots)
        return slot
