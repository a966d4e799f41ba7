"""Qwen4-Exp: linear attention, sparse attention, and per-layer embeddings, packed.

A layer reads and writes ``hc_count`` residual streams of H numbers. Before some layers with linear attention stand
per-layer embeddings: rows of a hashed n-gram memory, gated by each stream, through a dilated short convolution (see
`gapless.model.parts.ple`). Linear attention is the gated delta rule behind a short convolution of its own; the other
layers attend to blocks that an indexer chose (`gapless.model.parts.sparse_attention`). Streams, norms, projections and
experts treat each token alone and are the model's own modules.

Kept by a layer: the inputs of its convolutions, paged; the matrices of the delta rule, by row; keys and values, and
index keys, paged. While no context can be long enough for the indexer to leave a block out, its layers run the plain
paged attention and keep no index keys.

Shape legend: T tokens, H hidden size, HC streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from gapless.attention.context import AttentionParams
from gapless.attention.kv_format import put, scale_of
from gapless.cache.spec import KVSpec, StateSpec, VectorSpec
from gapless.errors import UnsupportedModelError
from gapless.model.hybrid.layer import HybridLayer, Operations, require_conv, require_parts
from gapless.model.parts.ple import NGramHash, ngram_ids
from gapless.model.parts.sparse_attention import SparseParams, sparse_attend, write_index_keys
from gapless.model.token_rows import PackedStep


class StreamsLayer(HybridLayer):
    """What both kinds of layers share: residual streams around a mixer, then around the experts."""

    def packed(self, hidden_states: torch.Tensor, step: PackedStep, kwargs: dict[str, Any]) -> torch.Tensor:
        """``[1, T, HC * H]`` to the same."""
        layer = self.layer
        hidden_states = self.before(hidden_states, step)
        x, streams, weights = layer.attn_hyper_connection(hidden_states)
        streams = _inject(streams, self.mix(x[0], step, kwargs)[None], weights)
        x, streams, weights = layer.mlp_hyper_connection(streams)
        return _inject(streams, layer.mlp(x), weights)

    def before(self, hidden_states: torch.Tensor, step: PackedStep) -> torch.Tensor:
        """What comes before the mixer."""
        return hidden_states

    def mix(self, x: torch.Tensor, step: PackedStep, kwargs: dict[str, Any]) -> torch.Tensor:
        """The part that looks at other tokens: ``[T, H]`` to the same."""
        raise NotImplementedError


class LinearLayer(StreamsLayer):
    """Linear attention, with or without per-layer embeddings before it."""

    def __init__(self, layer: nn.Module, operations: Operations, window: int, dtype: str, num_drafts: int) -> None:
        super().__init__(layer, operations)
        mixer = self.layer.linear_attn
        self.specs = (
            VectorSpec(mixer.conv_dim, dtype, window=window),
            StateSpec((mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim), "float32", 1 + num_drafts),
        )
        self.hash: NGramHash | None = None
        self.lookup: Callable[[torch.Tensor], torch.Tensor] | None = None
        ple = getattr(self.layer, "ple", None)
        if ple is not None:
            self.lookup = ple.ple_embedding.ngram_embedding
            if operations.on_gpu and ple.ple_embedding.ngram_embedding.weight.device.type == "cpu":
                from gapless.model.parts.ple_host import HostEmbedding

                self.lookup = HostEmbedding(ple.ple_embedding.ngram_embedding)
            self.specs += (VectorSpec(ple.conv1d.in_channels, dtype, window=window),)
            table = ple.ple_embedding
            self.hash = NGramHash(
                table.ngram_size,
                table.eos_token_id,
                table.layer_multipliers,
                table.ngram_heads_vocab_sizes,
                table.ngram_heads_offsets,
            )

    def before(self, hidden_states: torch.Tensor, step: PackedStep) -> torch.Tensor:
        """Add the per-layer embeddings to each stream."""
        if self.hash is None or self.lookup is None:
            return hidden_states
        layer = self.layer
        ple, token_table = layer.ple, step.context.token_table
        if token_table is None:
            raise RuntimeError("per-layer embeddings need the token table of the step")
        streams = (ple.hc_count, ple.hidden_size)
        ids = ngram_ids(token_table, step.token_rows, step.positions, self.hash)
        embedded = self.lookup(ids).flatten(-2)
        key = ple.norm_key(ple.key_proj(embedded)).unflatten(-1, streams)
        query = ple.norm_query(hidden_states[0]).unflatten(-1, streams)
        gate = (key * query).sum(-1, keepdim=True) / math.sqrt(ple.hidden_size)
        gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
        gated = (gate.sigmoid() * ple.value_proj(embedded)[:, None]).flatten(-2)
        mixed = self.convolve(ple.norm_conv(gated), step, 2, ple.conv1d, dilation=self.hash.size, silu=True)
        added: torch.Tensor = gated + mixed
        return hidden_states + added[None]

    def mix(self, x: torch.Tensor, step: PackedStep, kwargs: dict[str, Any]) -> torch.Tensor:
        """The gated delta rule behind its convolution."""
        layer = self.layer
        mixer, context = layer.linear_attn, step.context
        mixed = self.convolve(mixer.in_proj_qkv(x), step, 0, mixer.conv1d, silu=True)
        q, k, v = torch.split(mixed, [mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
        decay = -mixer.A_log.float().exp() * functional.softplus(mixer.in_proj_a(x).float() + mixer.dt_bias)
        out = self.operations.gated_delta_rule(
            q.view(len(x), -1, mixer.head_k_dim),
            k.view(len(x), -1, mixer.head_k_dim),
            v.view(len(x), -1, mixer.head_v_dim),
            decay,
            mixer.in_proj_b(x).sigmoid(),
            context.kv_caches[self.places[1]],
            context.query_start_loc,
            context.seq_lens,
            context.rows,
        )
        gate = mixer.in_proj_z(x).reshape(-1, mixer.head_v_dim)
        normed = mixer.norm(out.reshape(-1, mixer.head_v_dim), gate)
        result: torch.Tensor = mixer.out_proj(normed.view(len(x), -1))
        return result


class SparseLayer(StreamsLayer):
    """Attention to chosen blocks, or to everything while nothing can be left out."""

    def __init__(
        self, layer: nn.Module, operations: Operations, config: Any, dtype: str, rotary: nn.Module, max_len: int
    ) -> None:
        super().__init__(layer, operations)
        mixer = self.layer.self_attn
        indexer = mixer.indexer
        self.rotary = rotary
        self.params = SparseParams(indexer.compress_ratio, indexer.block_topk, float(mixer.scaling))
        self.plain = self.params.covers(max_len)
        self.specs = (KVSpec(config.num_key_value_heads, mixer.head_dim, mixer.head_dim, dtype),)
        if not self.plain:
            self.specs += (VectorSpec(2 * indexer.index_head_dim, dtype),)

    def mix(self, x: torch.Tensor, step: PackedStep, kwargs: dict[str, Any]) -> torch.Tensor:
        """Gated attention of the tokens ``x``."""
        layer = self.layer
        mixer, place = layer.self_attn, self.places[0]
        size, context, cache = mixer.head_dim, step.context.of(place), step.context.kv_caches[place]
        scales = step.context.scales_of(place)
        cos, sin = (part[0] for part in kwargs["position_embeddings"])
        q, gate = mixer.q_proj(x).view(len(x), -1, 2 * size).chunk(2, -1)
        q = rotate(mixer.q_norm(q), cos, sin)
        k = rotate(mixer.k_norm(mixer.k_proj(x).view(len(x), -1, size)), cos, sin)
        v = mixer.v_proj(x).view(len(x), -1, size)
        if self.plain:
            out = step.attend(q, k, v, cache, context, AttentionParams(self.params.scale), scales)
        else:
            out = self._sparse(x, q, k, v, step, cos, sin)
        result: torch.Tensor = mixer.o_proj(out.reshape(len(x), -1) * gate.reshape(len(x), -1).sigmoid())
        return result

    def _sparse(
        self,
        x: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        step: PackedStep,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        layer = self.layer
        indexer, place = layer.self_attn.indexer, self.places[0]
        own, cache, index_cache = step.context.of(place), *(step.context.kv_caches[i] for i in self.places)
        size, params, positions = indexer.index_head_dim, self.params, step.positions
        starts_cos, starts_sin = self._block_starts(x, step)

        def finish(means: torch.Tensor) -> torch.Tensor:
            return rotate(indexer.k_layernorm(means)[:, None], starts_cos, starts_sin)[:, 0]

        index_q, index_k = indexer.index_qk_proj(x).split([indexer.index_n_heads * size, size], -1)
        index_q = rotate(indexer.q_layernorm(index_q.unflatten(-1, (-1, size))), cos, sin)
        write_index_keys(
            index_k, index_cache, own.block_tables, own.slot_mapping, step.token_rows, positions, params.ratio, finish
        )
        scales = step.context.scales_of(place)
        for i, value in enumerate((k, v)):
            put(cache[i].view(-1, *cache.shape[3:]), own.slot_mapping, value, scale_of(scales, i))
        if self.operations.on_gpu:
            from gapless.model.parts import sparse_attention_triton

            return sparse_attention_triton.sparse_attend(
                q, index_q, cache, index_cache, own.block_tables, step.token_rows, positions, params, scales
            )
        return sparse_attend(
            q, index_q, cache, index_cache, own.block_tables, own.query_start_loc, own.seq_lens, own.rows, params,
            scales,
        )  # fmt: skip

    def _block_starts(self, x: torch.Tensor, step: PackedStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the place where a block that ends at each token begins; the same for all layers."""
        name = f"qwen4_exp/starts/{self.params.ratio}"
        made = step.context.scratch.get(name)
        if made is None:
            starts = (step.positions - self.params.ratio + 1).clamp_min(0)
            cos, sin = self.rotary(x, starts.view(1, 1, -1).expand(3, 1, -1))
            made = step.context.scratch[name] = (cos[0], sin[0])
        cos, sin = made
        return cos, sin


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first numbers of each head of ``x [T, heads, D]``; cos and sin ``[T, rotated]``, halves equal."""
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    a, b = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]
    return torch.cat((turned, rest), -1)


def _window(config: Any) -> int:
    """Of all convolutions: the widest one's, so that they share a block table. The others keep a few inputs more."""
    ple = (config.ple_conv_kernel_size - 1) * config.ngram_size + 1 if config.ple_layer_ids else 0
    return int(max(config.linear_conv_kernel_dim, ple))


