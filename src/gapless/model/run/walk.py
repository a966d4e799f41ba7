"""One walk through a description, for every executor.

What a decoder computes stands here once. How each piece is computed is up to the `Kernels` that an executor brings:
plain torch, which is the definition; one kernel for each operation, for prompts and mixed steps; or products that bring
norms, activations and residual adds along, for decode steps of few tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch.nn import functional

from gapless.attention.context import AttentionContext
from gapless.model.parts.attention import Attention
from gapless.model.parts.decoder import Decoder, Embedding, Head, Layer
from gapless.model.parts.feed_forward import FeedForward, Module
from gapless.model.parts.mixture import Mixture
from gapless.model.parts.norm import Norm
from gapless.model.products.stream import Stream
from gapless.model.products.weight import Weight


class Kernels(Protocol):
    """The pieces of a walk. T tokens, H hidden size."""

    def begin(
        self, embedding: Embedding, ids: torch.Tensor, ahead: Norm | None, overrides: torch.Tensor | None
    ) -> Stream:
        """The embedding's rows, or those of ``overrides``, prepared for the first norm."""
        ...

    def product(self, weight: Weight, x: Stream | torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``, of a stream behind its norm."""
        ...

    def up(self, part: FeedForward, stream: Stream, norm: Norm | None) -> torch.Tensor:
        """The product up and the activation."""
        ...

    def add(
        self, weight: Weight, x: torch.Tensor, before: Stream, after: Norm | None, ahead: Norm | None, gain: float
    ) -> Stream:
        """The product of x, normed by ``after`` and times ``gain``, added to the stream and prepared for ``ahead``."""
        ...

    def join(self, y: torch.Tensor, before: Stream, after: Norm | None, ahead: Norm | None, gain: float) -> Stream:
        """The same of a finished y ``[T, H]``."""
        ...

    def normed(self, stream: Stream, norm: Norm | None) -> torch.Tensor:
        """The stream behind its norm, ``[T, H]``."""
        ...

    def queries(
        self, part: Attention, qkv: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Queries ``[T, HQ, D]``; keys and values go to the cache. ``context`` is the layer's own."""
        ...

    def attend(self, part: Attention, q: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """``[T, HQ, D]``."""
        ...

    def logits(self, head: Head, stream: Stream, norm: Norm, out: torch.Tensor) -> None:
        """Of each token of the stream."""
        ...

    def cut(self, context: AttentionContext, count: int) -> None:
        """From now on the step's tokens are its sequences' last ones, as ``context`` says, ``count`` of them."""
        ...


def walk(
    decoder: Decoder,
    kernels: Kernels,
    ids: torch.Tensor,
    positions: torch.Tensor,
    context: AttentionContext,
    asked: torch.Tensor | None,
    out: torch.Tensor,
    *,
    ends_only: bool = False,
) -> None:
    """Logits of the tokens ``asked``, None for all in order, into ``out``.

    Args:
        ids, positions, context, out: see `gapless.model.base.CausalModel`.
        ends_only: ``asked`` are the sequences' last tokens; then the last layer computes for all tokens only what the
            cache keeps.
    """
    layers = decoder.layers
    stream = kernels.begin(decoder.embedding, ids, layers[0].before_attention, context.prompt_embeds)
    for i, layer in enumerate(layers):
        last = i + 1 == len(layers)
        ahead = decoder.norm if last else layers[i + 1].before_attention
        part = layer.attention
        own = context.of(part.place)
        qkv = kernels.product(part.qkv, stream, layer.before_attention)
        q = kernels.queries(part, qkv, positions, own)
        if last and ends_only and asked is not None:
            q, stream, own = q.index_select(0, asked), stream.select(asked), _ends_only(own)
            kernels.cut(own, len(asked))
            asked = None
        heads = kernels.attend(part, q, own).flatten(1)
        stream = _finish(kernels, layer, heads, stream, ahead)
    if asked is not None:
        stream = stream.select(asked)
    kernels.logits(decoder.head, stream, decoder.norm, out)


def _finish(kernels: Kernels, layer: Layer, heads: torch.Tensor, stream: Stream, ahead: Norm | None) -> Stream:
    """What comes after a layer's attention."""
    part, after, gain = layer.mlp, layer.after_mlp, layer.multiplier
    if layer.parallel:
        y = kernels.product(layer.attention.out, heads)
        if layer.after_attention is not None:
            y = layer.after_attention(y)
        own = stream
        if layer.before_mlp is not layer.before_attention:
            x = stream.residual if layer.before_mlp is None else layer.before_mlp(stream.residual)
            own = Stream(stream.residual, x)
        if isinstance(part, FeedForward):
            z = kernels.product(part.down, kernels.up(part, own, layer.before_mlp))
        else:
            z = _rest(kernels, part, kernels.normed(own, layer.before_mlp))
        return kernels.join(y + (z if after is None else after(z)), stream, None, ahead, gain)
    stream = kernels.add(layer.attention.out, heads, stream, layer.after_attention, layer.before_mlp, gain)
    if isinstance(part, FeedForward):
        act = kernels.up(part, stream, layer.before_mlp)
        return kernels.add(part.down, act, stream, after, ahead, gain)
    return kernels.join(_rest(kernels, part, kernels.normed(stream, layer.before_mlp)), stream, after, ahead, gain)


def _rest(kernels: Kernels, part: Mixture | Module, x: torch.Tensor) -> torch.Tensor:
    """A mixture of experts, or a module; of ``x [T, H]`` behind its norm."""
    if isinstance(part, Module):
        return part(x)
    y = part.routed(x)
    if part.shared is None:
        return y
    more = kernels.product(part.shared.down, kernels.up(part.shared, Stream(x, x), None))
    if part.shared_gate is not None:
        more = torch.sigmoid(functional.linear(x, part.shared_gate.data, part.shared_gate.bias)) * more
    return y + more


def _ends_only(context: AttentionContext) -> AttentionContext:
    """The same step as its sequences' last tokens alone see it, once every token's key and value is in the cache.

    A padding sequence becomes one token that sees one place of the null block.
    """
    count, lens = len(context.seq_lens), context.seq_lens
    starts = torch.arange(count + 1, dtype=torch.int32, device=lens.device)
    return replace(context, query_start_loc=starts, seq_lens=lens.clamp(min=1), decode_only=True, scratch={})
