# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""A decoder's forward for decode steps of few tokens: six kernels a layer, each of which may start early.

    qkv product (norm fused) > q/k norm, rotary embedding, cache write > attention > output product (residual add
    fused) > gate and up product (norm, SiLU fused) > down product (residual add fused)

The norm of a layer's input is prepared by the product before it, and the norm before the head by the last layer; see
`gapless.model.products.few_tokens` for how, and `gapless.device.dependent_launch` for the rule that makes early starts
safe. Where the measured choice prefers cuBLAS for a product, the separate kernels around it come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch.nn import functional

from gapless.attention.context import AttentionContext, AttentionParams
from gapless.attention.triton import MAX_DECODE_ROWS
from gapless.attention.triton_decode import LOG2E, _decode_kernel, _get_plan, decode_config
from gapless.device.dependent_launch import LATE, OFF, depend, supports_pdl
from gapless.model.ops import triton as ops_triton
from gapless.model.ops.triton import _HEADS, _rope_kernel
from gapless.model.products.choice import Chooser, Product, bucket
from gapless.model.products.config import GemmConfig, Workspace, workspace_size
from gapless.model.products.few_tokens import Stream, embed, glu, plain, residual

AttendCached = Callable[
    [torch.Tensor, torch.Tensor, AttentionContext, AttentionParams, torch.Tensor | None], torch.Tensor
]
KV = tuple[torch.Tensor, torch.Tensor | None]
"""A layer's cache and its scales."""


class Layer(Protocol):
    """What is read of a `gapless.model.run.fused.FusedLayer`."""

    @property
    def input_norm(self) -> torch.Tensor: ...
    @property
    def qkv(self) -> torch.Tensor: ...
    @property
    def qkv_bias(self) -> torch.Tensor | None: ...
    @property
    def q_norm(self) -> torch.Tensor | None: ...
    @property
    def k_norm(self) -> torch.Tensor | None: ...
    @property
    def out(self) -> torch.Tensor: ...
    @property
    def out_bias(self) -> torch.Tensor | None: ...
    @property
    def mlp_norm(self) -> torch.Tensor: ...
    @property
    def gate_up(self) -> torch.Tensor: ...
    @property
    def down(self) -> torch.Tensor: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def attention(self) -> AttentionParams: ...


def supported(weight: torch.Tensor) -> bool:
    """Whether `SmallBatch` is worth it and exact enough for weights like this.

    fp32 keeps the plain path, whose sums its tests compare. fp16 has no room for the product of the residual and a
    weight of the norm. Without dependent launch (before Hopper) it is neither measured nor shown to give equal bits.
    """
    return weight.dtype == torch.bfloat16 and supports_pdl(weight.device)


