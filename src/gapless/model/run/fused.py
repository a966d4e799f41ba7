"""FusedDecoder: a Llama-shaped decoder run as few, large operations instead of as many modules.

What is replaced, by structure and never by name of the architecture: q, k, v merged into one product; gate and up
merged; residual add with the norm that follows; q/k norm, rotary embedding and the cache write in one kernel; SiLU and
its product. Every part must be a plain ``nn.Linear`` or a norm of the plain kind, and every replacement is compared
with the module that it replaces on random input; `fuse` returns the reason when one does not match, and the caller
goes on with the unfused model.

Parameters stay the model's own: the merged matrices hold the data, and the ``q_proj.weight`` and its neighbours become
views into them, so that an optimizer that updates them in place updates what runs here.

Shape legend: T tokens, S sequences, H hidden size, F width of the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from gapless.attention.context import AttentionContext, AttentionParams
from gapless.cache.spec import KVSpec, LayerSpec
from gapless.lora.bank import AdapterBank, Part, Site
from gapless.model.base import CausalModel
from gapless.model.products.cpu_linear import FewRowsLinear

if TYPE_CHECKING:
    from gapless.model.products.choice import GatedProducts
    from gapless.model.run.few_tokens import SmallBatch

M = TypeVar("M", bound=nn.Module)
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
AttendCached = Callable[
    [torch.Tensor, torch.Tensor, AttentionContext, AttentionParams, torch.Tensor | None], torch.Tensor
]


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Weights of one decoder layer; biases and norms of q and k may be missing."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    num_heads: int
    attention: AttentionParams


SITES = 4
"""Products of a layer, in the order of `_sites`."""


def _sites(layer: FusedLayer, at: str) -> list[Site]:
    """Where adapters can be added: the layer's four products, with the names of the linear layers merged in them."""
    q, rows = layer.out.shape[1], layer.qkv.shape[0]
    kv, half = (rows - q) // 2, layer.gate_up.shape[0] // 2

    def site(weight: torch.Tensor, group: str, **parts: int) -> Site:
        named = tuple(Part(f"{at}.{group}.{name}_proj", size) for name, size in parts.items())
        return Site(weight.shape[1], named)

    return [
        site(layer.qkv, "self_attn", q=q, k=kv, v=kv),
        site(layer.out, "self_attn", o=layer.out.shape[0]),
        site(layer.gate_up, "mlp", gate=half, up=half),
        site(layer.down, "mlp", down=layer.down.shape[0]),
    ]


class NotFusable(Exception):
    """The structure or the arithmetic of a part differs; the message names it."""


