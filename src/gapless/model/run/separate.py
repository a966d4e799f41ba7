"""A kernel for each operation, products by the library: prompts, mixed steps, and adapters.

With the operations of `gapless.model.ops.reference` it is the definition, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from gapless.attention.context import AttentionContext, AttentionParams
from gapless.lora.bank import AdapterBank
from gapless.model.parts.attention import Attention, heads_of
from gapless.model.parts.decoder import Embedding, Head
from gapless.model.parts.experts import Gate
from gapless.model.parts.feed_forward import FeedForward
from gapless.model.parts.norm import Norm
from gapless.model.products.stream import Stream
from gapless.model.products.weight import Weight

if TYPE_CHECKING:
    from gapless.model.products.choice import GatedProducts

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
AttendCached = Callable[
    [torch.Tensor, torch.Tensor, AttentionContext, AttentionParams, torch.Tensor | None], torch.Tensor
]
ACTS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
"""Activations of a gate that kernels know, and their numbers there."""


def plain_gate(gate: Gate) -> int | None:
    """The number of the gate's activation, if it is one that kernels know and has no more to it."""
    plain = gate.gated and not (gate.interleaved or gate.limit or gate.offset) and gate.alpha == 1.0
    return ACTS.get(gate.activation) if plain else None


class Separate:
    """See the module and `gapless.model.run.walk.Kernels`; one for each step.

    Args:
        ops: `gapless.model.ops.triton` or `gapless.model.ops.reference`.
        attend: attention over a cache that holds the step's keys already.
        gated: gate, up and their product in one kernel where that is quicker.
        bank, tokens: adapters, and which of them the step's tokens have. None for a step without.
        sites: by ``id`` of a weight, the number of its site in the bank.
    """

    def __init__(
        self,
        ops: Any,
        attend: AttendCached,
        linear: Linear = functional.linear,
        gated: GatedProducts | None = None,
        bank: AdapterBank | None = None,
        tokens: Any = None,
        sites: dict[int, int] | None = None,
    ) -> None:
        self._ops, self._attend, self._linear = ops, attend, linear
        self._gated = gated if tokens is None else None
        self._bank, self._tokens, self._sites = bank, tokens, sites or {}

    def begin(
        self, embedding: Embedding, ids: torch.Tensor, ahead: Norm | None, overrides: torch.Tensor | None
    ) -> Stream:
        residual = embedding(ids, overrides)
        return Stream(residual, residual if ahead is None else ahead(residual, self._ops))

    def product(self, weight: Weight, x: Stream | torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        given = x.x if isinstance(x, Stream) else x
        y = self._linear(given, weight.data, weight.bias)
        if self._tokens is not None and self._bank is not None and id(weight) in self._sites:
            self._bank.add(self._sites[id(weight)], given, y, self._tokens)
        return y

    def up(self, part: FeedForward, stream: Stream, norm: Norm | None) -> torch.Tensor:
        act = plain_gate(part.gate)
        if act == 0 and self._gated is not None and part.up.bias is None:
            done = self._gated(stream.x, part.up.data)
            if done is not None:
                return done
        y = self.product(part.up, stream)
        made: torch.Tensor = part.gate(y) if act is None else self._ops.act_mul(y, act)
        return made

    def add(
        self, weight: Weight, x: torch.Tensor, before: Stream, after: Norm | None, ahead: Norm | None, gain: float
    ) -> Stream:
        return self.join(self.product(weight, x), before, after, ahead, gain)

    def join(self, y: torch.Tensor, before: Stream, after: Norm | None, ahead: Norm | None, gain: float) -> Stream:
        return join(self._ops, y, before, after, ahead, gain)

    def normed(self, stream: Stream, norm: Norm | None) -> torch.Tensor:
        return stream.x

    def queries(
        self, part: Attention, qkv: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        cache, scales = context.kv_caches[part.place], context.scales_of(part.place)
        return heads_of(part, qkv, positions, cache, context.slot_mapping, self._ops, scales)

    def attend(self, part: Attention, q: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        return self._attend(q, context.kv_caches[part.place], context, part.params, context.scales_of(part.place))

    def logits(self, head: Head, stream: Stream, norm: Norm, out: torch.Tensor) -> None:
        torch.mm(stream.x, head.weight.data.t(), out=out)
        finish_logits(head, out)

    def cut(self, context: AttentionContext, count: int) -> None:
        if self._tokens is not None and self._bank is not None:
            self._tokens = self._bank.tokens(context, count)


def join(ops: Any, y: torch.Tensor, before: Stream, after: Norm | None, ahead: Norm | None, gain: float) -> Stream:
    """``residual + gain * after(y)``, and the norm ``ahead`` of it, in as few kernels as there are for that."""
    rms = ahead is not None and ahead.kind == "rms"
    alike = after is not None and ahead is not None and after.kind == ahead.kind == "rms"
    alike = alike and (after.eps, after.scaling) == (ahead.eps, ahead.scaling)  # type: ignore[union-attr]
    if alike and gain == 1.0:
        assert after is not None and ahead is not None  # noqa: PT018
        x, total = ops.norm_add_rms_norm(y, before.residual, after.weight, ahead.weight, ahead.eps, int(ahead.scaling))
        return Stream(total, x)
    if after is not None:
        y = after(y, ops)
    if gain != 1.0:
        y = y * gain
    if rms:
        assert ahead is not None
        x, total = ops.add_rms_norm(y, before.residual, ahead.weight, ahead.eps, int(ahead.scaling))
        return Stream(total, x)
    total = before.residual + y
    return Stream(total, total if ahead is None else ahead(total, ops))


def finish_logits(head: Head, out: torch.Tensor) -> None:
    """What comes after the head's product, in place."""
    if head.weight.bias is not None:
        out.add_(head.weight.bias)
    if head.scale != 1.0:
        out.mul_(head.scale)
    if head.softcap:
        out.div_(head.softcap).tanh_().mul_(head.softcap)