class SmallBatch:
    """See the module. Ask `supported` first.

    Args:
        layers, embedding, norm, head, rotary, eps: as `gapless.model.run.fused.FusedDecoder` holds them.
        attend: attention over a cache that holds the step's keys already.
        limit: the most tokens of a step.
        pdl: `OFF`, `LATE` or `EARLY`, see `gapless.device.dependent_launch`.
        chooser: picks the kernel of each product; the default takes the table and measures nothing.
        early_attention: launch the rotary and attention kernels so too; ``attend`` is then not used.

    Raises:
        ValueError: a weight is not contiguous.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        embedding: torch.Tensor,
        norm: torch.Tensor,
        head: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        attend: AttendCached,
        *,
        limit: int = 64,
        pdl: int = LATE,
        chooser: Chooser | None = None,
        early_attention: bool = True,
    ) -> None:
        weights = [w for layer in layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        if not all(w.is_contiguous() for w in (*weights, head, embedding)):
            raise ValueError("small batches need contiguous weights")
        self._layers, self._embedding, self._norm, self._head = layers, embedding, norm, head
        self._cos, self._sin = rotary
        self._eps, self._attend = eps, attend
        self._pdl = pdl if supports_pdl(embedding.device) else OFF
        self._early_attention = early_attention
        self.limit = limit
        chooser = chooser or Chooser(embedding.device)
        self.workspace = Workspace(embedding.device)
        first = layers[0]
        shapes = {"qkv": ("plain", first.qkv), "out": ("residual", first.out), "gate_up": ("glu", first.gate_up),
                  "down": ("residual", first.down), "head": ("plain", head)}  # fmt: skip
        rest: dict[str, list[torch.Tensor]] = {
            name: [getattr(layer, name) for layer in layers] for name in ("qkv", "out", "gate_up", "down")
        }
        rest["head"] = [head]
        self.configs: dict[int, dict[str, GemmConfig | None]] = {}
        for m in sorted({bucket(m) for m in range(1, limit + 1)}):
            chosen: dict[str, GemmConfig | None] = {}
            for name, (op, weight) in shapes.items():
                product = Product(op, m, weight.shape[0], weight.shape[1])
                chosen[name] = config = chooser.choose(product, rest[name])
                if config is not None:
                    self.workspace.reserve(*workspace_size(op, m, weight.shape[0], config.fit(weight.shape[1])))
            self.configs[m] = chosen

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        out: torch.Tensor,
        logits_index: torch.Tensor | None = None,
    ) -> None:
        """Logits of a step of at most ``limit`` tokens whose sequences have few: ``context.decode_only``, or bounded by
        ``context.max_query_len``.

        Args:
            input_ids, positions, context, out: see `gapless.model.base.CausalModel`.
            logits_index: int64 ``[L]``, which of the tokens get logits; None for all, in order.
        """
        configs = self.configs[bucket(input_ids.shape[0])]
        # The first kernel is an ordinary launch: whatever came before, the step begins after it.
        stream = embed(input_ids, self._embedding, self._layers[0].input_norm)
        for i, layer in enumerate(self._layers):
            ahead = self._layers[i + 1].input_norm if i + 1 < len(self._layers) else self._norm
            kv = context.kv_caches[i], context.scales_of(i)
            stream = self.layer(layer, stream, ahead, positions, context.of(i), kv, configs)
        if logits_index is not None:  # an ordinary launch: it begins after all before it, and all after it begins later
            squares = None if stream.squares is None else stream.squares.index_select(0, logits_index)
            stream = Stream(
                stream.residual.index_select(0, logits_index), stream.x.index_select(0, logits_index), squares
            )
            configs = self.configs[bucket(len(logits_index))]
        config = configs["head"]
        if config is None:
            torch.mm(self._plain_norm(stream, self._norm), self._head.t(), out=out)
        else:
            plain(stream.x, self._head, config, self.workspace, squares=stream.squares, eps=self._eps, out=out,
                  pdl=self._pdl)  # fmt: skip

    def layer(
        self,
        layer: Layer,
        stream: Stream,
        ahead: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        kv: KV,
        configs: dict[str, GemmConfig | None],
    ) -> Stream:
        """One layer; ``ahead`` is the weight of the norm that follows it."""
        pdl, space = self._pdl, self.workspace
        config = configs["qkv"]
        if config is None:
            qkv = functional.linear(self._plain_norm(stream, layer.input_norm), layer.qkv, layer.qkv_bias)
        else:
            qkv = plain(stream.x, layer.qkv, config, space, bias=layer.qkv_bias, squares=stream.squares,
                        eps=self._eps, pdl=pdl)  # fmt: skip
        heads = self._attention(qkv, layer, positions, context, kv)
        stream = self._add(heads.flatten(1), layer.out, layer.out_bias, stream.residual, layer.mlp_norm, configs["out"])
        config = configs["gate_up"]
        if config is None:
            x = self._plain_norm(stream, layer.mlp_norm)
            act = ops_triton.silu_mul(functional.linear(x, layer.gate_up))
        else:
            act = glu(stream.x, layer.gate_up, config, space, squares=stream.squares, eps=self._eps, pdl=pdl)
        return self._add(act, layer.down, None, stream.residual, ahead, configs["down"])

    def _add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        before: torch.Tensor,
        norm: torch.Tensor,
        config: GemmConfig | None,
    ) -> Stream:
        if config is None:
            normed, total = ops_triton.add_rms_norm(functional.linear(x, weight, bias), before, norm, self._eps)
            return Stream(total, normed, None)
        return residual(x, weight, config, self.workspace, before, norm, bias=bias, pdl=self._pdl)

    def _plain_norm(self, stream: Stream, norm: torch.Tensor) -> torch.Tensor:
        if stream.squares is None:
            return stream.x
        return ops_triton.rms_norm(stream.residual, norm, self._eps)

    def _attention(
        self, qkv: torch.Tensor, layer: Layer, positions: torch.Tensor, context: AttentionContext, kv: KV
    ) -> torch.Tensor:
        cache, scales = kv
        pdl = self._pdl if self._early_attention else OFF
        rows = layer.num_heads // cache.shape[3] * (context.max_query_len or 1)
        if pdl == OFF or rows > MAX_DECODE_ROWS:
            q = ops_triton.rope_qk_norm_kv_write(
                qkv, positions, self._cos, self._sin, cache, context.slot_mapping, layer.num_heads, cache.shape[3],
                layer.q_norm, layer.k_norm, self._eps, kv_scales=scales,
            )  # fmt: skip
            return self._attend(q, cache, context, layer.attention, scales)
        q = early_rope(qkv, positions, self._cos, self._sin, cache, context.slot_mapping, layer.num_heads,
                       layer.q_norm, layer.k_norm, self._eps, pdl, scales)  # fmt: skip
        return early_attend(q, cache, context, layer.attention, pdl, scales)


# ---- the kernels of other modules, behind a wait -----------------------------------------------------------------


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_ptr"])
def _early_rope_kernel(
    qkv_ptr, positions_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, cache_ptr, scales_ptr, slot_ptr, out_ptr,
    qkv_stride, cos_stride, sin_stride, cache_stride_kv, cache_stride_block, cache_stride_token, cache_stride_head,
    eps, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    depend(PDL)
    _rope_kernel(
        qkv_ptr, positions_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, cache_ptr, scales_ptr, slot_ptr, out_ptr,
        qkv_stride, cos_stride, sin_stride, cache_stride_kv, cache_stride_block, cache_stride_token,
        cache_stride_head, eps, HQ, HK, D, HALF, BLOCK_SIZE, HALF_BLOCK, REST_BLOCK, HEADS, NORM, OFFSET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_row"])
def _early_decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, items_ptr, first_ptr, counters_ptr, part_ptr, lse_ptr, out_ptr, sinks_ptr,
    scales_ptr, scale, softcap, q_token, q_head, kv_block, kv_token, kv_head, table_row, HK: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    B: tl.constexpr, QMAX: tl.constexpr, MP: tl.constexpr,
    RB: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, LAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    depend(PDL)  # before the programs without an item leave, see the rule
    _decode_kernel(
        q_ptr, k_ptr, v_ptr, table_ptr, items_ptr, first_ptr, counters_ptr, part_ptr, lse_ptr, out_ptr, sinks_ptr,
        scales_ptr, scale, softcap, q_token, q_head, kv_block, kv_token, kv_head, table_row, HK, G, D, DP, B, QMAX, MP,
        RB, CHUNK, BN, WINDOW, SOFTCAP, LAST,
    )  # fmt: skip


def early_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    pdl: int,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gapless.model.ops.triton.rope_qk_norm_kv_write`, launched early."""
    tokens, kv_heads, size, half = qkv.shape[0], cache.shape[3], cache.shape[4], cos.shape[1] // 2
    out = torch.empty((tokens, heads, size), dtype=qkv.dtype, device=qkv.device)
    each = min(_HEADS, triton.next_power_of_2(max(heads, kv_heads)))
    parts = triton.cdiv(heads, each) + 2 * triton.cdiv(kv_heads, each)
    rest = size - 2 * half
    _early_rope_kernel[(tokens, parts)](
        qkv, positions, cos, sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, cache,
        kv_scales, slots, out, qkv.stride(0), cos.stride(0), sin.stride(0), cache.stride(0), cache.stride(1),
        cache.stride(2), cache.stride(3), eps, HQ=heads, HK=kv_heads, D=size, HALF=half, BLOCK_SIZE=cache.shape[2],
        HALF_BLOCK=triton.next_power_of_2(half), REST_BLOCK=triton.next_power_of_2(rest) if rest else 0, HEADS=each,
        NORM=q_norm is not None, OFFSET=False, PDL=pdl, num_warps=2, launch_pdl=True,
    )  # fmt: skip
    return out