class FusedDecoder:
    """See the module and `gapless.model.base.CausalModel`; made by `fuse`."""

    def __init__(
        self,
        model: CausalModel,
        layers: list[FusedLayer],
        embedding: torch.Tensor,
        norm: torch.Tensor,
        head: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        ops: ModuleType,
        attend: AttendCached,
    ) -> None:
        self.name = model.name
        self.kv_specs: tuple[LayerSpec, ...] = model.kv_specs
        self.vocab_size = model.vocab_size
        self.max_position = model.max_position
        self.eos_token_ids = model.eos_token_ids
        self.weight_bytes = model.weight_bytes
        self.config = getattr(model, "config", None)
        self.dtype = model.dtype
        self.device = model.device
        self._layers = layers
        self._embedding = embedding
        self._norm = norm
        self._head = head
        self._cos, self._sin = rotary
        self._eps = eps
        self._ops: Any = ops
        self._attend = attend
        self.linear: Linear = functional.linear
        self.small: SmallBatch | None = None
        self.gated: GatedProducts | None = None
        self.bank: AdapterBank | None = None

    def summary(self) -> list[tuple[str, str]]:
        """What was replaced, and by what, for the log."""
        layers = len(self._layers)
        normed = " + q/k norm" if self._layers[0].q_norm is not None else ""
        table = [
            ("q, k, v projections", f"one product in {layers} layers"),
            ("gate and up projections", f"one product in {layers} layers"),
            ("residual add + RMSNorm", f"one kernel, {2 * layers + 1} times"),
            (f"RoPE{normed} + cache write", f"one kernel in {layers} layers"),
            ("SiLU * up", f"one kernel in {layers} layers"),
            ("last layer of prompts", "after the cache write only for tokens whose logits are asked"),
        ]
        if self.small is not None:
            table.append((f"decode of up to {self.small.limit} tokens", "norms, residuals, SiLU inside the products"))
        for sizes, _ in self.gated.chosen if self.gated is not None else ():
            table.append((f"gate, up, SiLU of {sizes[0]} to {sizes[-1]} tokens", f"one kernel in {layers} layers"))
        return table

    def enable_small_batches(self) -> bool:
        """Run decode steps of few tokens by kernels made for them; False where they do not apply. Before capture."""
        from gapless.model.run.few_tokens import SmallBatch, supported

        if supported(self._embedding):
            rotary = (self._cos, self._sin)
            self.small = SmallBatch(
                self._layers, self._embedding, self._norm, self._head, rotary, self._eps, self._attend
            )
        return self.small is not None

    def enable_gated(self) -> None:
        """Compute gate, up and SiLU in one kernel where that is quicker. Before capture."""
        from gapless.model.products.choice import GatedProducts

        self.gated = GatedProducts([layer.gate_up for layer in self._layers])

    def enable_lora(self, *, slots: int, rank: int, ops: ModuleType) -> AdapterBank:
        """Let requests run with adapters, see `TransformersModel.enable_lora`. Steps with some of them do not take
        the path of small batches. Before capture."""
        sites = [site for i, layer in enumerate(self._layers) for site in _sites(layer, f"model.layers.{i}")]
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
        tokens = None
        if context.row_loras is not None and self.bank is not None:
            tokens = self.bank.tokens(context, len(input_ids))
        elif self.small is not None and few and len(input_ids) <= self.small.limit:
            self.small.forward(input_ids, positions, context, out, None if every else logits_index)
            return
        ops, eps = self._ops, self._eps
        one_each = len(logits_index) == len(context.seq_lens)  # not so in a step with drafts
        all_asked = context.decode_only or not one_each or len(logits_index) >= len(input_ids)

        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, site: int) -> torch.Tensor:
            y = self.linear(x, weight, bias)
            if tokens is not None and self.bank is not None:
                self.bank.add(site, x, y, tokens)
            return y

        residual = functional.embedding(input_ids, self._embedding)
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for i, layer in enumerate(self._layers):
            if i:
                x, residual = ops.add_rms_norm(x, residual, layer.input_norm, eps)
            site = i * SITES
            qkv = linear(x, layer.qkv, layer.qkv_bias, site)
            cache, scales, own = context.kv_caches[i], context.scales_of(i), context.of(i)
            q = ops.rope_qk_norm_kv_write(
                qkv, positions, self._cos, self._sin, cache, own.slot_mapping, layer.num_heads, cache.shape[3],
                layer.q_norm, layer.k_norm, eps, kv_scales=scales,
            )  # fmt: skip
            if layer is self._layers[-1] and not all_asked:
                # Of the last layer only the cache is for all tokens; the rest is for those whose logits are asked.
                q, residual = q.index_select(0, logits_index), residual.index_select(0, logits_index)
                own = _ends_only(own)
                if tokens is not None and self.bank is not None:
                    tokens = self.bank.tokens(own, len(logits_index))
            heads = self._attend(q, cache, own, layer.attention, scales)
            x = linear(heads.flatten(1), layer.out, layer.out_bias, site + 1)
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            act = self.gated(x, layer.gate_up) if self.gated is not None and tokens is None else None
            if act is None:
                act = ops.silu_mul(linear(x, layer.gate_up, None, site + 2))
            x = linear(act, layer.down, None, site + 3)
        x, _ = ops.add_rms_norm(x, residual, self._norm, eps)
        if all_asked and not every:
            x = x.index_select(0, logits_index)
        torch.mm(x, self._head.t(), out=out)


def _ends_only(context: AttentionContext) -> AttentionContext:
    """The same step as its sequences' last tokens alone see it, once every token's key and value is in the cache.

    A padding sequence becomes one token that sees one place of the null block.
    """
    count, lens = len(context.seq_lens), context.seq_lens
    starts = torch.arange(count + 1, dtype=torch.int32, device=lens.device)
    return replace(context, query_start_loc=starts, seq_lens=lens.clamp(min=1), decode_only=True, scratch={})