def _inject(streams: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Add ``x [1, T, H]`` to each stream of ``[1, T, HC * H]``, by ``weights [1, T, HC]``."""
    return streams + (x.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)


def hybrid(
    layer: nn.Module,
    where: str,
    model: PreTrainedModel,
    operations: Operations,
    *,
    max_model_len: int,
    num_drafts: int,
) -> HybridLayer:
    """For any layer of the model.

    Raises:
        UnsupportedModelError: it is built in another way.
    """
    config: Any = model.config
    base: Any = model.base_model
    dtype = str(model.dtype).removeprefix("torch.")
    shared = {"mlp", "attn_hyper_connection", "mlp_hyper_connection"}
    if hasattr(layer, "linear_attn"):
        mixer: Any = layer.linear_attn
        ple: Any = getattr(layer, "ple", None)
        require_parts(layer, where, shared | {"linear_attn"} | ({"ple"} if ple is not None else set()))
        names = {"conv1d", "norm", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
        require_parts(mixer, f"{where}.linear_attn", names)
        require_conv(mixer.conv1d, f"{where}.linear_attn.conv1d", mixer.conv_dim, mixer.conv_kernel_size, 1)
        if config.hidden_act != "silu":
            raise UnsupportedModelError(
                f"{where}.linear_attn: activation {config.hidden_act!r} is not supported, only 'silu'"
            )
        if ple is not None:
            names = {"ple_embedding", "key_proj", "value_proj", "norm_key", "norm_query", "norm_conv", "conv1d"}
            require_parts(ple, f"{where}.ple", names)
            require_parts(ple.ple_embedding, f"{where}.ple.ple_embedding", {"ngram_embedding"})
            width = config.hidden_size * config.hc_count
            require_conv(ple.conv1d, f"{where}.ple.conv1d", width, config.ple_conv_kernel_size, config.ngram_size)
        return LinearLayer(layer, operations, _window(config), dtype, num_drafts)
    require_parts(layer, where, shared | {"self_attn"})
    parts = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "indexer"}
    require_parts(layer.self_attn, f"{where}.self_attn", parts)  # type: ignore[arg-type]
    return SparseLayer(layer, operations, config, dtype, base.rotary_emb, max_model_len)
