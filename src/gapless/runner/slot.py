"""A slot: the memory and the events of one step in flight. The ring: as many slots as the pipeline is deep.

Life of a slot, and who may touch it:

    host     fills ``host``               only after `d2h_done` of the slot's previous step: the ring is as long as the
                                          pipeline is deep, so the step that had this slot has been committed
    h2d      copies host -> device        then records `h2d_done`
    compute  waits `h2d_done`; reads ``device``, writes ``out``; then records `compute_done`
    d2h      waits `compute_done`; copies out -> out_host; then records `d2h_done`
    host     waits `d2h_done`, copies the tokens out of ``out_host``; no view of it goes further
"""

from __future__ import annotations

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
        self, device: Device, index: int, num_tokens: int, num_seqs: int, max_updates: int, query_width: int = 1
    ) -> None:
        words = slot_words(num_tokens, num_seqs, max_updates)
        self.index = index
        self.host = device.host_buffer(4 * words, f"slot{index}.host").view(torch.int32)
        self.device = device.device_buffer((words,), torch.int32, f"slot{index}.device")
        out = num_seqs * query_width * (1 + int(Record.COUNT)) + (2 * num_seqs if query_width > 1 else 0)
        self.out = device.device_buffer((out,), torch.int32, f"slot{index}.out")
        self.out_host = device.host_buffer(4 * out, f"slot{index}.out_host").view(torch.int32)
        self.filling, self.reading = Access(writes=(self.host,)), Access(reads=(self.out_host,))
        self.h2d_done = device.event()
        self.compute_done = device.event()
        self.d2h_done = device.event()
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._words: I32 = self.host.numpy()
        self._filled = -1  # number of the plan that stands in the pinned region
        self._layout: SlotLayout | None = None
        self._carried = False
        self._out_pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.out_words: I32 = self.out_host.numpy()

    def fill(self, plan: StepPlan, layout: SlotLayout, null_row: int) -> int:
        """Write the plan, padded to ``layout``, into the pinned region; returns the words that are to be copied.

        What a plan repeats is not written again, if the slot's previous step was already one of those it repeats.
        """
        w = self._words
        repeats = self._layout is layout and plan.step - plan.repeats <= self._filled < plan.step
        if not repeats:
            self._fill_batch(plan, layout, null_row)
        if not (repeats and plan.carried and self._carried):
            self._fill_ids(plan, layout)
        self._filled, self._layout, self._carried = plan.step, layout, plan.carried
        w[layout.starts : layout.starts + len(plan.starts)] = plan.starts
        w[NUM_UPDATES] = len(plan.updates)
        used = used_words(plan, layout)
        if used > layout.updates:
            w[layout.updates : used] = plan.updates.reshape(-1)
        return used

    def _fill_batch(self, plan: StepPlan, layout: SlotLayout, null_row: int) -> None:
        w, s, t, n_seqs = self._words, plan.num_seqs, plan.num_tokens, layout.num_seqs
        w[NUM_TOKENS], w[NUM_SEQS] = t, s
        w[layout.rows : layout.rows + s] = plan.rows
        loc = layout.query_start_loc
        w[loc] = 0
        np.cumsum(plan.query_lens, out=w[loc + 1 : loc + 1 + s])
        w[layout.flags : layout.flags + s] = plan.flags
        if s < n_seqs:
            w[layout.rows + s : layout.rows + n_seqs] = null_row
            w[layout.starts + s : layout.starts + n_seqs] = 0
            w[loc + 1 + s : loc + 1 + n_seqs] = t
            w[layout.flags + s : layout.flags + n_seqs] = 0

    def _fill_ids(self, plan: StepPlan, layout: SlotLayout) -> None:
        w, t, n_tokens = self._words, plan.num_tokens, layout.num_tokens
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
        """Where a step writes the tokens of its logits: ``[L]``, one for each sequence without drafts."""
        return self.out[:num_logits]

    def records_out(self, num_logits: int, counts: int = 0) -> torch.Tensor:
        """Where it writes log-probabilities ``[L, Record.COUNT]``: behind the tokens, and ``counts`` words that a step
        with drafts has between them."""
        first, size = num_logits + counts, int(Record.COUNT)
        return self.out[first : first + num_logits * size].view(num_logits, size)

    def used_out(self, num_logits: int, records: bool, counts: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The part of the pinned output twin and of the output that the step's copy must bring back."""
        words = counts + (num_logits * (1 + int(Record.COUNT)) if records else num_logits)
        pair = self._out_pairs.get(words)
        if pair is None:
            pair = self._out_pairs[words] = (self.out_host[:words], self.out[:words])
        return pair

    def read(self, num_seqs: int) -> I32:
        """The step's tokens ``[S]``, copied. Only after `d2h_done`."""
        return self.out_words[:num_seqs].copy()

    def read_records(self, num_seqs: int, padded: int) -> I32:
        """The step's log-probabilities ``[S, Record.COUNT]``, copied. Only after `d2h_done`."""
        size = int(Record.COUNT)
        return self.out_words[padded : padded + num_seqs * size].reshape(num_seqs, size).copy()


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
