"""State: everything on the device that outlives a step, and the indices that one step derives from it.

Written by the compute stream only. All of it has fixed addresses, since graphs hold them; the KV pools alone may be
given back and taken again, together with the graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gapless.attention.kv_format import kv_scales
from gapless.batch.arena import arena_views
from gapless.batch.row_layout import RowLayout
from gapless.cache.groups import group_of
from gapless.cache.spec import StateSpec
from gapless.device.base import Device
from gapless.lora.bank import AdapterBank
from gapless.model.base import CausalModel
from gapless.runner.draft_steps import DraftSteps
from gapless.runner.embeds import EmbedMemory
from gapless.runner.lora_memory import LoraMemory
from gapless.runner.prepare import StepIndices
from gapless.speculative.base import Speculation


class State:
    """See the module.

    Args:
        device, model, layout: see `gapless.runner.runner.Runner`.
        num_blocks: of each group's pool.
        max_tokens, max_seqs: of a step, padded.
        adapters, speculation: or None.
        embeds: rows of the table of embeddings, and their width; (0, 0) for none.
        depth: slots in the ring.

    Attributes:
        arena: the words of all rows.
        kv: a pool for each layer, by the model's ``kv_specs``; empty while they are given back.
        kv_scales: of each layer, see `gapless.attention.kv_format`.
        group_of_layer: which block table each layer has.
        indices, logits: of the latest step.
        lora: the adapters, or None.
        embeds: the embeddings that requests bring, or None.
        drafts: what steps with drafts need, or None.
    """

    def __init__(
        self,
        device: Device,
        model: CausalModel,
        layout: RowLayout,
        *,
        num_blocks: Sequence[int],
        max_tokens: int,
        max_seqs: int,
        adapters: AdapterBank | None,
        speculation: Speculation | None,
        embeds: tuple[int, int] = (0, 0),
        depth: int = 1,
    ) -> None:
        self._device, self._specs, self._layout, self._num_blocks = device, model.kv_specs, layout, num_blocks
        self.arena = arena_views(device.device_buffer((layout.num_words,), torch.int32, "arena"), layout)
        self.group_of_layer = tuple(
            group_of(spec.window, layout.windows) if spec.paged else 0 for spec in model.kv_specs
        )
        self.kv: list[torch.Tensor] = []
        self.kv_scales = kv_scales(model.kv_specs, device.torch_device)
        self._take_kv()
        t, s, g = max_tokens, max_seqs, layout.num_groups
        ints = device.device_buffer(((2 + g) * t + 2 * s,), torch.int64, "indices")
        lens = device.device_buffer((s,), torch.int32, "seq_lens")
        slots, rest = ints[2 * t : (2 + g) * t].view(g, t), ints[(2 + g) * t :]
        self.indices = StepIndices(ints[:t], ints[t : 2 * t], slots, lens, rest[:s], rest[s:])
        self._index_buffers = (ints, lens)
        query_width = 1 if speculation is None else speculation.query_width
        self.logits = device.device_buffer((s * query_width, model.vocab_size), model.dtype, "logits")
        self.lora = None if adapters is None else LoraMemory(device, adapters)
        self.embeds = EmbedMemory(device, *embeds, model.dtype, depth) if embeds[0] else None
        self.drafts: DraftSteps | None = None
        if speculation is not None:
            self.drafts = DraftSteps(device, layout, speculation, self.arena, num_blocks, s)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All buffers that a step writes."""
        own = (self.arena.words, *self.kv, *self._index_buffers, self.logits)
        return own if self.drafts is None else (*own, *self.drafts.tensors)

    def take_pools(self) -> None:
        """The KV pools, zeroed."""
        self._take_kv()
        if self.drafts is not None:
            self.drafts.proposer.take_pool()

    def _take_kv(self) -> None:
        layout = self._layout
        for i, (spec, group) in enumerate(zip(self._specs, self.group_of_layer, strict=True)):
            if isinstance(spec, StateSpec):
                shape = spec.shape(layout.num_rows)
            else:
                shape = spec.shape(self._num_blocks[group], layout.block_size)
            self.kv.append(self._device.device_buffer(shape, getattr(torch, spec.dtype), f"kv{i}"))

    def drop_pools(self) -> None:
        """Let go of the KV pools; nothing may name them any more."""
        for i in range(len(self.kv)):
            self._device.release_buffer(f"kv{i}")
        self.kv.clear()
        if self.drafts is not None:
            self.drafts.proposer.drop_pool()