def fuse(
    module: nn.Module, model: CausalModel, *, max_positions: int, ops: ModuleType, attend: AttendCached
) -> FusedDecoder:
    """A fused decoder over the parameters of ``module``, a ``transformers`` causal language model.

    Args:
        module: on the device where it will run.
        model: the same, unfused; the source of its description.
        max_positions: rows of the rotary table.
        ops: `gapless.model.ops.triton` or `gapless.model.ops.reference`.
        attend: attention over a cache that holds the step's keys already.

    Raises:
        NotFusable: naming the first part that is not of the plain kind.
    """
    decoder = _child(module, "model", nn.Module)
    _only(decoder, "model", {"embed_tokens", "layers", "norm", "rotary_emb"})
    _only(module, "the model", {"model", "lm_head"})
    head = _linear(module, "lm_head")
    if getattr(head, "bias", None) is not None:
        raise NotFusable("lm_head has a bias")
    embedding = _child(decoder, "embed_tokens", nn.Embedding)
    if type(embedding) is not nn.Embedding:
        raise NotFusable(f"embed_tokens is a {type(embedding).__name__}")
    norm = _child(decoder, "norm", nn.Module)
    eps = _eps(norm)
    layers: list[FusedLayer] = []
    for i, layer in enumerate(_child(decoder, "layers", nn.ModuleList)):
        spec = model.kv_specs[i]
        if not isinstance(spec, KVSpec):
            raise NotFusable(f"layers.{i} keeps {spec.kind.value}")
        layers.append(_fuse_layer(layer, f"layers.{i}", spec, eps, ops, check=i == 0))
    weight = next(embedding.parameters())
    rotary = _rotary_table(_child(decoder, "rotary_emb", nn.Module), max_positions, weight)
    return FusedDecoder(model, layers, embedding.weight, norm.weight, head.weight, rotary, eps, ops, attend)  # type: ignore[arg-type]


