"""Graphs: the parts of a step as they are enqueued on the compute stream, built from a key and a slot, and captured.

    draft     changes of the arena ; the proposer's drafts                     in steps in which some row drafts
    forward   prepare ; model                                                  in every step
    mask      masks into the rows                                              in steps that await masks
    sample    sampler ; in steps with drafts also: how many of them count      in every step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gapless.attention.context import AttentionContext
from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import Word
from gapless.batch.slot_layout import slot_layout, step_inputs
from gapless.device.base import Access, Device
from gapless.model.base import CausalModel
from gapless.runner.kernels import Kernels
from gapless.runner.keys import Key, graph_keys
from gapless.runner.masks import MaskRegion, mask_inputs
from gapless.runner.shapes import Shapes
from gapless.runner.slot import Slot
from gapless.runner.state import State


class Graphs:
    """See the module.

    Args:
        slots: of the ring.
        masks: of each slot; none if no step ever awaits any.
        state: what the parts read and write.
        device, model, layout, kernels, shapes, processed_logprobs: see `gapless.runner.runner.Runner`.

    Attributes:
        model: what the forwards run.
        captured: by slot and key.
    """

    def __init__(
        self,
        device: Device,
        model: CausalModel,
        layout: RowLayout,
        state: State,
        slots: Sequence[Slot],
        masks: Sequence[MaskRegion],
        *,
        kernels: Kernels,
        shapes: Shapes,
        processed_logprobs: bool,
    ) -> None:
        self.model = model
        self.device, self.layout, self._state = device, layout, state
        self.slots, self._masks = slots, masks
        self._kernels, self.shapes = kernels, shapes
        self._processed_logprobs = processed_logprobs
        self.captured: dict[tuple[int, Key], Callable[[], None]] = {}
        self._access: dict[str, list[Access]] = {}
        self.bind()

    def bind(self) -> None:
        """Say what the parts of a step touch, once the state has its pools."""
        state, words = self._state.tensors, self._state.arena.words
        lora, embeds = self._state.lora, self._state.embeds
        read = state if lora is None else (*state, lora.buffer)
        read = read if embeds is None else (*read, embeds.table)
        self._access = {
            "draft": [Access((slot.device, *state), state) for slot in self.slots],
            "forward": [Access((slot.device, *read), state) for slot in self.slots],
            "sample": [Access((slot.device, *state, slot.out), (words, slot.out)) for slot in self.slots],
            "mask": [Access((region.device, words), (words,)) for region in self._masks],
        }

    def drop(self) -> None:
        """Forget the graphs, and all that names the pools. No step is in flight."""
        self.captured.clear()
        self._access = {}

    # ---- the step -------------------------------------------------------------------------------------------------

    def launch(self, key: Key, slot: Slot) -> None:
        """Enqueue a part of the slot's step."""
        work = self.captured[slot.index, key] if self.shapes.capture else self.build(key, slot)
        self.device.launch(work, self._access[key.part][slot.index], key.part)

    # ---- capture --------------------------------------------------------------------------------------------------

    def keys(self) -> list[Key]:
        """See `gapless.runner.keys.graph_keys`."""
        state = self._state
        return graph_keys(
            self.shapes,
            masks=bool(self._masks),
            lora=state.lora is not None,
            query_width=1 if state.drafts is None else state.drafts.query_width,
            drafts_draw=state.drafts is not None and state.drafts.proposer.samples,
        )

    def capture(self, keys: Sequence[Key], *, run: bool = True) -> None:
        """Run each key once, so that every kernel is compiled, and capture it for each slot.

        The slots hold zeros, that is a step of no tokens: all of it is padding. Without ``run`` the kernels must have
        been compiled, and what the slots hold does not matter.
        """
        with self.device.thread_context():
            for key in keys:
                for slot in self.slots:
                    work = self.build(key, slot)
                    if slot.index == 0 and run:
                        work()
                        self.device.synchronize()
                    if self.shapes.capture:
                        self.captured[slot.index, key] = self.device.capture(work)
            self.device.synchronize()

    # ---- what is enqueued -----------------------------------------------------------------------------------------

    def build(self, key: Key, slot: Slot) -> Callable[[], None]:
        """The work of a part, as it is enqueued or captured."""
        if key.part == "mask":
            inputs = mask_inputs(self._masks[slot.index].device, self.layout)
            return lambda: self._kernels.mask(inputs, self._state.arena.words, self.layout)
        return {"draft": self._draft, "forward": self._forward, "sample": self._sample}[key.part](key, slot)

    def _draft(self, key: Key, slot: Slot) -> Callable[[], None]:
        assert self._state.drafts is not None
        step = step_inputs(slot.device, slot_layout(key.num_tokens, key.num_seqs))
        return self._state.drafts.propose(key, step, self._kernels)

    def _forward(self, key: Key, slot: Slot) -> Callable[[], None]:
        state, layout = self._state, self.layout
        step = step_inputs(slot.device, slot_layout(key.num_tokens, key.num_seqs))
        indices = state.indices.cut(key.num_tokens, key.num_seqs)
        logits_index = indices.logits_index
        row_loras = state.arena.params[:, Word.LORA] if key.lora else None
        drafts = state.drafts if key.query_width > 1 else None

        def prepare() -> None:
            self._kernels.prepare(step, state.arena, layout, indices)

        if drafts is not None:
            prepare, logits_index = drafts.prepare(key, step, indices, self._kernels)
        logits = state.logits[: len(logits_index)]
        tables = [(indices.slot_mapping[g], state.arena.block_tables[g]) for g in range(layout.num_groups)]

        def context_of(slot_mapping: torch.Tensor, block_tables: torch.Tensor) -> AttentionContext:
            return AttentionContext(
                kv_caches=state.kv,
                kv_scales=state.kv_scales,
                slot_mapping=slot_mapping,
                query_start_loc=step.query_start_loc,
                seq_lens=indices.seq_lens,
                rows=step.rows,
                block_tables=block_tables,
                block_size=layout.block_size,
                decode_only=key.decode_only,
                row_loras=row_loras,
                token_table=state.arena.token_table,
                max_query_len=key.max_query_len,
                prompt_embeds=None if state.embeds is None else state.embeds.table,
            )

        def work() -> None:
            prepare()
            context, *others = (context_of(*table) for table in tables)
            if others:
                context.group_of_layer, context.others = state.group_of_layer, tuple(others)
            self.model.forward(indices.input_ids, indices.positions, context, logits_index, logits)
            if state.drafts is not None:
                state.drafts.follow(key, indices, context)

        return work

    def _sample(self, key: Key, slot: Slot) -> Callable[[], None]:
        # Rows and flags lie before the tokens in the slot, at places that depend on the number of sequences alone.
        state, s, n = self._state, key.num_seqs, key.num_tokens
        step = step_inputs(slot.device, slot_layout(s, s))
        rows, positions, flags = step.rows, state.indices.sample_positions[:s], step.flags
        drafts = state.drafts if key.query_width > 1 else None
        if drafts is not None:
            rows, positions, flags = drafts.sampled(key)
        logits, out, records = state.logits[:n], slot.tokens_out(n), slot.records_out(n, 0 if drafts is None else 2 * s)
        accept = None if drafts is None else drafts.accept(key, slot, step, state.indices.input_ids)

        def work() -> None:
            self._kernels.sample(
                logits, state.arena.words, self.layout, rows, positions, flags, key.features, out, records,
                processed_logprobs=self._processed_logprobs,
            )  # fmt: skip
            if accept is not None:
                accept()

        return work
