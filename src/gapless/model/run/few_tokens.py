"""Decode steps of few tokens: products that bring what stands around them along, each of which may start early.

A pre-norm layer is six kernels:

    qkv product (norm fused) > q/k norm, rotary embedding, cache write > attention > output product (residual add
    fused) > gate and up product (norm, activation fused) > down product (residual add fused)

The norm of a layer's input is prepared by the product before it, and the norm before the head by the last layer; see
`gapless.model.products.few_tokens` for how, and `gapless.device.dependent_launch` for the rule that makes early starts
safe. Where the choice prefers cuBLAS for a product, and around a norm that stands behind a part, the separate kernels
come back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from gapless.attention.context import AttentionContext
from gapless.attention.triton import MAX_DECODE_ROWS
from gapless.device.dependent_launch import LATE, OFF, supports_pdl
from gapless.model.ops import triton as ops
from gapless.model.parts.attention import Attention, heads_of
from gapless.model.parts.decoder import Decoder, Embedding, Head
from gapless.model.parts.feed_forward import FeedForward
from gapless.model.parts.mixture import Mixture
from gapless.model.parts.norm import Norm, Scaling
from gapless.model.products.choice import default
from gapless.model.products.config import GemmConfig, Workspace, workspace_size
from gapless.model.products.few_tokens import embed, glu, plain, residual
from gapless.model.products.rule import Product, bucket
from gapless.model.products.stream import Stream
from gapless.model.products.weight import Weight
from gapless.model.run.early import early_attend, early_rope
from gapless.model.run.separate import AttendCached, finish_logits, join, plain_gate

Choose = Callable[[Product], GemmConfig | None]


def supported(weight: torch.Tensor) -> bool:
    """Whether `FewTokens` is worth it and exact enough for weights like this.

    fp32 keeps the plain path, whose sums its tests compare. fp16 has no room for the product of the residual and a
    weight of the norm. Without dependent launch (before Hopper) it is neither measured nor shown to give equal bits.
    """
    return weight.dtype == torch.bfloat16 and supports_pdl(weight.device)


class FewTokens:
    """See the module and `gapless.model.run.walk.Kernels`. Ask `supported` first.

    Args:
        decoder: its weights are contiguous.
        attend: attention over a cache that holds the step's keys already.
        limit: the most tokens of a step.
        pdl: `OFF`, `LATE` or `EARLY`, see `gapless.device.dependent_launch`.
        choose: picks the kernel of each product.
        early_attention: launch the rotary and attention kernels so too; ``attend`` is then not used.

    Raises:
        ValueError: a weight is not contiguous.
    """

    def __init__(
        self,
        decoder: Decoder,
        attend: AttendCached,
        *,
        limit: int = 64,
        pdl: int = LATE,
        choose: Choose = default,
        early_attention: bool = True,
    ) -> None:
        table = decoder.embedding.table
        products = [*_products(decoder)]
        if not all(weight.data.is_contiguous() for _, weight in products) or not table.is_contiguous():
            raise ValueError("small batches need contiguous weights")
        self._attend = attend
        self._pdl = pdl if supports_pdl(table.device) else OFF
        self._early_attention = early_attention
        self.limit = limit
        self.workspace = Workspace(table.device)
        self.configs: dict[Product, GemmConfig | None] = {}
        for op, weight in products:
            for m in sorted({bucket(m) for m in range(1, limit + 1)}):
                product = Product(op, m, weight.outputs, weight.inputs)
                if product in self.configs:
                    continue
                self.configs[product] = config = choose(product)
                if config is not None:
                    self.workspace.reserve(*workspace_size(op, m, weight.outputs, config.fit(weight.inputs)))

    def _config(self, op: str, weight: Weight, tokens: int) -> GemmConfig | None:
        return self.configs[Product(op, bucket(tokens), weight.outputs, weight.inputs)]

    def begin(
        self, embedding: Embedding, ids: torch.Tensor, ahead: Norm | None, overrides: torch.Tensor | None
    ) -> Stream:
        if not _commutes(ahead):
            rows = embedding(ids, overrides)
            return Stream(rows, rows if ahead is None else ahead(rows, ops))
        assert ahead is not None
        assert ahead.weight is not None
        # The first kernel is an ordinary launch: whatever came before, the step begins after it.
        return embed(
            ids, embedding.table, ahead.weight, scale=embedding.scale, shift=ahead.scaling == Scaling.OFFSET,
            overrides=overrides, given=embedding.given,
        )  # fmt: skip

    def product(self, weight: Weight, x: Stream | torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        given = x if isinstance(x, Stream) else Stream(x, x)
        config = self._config("plain", weight, len(given.x))
        if config is None:
            return functional.linear(self.normed(given, norm), weight.data, weight.bias)
        eps = 0.0 if norm is None else norm.eps
        return plain(given.x, weight.data, config, self.workspace, bias=weight.bias, squares=given.squares, eps=eps,
                     pdl=self._pdl)  # fmt: skip

    def up(self, part: FeedForward, stream: Stream, norm: Norm | None) -> torch.Tensor:
        act = plain_gate(part.gate)
        if act is None or part.up.bias is not None:
            y = self.product(part.up, stream, norm)
            return part.gate(y) if act is None else ops.act_mul(y, act)
        config = self._config("glu", part.up, len(stream.x))
        if config is None:
            return ops.act_mul(functional.linear(self.normed(stream, norm), part.up.data), act)
        eps = 0.0 if norm is None else norm.eps
        return glu(stream.x, part.up.data, config, self.workspace, squares=stream.squares, eps=eps, pdl=self._pdl,
                   activation=act)  # fmt: skip

    def add(
        self, weight: Weight, x: torch.Tensor, before: Stream, after: Norm | None, ahead: Norm | None, gain: float
    ) -> Stream:
        if after is not None or gain != 1.0 or not _commutes(ahead):
            return join(ops, self.product(weight, x), before, after, ahead, gain)
        assert ahead is not None
        assert ahead.weight is not None
        config = self._config("residual", weight, len(x))
        if config is None:
            y = functional.linear(x, weight.data, weight.bias)
            return join(ops, y, before, None, ahead, 1.0)
        return residual(x, weight.data, config, self.workspace, before.residual, ahead.weight, bias=weight.bias,
                        pdl=self._pdl, shift=ahead.scaling == Scaling.OFFSET)  # fmt: skip

    def join(self, y: torch.Tensor, before: Stream, after: Norm | None, ahead: Norm | None, gain: float) -> Stream:
        return join(ops, y, before, after, ahead, gain)

    def normed(self, stream: Stream, norm: Norm | None) -> torch.Tensor:
        if stream.squares is None:
            return stream.x
        assert norm is not None
        return norm(stream.residual, ops)

    def _early(self, part: Attention, context: AttentionContext) -> int:
        rows = part.heads // part.kv_heads * (context.max_query_len or 1)
        return self._pdl if self._early_attention and rows <= MAX_DECODE_ROWS else OFF

    def queries(
        self, part: Attention, qkv: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        cache, scales = context.kv_caches[part.place], context.scales_of(part.place)
        pdl, norm = self._early(part, context), part.q_norm
        apart = norm is not None and (part.across_heads or norm.kind != "rms")
        if pdl == OFF or apart:
            return heads_of(part, qkv, positions, cache, context.slot_mapping, ops, scales)
        return early_rope(
            qkv, positions, part.rotary.cos, part.rotary.sin, cache, context.slot_mapping, part.heads,
            None if norm is None else norm.weight, None if part.k_norm is None else part.k_norm.weight,
            1e-6 if norm is None else norm.eps, pdl, scales, 0 if norm is None else int(norm.scaling),
            part.rotary.pairs,
        )  # fmt: skip

    def attend(self, part: Attention, q: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        cache, scales = context.kv_caches[part.place], context.scales_of(part.place)
        pdl = self._early(part, context)
        if pdl == OFF:
            return self._attend(q, cache, context, part.params, scales)
        return early_attend(q, cache, context, part.params, pdl, scales)

    def logits(self, head: Head, stream: Stream, norm: Norm, out: torch.Tensor) -> None:
        config = self._config("plain", head.weight, len(stream.x))
        if config is None:
            torch.mm(self.normed(stream, norm), head.weight.data.t(), out=out)
        else:
            plain(stream.x, head.weight.data, config, self.workspace, squares=stream.squares, eps=norm.eps, out=out,
                  pdl=self._pdl)  # fmt: skip
        finish_logits(head, out)

    def cut(self, context: AttentionContext, count: int) -> None:
        """Steps of few tokens have no tokens without logits but those of drafts, and keep them to the end."""


def _commutes(norm: Norm | None) -> bool:
    """Whether the norm is a weight and one factor a token, which commutes with a product."""
    return norm is not None and norm.kind == "rms"


def _products(decoder: Decoder) -> list[tuple[str, Weight]]:
    """Every product of a step, and what it does besides."""
    found: list[tuple[str, Weight]] = []
    layers = decoder.layers
    for i, layer in enumerate(layers):
        ahead = layers[i + 1].before_attention if i + 1 < len(layers) else decoder.norm
        fused = layer.multiplier == 1.0 and not layer.parallel
        out_fused = fused and layer.after_attention is None and _commutes(layer.before_mlp)
        found += [("plain", layer.attention.qkv), ("residual" if out_fused else "plain", layer.attention.out)]
        if isinstance(layer.mlp, FeedForward):
            glued = plain_gate(layer.mlp.gate) is not None and layer.mlp.up.bias is None
            down_fused = fused and layer.after_mlp is None and _commutes(ahead)
            found.append(("glu" if glued else "plain", layer.mlp.up))
            found.append(("residual" if down_fused else "plain", layer.mlp.down))
        elif isinstance(layer.mlp, Mixture) and layer.mlp.shared is not None:
            shared = layer.mlp.shared
            glued = plain_gate(shared.gate) is not None and shared.up.bias is None
            found += [("glu" if glued else "plain", shared.up), ("plain", shared.down)]
    return [*found, ("plain", decoder.head.weight)]
