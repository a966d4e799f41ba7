"""LFM2 and its mixture of experts: layers with a gated short convolution in place of attention.

    B, C, x = in_proj(h);   out = out_proj(C * conv(B * x))

with a causal depthwise convolution of a few taps and no activation. Its inputs ``B * x`` are kept in a paged cache of
their own (see `gapless.model.parts.short_conv`). Norms and feed-forward parts, experts among them, treat each token
alone and are the model's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from gapless.cache.spec import VectorSpec
from gapless.model.hybrid.layer import HybridLayer, Operations, require_conv, require_parts
from gapless.model.token_rows import PackedStep


class ShortConvLayer(HybridLayer):
    """A decoder layer with a short convolution."""

    def __init__(self, layer: nn.Module, operations: Operations, dtype: torch.dtype) -> None:
        super().__init__(layer, operations)
        conv = self.layer.conv
        taps, width = conv.conv.kernel_size[0], conv.conv.in_channels
        self.specs = (VectorSpec(width, str(dtype).removeprefix("torch."), window=taps),)

    def packed(self, hidden_states: torch.Tensor, step: PackedStep, kwargs: dict[str, Any]) -> torch.Tensor:
        """See `HybridLayer`."""
        layer, conv = self.layer, self.layer.conv
        b, c, x = conv.in_proj(layer.operator_norm(hidden_states)[0]).chunk(3, -1)
        mixed = conv.out_proj(c * self.convolve(b * x, step, 0, conv.conv))
        hidden_states = hidden_states + mixed[None]
        out: torch.Tensor = hidden_states + layer.feed_forward(layer.ffn_norm(hidden_states))
        return out


def hybrid(layer: nn.Module, where: str, model: PreTrainedModel, operations: Operations) -> HybridLayer | None:
    """For a layer with a convolution; None for a layer with attention.

    Raises:
        UnsupportedModelError: it is built in another way.
    """
    if not hasattr(layer, "conv"):
        return None
    conv: Any = layer.conv
    require_parts(layer, where, {"conv", "feed_forward", "operator_norm", "ffn_norm"})
    require_parts(conv, f"{where}.conv", {"conv", "in_proj", "out_proj"})
    require_conv(conv.conv, f"{where}.conv.conv", model.config.hidden_size, model.config.conv_L_cache, 1)
    return ShortConvLayer(layer, operations, model.dtype)