def early_attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    context: AttentionContext,
    params: AttentionParams,
    pdl: int,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gapless.attention.triton_decode.decode` of all sequences, launched early.

    The outputs of padding tokens are zero in a decode step and old memory where rows draft, since to clear them would
    cost a kernel in each layer. Whatever lies there stays there: all that follows works on each token alone, and the
    keys of padding tokens go to the null block.
    """
    _, hq, d = q.shape
    _, _, block, hk, _ = cache.shape
    g = hq // hk
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    config = decode_config(q.device, d, q.dtype)
    most = 1 if context.decode_only else context.max_query_len or 1
    plan = _get_plan(context, params, hk, most, config)
    w = plan.items.shape[0]
    padded, rows = max(16, triton.next_power_of_2(d)), triton.next_power_of_2(most * g)
    part = torch.empty((w, hk, most * g, d), dtype=torch.float32, device=q.device)
    lse = torch.empty((w, hk, most * g), dtype=torch.float32, device=q.device)
    keys = cache[0]
    softcap = params.softcap or 0.0
    scale = params.scale / softcap if softcap else params.scale * LOG2E.value
    _early_decode_kernel[(hk, w)](
        q, keys, cache[1], context.block_tables, plan.items, plan.first, plan.counters, part, lse, out,
        params.sinks, kv_scales, scale, softcap * LOG2E.value, q.stride(0), q.stride(1), keys.stride(0), keys.stride(1),
        keys.stride(2), context.block_tables.stride(0), HK=hk, G=g, D=d, DP=padded, B=block, QMAX=most,
        MP=max(16, rows), RB=rows, CHUNK=config.merged_at_once(rows, padded), BN=config.block_n,
        WINDOW=params.window or 0, SOFTCAP=bool(softcap), LAST=True, PDL=pdl, num_warps=config.warps,
        num_stages=config.stages, launch_pdl=True,
    )  # fmt: skip
    return out