def _fuse_layer(layer: nn.Module, at: str, spec: KVSpec, eps: float, ops: Any, *, check: bool) -> FusedLayer:
    _only(layer, at, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    attention, mlp = _child(layer, "self_attn", nn.Module), _child(layer, "mlp", nn.Module)
    _only(attention, f"{at}.self_attn", {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
    _only(mlp, f"{at}.mlp", {"gate_proj", "up_proj", "down_proj", "act_fn"})
    q, k, v, o = (_linear(attention, f"{n}_proj") for n in "qkvo")
    gate, up, down = (_linear(mlp, f"{n}_proj") for n in ("gate", "up", "down"))
    if any(m.bias is not None for m in (gate, up, down)):
        raise NotFusable(f"{at}.mlp has biases")
    norms = [getattr(attention, f"{n}_norm", None) for n in "qk"]
    if any(n is not None and n.weight.numel() != spec.head_dim_k for n in norms):
        raise NotFusable(f"{at}: the norms of q and k are not per head")
    present: list[Any] = [layer.input_layernorm, layer.post_attention_layernorm, *(n for n in norms if n is not None)]
    if any(_eps(norm) != eps for norm in present):
        raise NotFusable(f"{at} has norms of different eps")
    if check:
        _check_parts(layer, at, eps, ops)
    biases = [m.bias for m in (q, k, v)]
    if any(b is None for b in biases) and any(b is not None for b in biases):
        raise NotFusable(f"{at}: q, k and v do not all have a bias")
    params = AttentionParams(float(attention.scaling), spec.window)  # type: ignore[arg-type]
    return FusedLayer(
        input_norm=layer.input_layernorm.weight,  # type: ignore[arg-type,union-attr]
        qkv=_merge([q, k, v], "weight"),
        qkv_bias=None if biases[0] is None else _merge([q, k, v], "bias"),
        q_norm=None if norms[0] is None else norms[0].weight,
        k_norm=None if norms[1] is None else norms[1].weight,
        out=o.weight,
        out_bias=o.bias,
        mlp_norm=layer.post_attention_layernorm.weight,  # type: ignore[arg-type,union-attr]
        gate_up=_merge([gate, up], "weight"),
        down=down.weight,
        num_heads=q.out_features // spec.head_dim_k,
        attention=params,
    )


def _check_parts(layer: nn.Module, at: str, eps: float, ops: Any) -> None:
    """Compare norm and MLP with their replacements on random input; the parity probe compares the whole."""
    norm, mlp = layer.input_layernorm, layer.mlp
    weight = norm.weight  # type: ignore[union-attr]
    generator = torch.Generator(device="cpu").manual_seed(0)
    x = torch.randn(5, weight.numel(), generator=generator).to(weight.device, weight.dtype)  # type: ignore
    y = torch.randn(5, weight.numel(), generator=generator).to(weight.device, weight.dtype)  # type: ignore
    normed, total = ops.add_rms_norm(x, y, weight, eps)
    gate_up = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], -1)  # type: ignore[operator,union-attr]
    pairs = {
        "the norm": (ops.rms_norm(x, weight, eps), norm(x)),  # type: ignore[operator]
        "the residual add": (total, x + y),
        "the norm after it": (normed, norm(x + y)),  # type: ignore[operator]
        "the MLP": (mlp.down_proj(ops.silu_mul(gate_up)), mlp(x)),  # type: ignore[operator,union-attr]
    }
    for what, (ours, theirs) in pairs.items():
        gap = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        if not float(gap.detach()) < (1e-5 if weight.dtype == torch.float32 else 2e-2):  # sync-ok: at load
            raise NotFusable(f"{at}: {what} differs from its replacement by {float(gap):.1e}")


def _merge(parts: list[nn.Linear], name: str) -> torch.Tensor:
    """The parts' rows in one tensor; the parameters, and the caller's with which they share, become views of it."""
    parameters = [getattr(part, name) for part in parts]
    merged = _merged_before(parameters)
    if merged is not None:
        return merged
    merged = torch.cat([parameter.data for parameter in parameters])
    at = 0
    for parameter in parameters:
        view = merged[at : at + len(parameter)]
        for owner in (parameter, getattr(parameter, "gapless_source", parameter)):
            owner.data = view
        at += len(parameter)
    return merged


def _merged_before(parameters: list[nn.Parameter]) -> torch.Tensor | None:
    """The tensor of which these are neighbouring parts, if another engine over the same model has merged them."""
    first = parameters[0].data
    at = first.data_ptr()
    for parameter in parameters:
        data = parameter.data
        same = data.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and data.is_contiguous() and data.data_ptr() == at and data.shape[1:] == first.shape[1:]):
            return None
        at += data.nbytes
    rows = sum(len(parameter) for parameter in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _rotary_table(rotary: nn.Module, count: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(count, device=like.device)[None]
    with torch.no_grad():
        cos, sin = rotary(like[:1, None], positions)
    if cos.shape != (1, count, cos.shape[-1]):
        raise NotFusable(f"rotary_emb gives a table of shape {tuple(cos.shape)}")
    half = cos.shape[-1] // 2
    if not torch.equal(cos[..., :half], cos[..., half:]):
        raise NotFusable("rotary_emb does not rotate halves")
    return cos[0].contiguous(), sin[0].contiguous()


def _child(module: nn.Module, name: str, kind: type[M]) -> M:
    child = getattr(module, name, None)
    if not isinstance(child, kind):
        raise NotFusable(f"{name} is missing or not a {kind.__name__}")
    return child


def _linear(module: nn.Module, name: str) -> nn.Linear:
    child = getattr(module, name, None)
    if type(child) not in (nn.Linear, FewRowsLinear) or not isinstance(child, nn.Linear):
        raise NotFusable(f"{name} is a {type(child).__name__}, not a plain nn.Linear")
    return child


def _only(module: nn.Module, at: str, allowed: set[str]) -> None:
    extra = {name for name, _ in module.named_children()} - allowed
    if extra:
        raise NotFusable(f"{at} has the further parts {', '.join(sorted(extra))}")


def _eps(norm: nn.Module) -> float:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(eps, float):
        raise NotFusable(f"a {type(norm).__name__} has no eps")
    return eps
