"""DecoderModel: a described decoder as the engine's `CausalModel`.

Parameters stay the model's own: merged weights hold the data, and the parameters become views into them, so that an
optimizer that updates them in place updates what runs here.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from gapless.attention.context import AttentionContext
from gapless.cache.spec import LayerSpec
from gapless.lora.bank import AdapterBank, Part, Site
from gapless.model.base import CausalModel
from gapless.model.parts.decoder import Decoder
from gapless.model.parts.feed_forward import FeedForward
from gapless.model.parts.mixture import Mixture
from gapless.model.products.weight import Weight
from gapless.model.run.separate import AttendCached, Linear, Separate
from gapless.model.run.walk import walk

if TYPE_CHECKING:
    from gapless.model.products.choice import GatedProducts
    from gapless.model.run.few_tokens import FewTokens


class DecoderModel:
    """See the module and `gapless.model.base.CausalModel`.

    Args:
        model: the source of everything but the forward.
        decoder: its description.
        ops: `gapless.model.ops.triton` or `gapless.model.ops.reference`.
        attend: attention over a cache that holds the step's keys already.
    """

    def __init__(self, model: CausalModel, decoder: Decoder, ops: ModuleType, attend: AttendCached) -> None:
        self.name = model.name
        self.kv_specs: tuple[LayerSpec, ...] = model.kv_specs
        self.vocab_size = model.vocab_size
        self.max_position = model.max_position
        self.eos_token_ids = model.eos_token_ids
        self.weight_bytes = model.weight_bytes
        self.config = getattr(model, "config", None)
        self.dtype = model.dtype
        self.device = model.device
        self.decoder = decoder
        self._ops: Any = ops
        self._attend = attend
        self.linear: Linear = functional.linear
        self.small: FewTokens | None = None
        self.gated: GatedProducts | None = None
        self.bank: AdapterBank | None = None
        self._sites: dict[int, int] = {}

    def summary(self) -> list[tuple[str, str]]:
        """What runs as what, for the log."""
        layers = self.decoder.layers
        first, count = layers[0], len(layers)
        normed = " + q/k norm" if first.attention.q_norm is not None else ""
        described = [layer.mlp for layer in layers if isinstance(layer.mlp, FeedForward)]
        table = [
            ("q, k, v projections", f"one product in {count} layers"),
            (f"RoPE{normed} + cache write", f"one kernel in {count} layers"),
            ("residual add + norm", f"one kernel, {2 * count + 1} times"),
            ("last layer of prompts", "after the cache write only for tokens whose logits are asked"),
        ]
        if described:
            gate = described[0].gate
            what = f"{gate.activation} and gate" if gate.gated else gate.activation
            table.append((f"feed-forward with {what}", f"two products in {len(described)} layers"))
        mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, Mixture)]
        if mixtures:
            route, chosen = mixtures[0].router, f"{mixtures[0].router.count} of {mixtures[0].experts.count}"
            what = f"router and four kernels for all experts in {len(mixtures)} layers"
            table.append((f"experts, {chosen} by {route.score}", what))
        if left := count - len(described) - len(mixtures):
            table.append(("feed-forward of another kind", f"as its module in {left} layers"))
        if self.small is not None:
            table.append((f"decode of up to {self.small.limit} tokens", "norms, residuals, gates inside the products"))
        for sizes, _ in self.gated.chosen if self.gated is not None else ():
            table.append((f"gate, up, SiLU of {sizes[0]} to {sizes[-1]} tokens", f"one kernel in {count} layers"))
        return table

    def enable_small_batches(self) -> bool:
        """Run decode steps of few tokens by kernels made for them; False where they do not apply. Before capture."""
        from gapless.model.run.few_tokens import FewTokens, supported

        if supported(self.decoder.embedding.table):
            self.small = FewTokens(self.decoder, self._attend)
        return self.small is not None

    def enable_gated(self) -> None:
        """Compute gate, up and SiLU in one kernel where that is quicker. Before capture."""
        from gapless.model.products.choice import GatedProducts

        ups = [layer.mlp.up.data for layer in self.decoder.layers if isinstance(layer.mlp, FeedForward)]
        if ups and all(up.shape == ups[0].shape for up in ups):
            self.gated = GatedProducts(ups)

    def enable_prompt_embeds(self) -> int:
        """See `TransformersModel.enable_prompt_embeds`. A described decoder looks at ids nowhere else."""
        return self.decoder.embedding.table.shape[1]

    def enable_lora(self, *, slots: int, rank: int, ops: ModuleType) -> AdapterBank:
        """Let requests run with adapters, see `TransformersModel.enable_lora`. Steps with some of them do not take
        the path of few tokens. Before capture."""
        weights: list[Weight] = []
        for layer in self.decoder.layers:
            weights += [layer.attention.qkv, layer.attention.out]
            part = layer.mlp.shared if isinstance(layer.mlp, Mixture) else layer.mlp
            if isinstance(part, FeedForward):
                weights += [part.up, part.down]
        self._sites = {id(weight): i for i, weight in enumerate(weights)}
        sites = [Site(w.inputs, tuple(Part(name, outputs) for name, outputs in w.parts)) for w in weights]
        self.bank = AdapterBank(sites, rank=rank, slots=slots, dtype=self.dtype, ops=ops)
        return self.bank

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        logits_index: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        few = context.decode_only or context.max_query_len is not None
        every = few and len(logits_index) == len(input_ids)  # then they are in the order of the tokens
        asked = None if every else logits_index
        tokens = None
        if context.row_loras is not None and self.bank is not None:
            tokens = self.bank.tokens(context, len(input_ids))
        elif self.small is not None and few and len(input_ids) <= self.small.limit:
            walk(self.decoder, self.small, input_ids, positions, context, asked, out)
            return
        kernels = Separate(self._ops, self._attend, self.linear, self.gated, self.bank, tokens, self._sites)
        one_each = len(logits_index) == len(context.seq_lens)  # not so in a step with drafts
        all_asked = context.decode_only or not one_each or len(logits_index) >= len(input_ids)
        walk(self.decoder, kernels, input_ids, positions, context, asked, out, ends_only=not all_asked)
