"""CausalModel: what the pipeline asks of a model. The one implementation wraps ``transformers`` modules."""

from __future__ import annotations

from typing import Protocol

import torch

from gapless.attention.context import AttentionContext
from gapless.cache.spec import LayerSpec


class CausalModel(Protocol):
    """A decoder that runs packed tokens of many requests at once.

    Attributes:
        name: what start-up logs call it.
        kv_specs: one entry per layer that keeps something of the past, in the order of ``AttentionContext.kv_caches``.
        vocab_size: width of the logits.
        max_position: longest context the model was made for, in tokens.
        eos_token_ids: from the generation config, else the config; may be empty.
        weight_bytes: bytes of all parameters, shared ones once.
    """

    name: str
    kv_specs: tuple[LayerSpec, ...]
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    dtype: torch.dtype
    device: torch.device

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        logits_index: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Logits of chosen tokens; keys and values of all tokens are written to the cache on the way.

        Args:
            input_ids: int64 ``[T]``.
            positions: int64 ``[T]``.
            context: the step.
            logits_index: int64 ``[L]``, which of the T tokens get logits: the last of each sequence, L = S; more in
                steps with drafts. Where L = T and all sequences are short (``context.decode_only`` or
                ``max_query_len``), the order is that of the tokens.
            out: ``[L, vocab_size]`` in the model's dtype, where the logits go. It outlives the call, as whatever is
                allocated inside a captured graph does not.
        """
        ...
