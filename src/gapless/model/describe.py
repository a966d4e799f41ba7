"""From a ``transformers`` decoder to its description: parts recognised by what they are seen to do.

A few tokens run through the model's own modules (`gapless.model.watch`). Which norm stands before or after which part
follows from whose output is whose input, bit for bit; a part's kind and constants, from comparing each known kind with
what the module gave. So no architecture is known by its name, and a part that no kind fits is named.

A feed-forward part of no known kind runs as the module that it is, alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gapless.cache.spec import KVSpec
from gapless.model.adapter import ATTENTION_NAME, TransformersModel
from gapless.model.parts import attention, feed_forward, mixture, norm, rotary
from gapless.model.parts.attention import Seen, Unknown
from gapless.model.parts.decoder import Decoder, Embedding, Head, Layer
from gapless.model.parts.feed_forward import Module, gap, tolerance
from gapless.model.parts.norm import Norm
from gapless.model.products.weight import Weight
from gapless.model.watch import Call, Watch, watch


def describe(model: TransformersModel, max_positions: int) -> Decoder:
    """The description of ``model``, over its own parameters.

    Args:
        max_positions: rows of the rotary tables.

    Raises:
        Unknown: naming the first part that no kind fits.
    """
    module: Any = model.module
    base: Any = module.base_model
    layers = _layers(base, len(model.kv_specs))
    for place, spec in enumerate(model.kv_specs):
        if not isinstance(spec, KVSpec):
            raise Unknown(f"layers.{place} keeps {spec.kind.value}")
    seen = watch(module, ATTENTION_NAME)
    name = next(n for n, m in module.named_modules() if m is layers)
    calls = [_call(seen, layer, f"{name}.{i}") for i, layer in enumerate(layers)]
    embedding = _embedding(module.get_input_embeddings(), seen, calls[0].x)
    final, head = _head(module, base, layers, seen, calls[-1].y)
    _nothing_else(base, {layers, module.get_input_embeddings(), *_norms_of(base, calls[-1].x.shape[-1], layers)})
    made: list[Layer] = []
    known: dict[tuple[Any, ...], rotary.Rotary | None] = {}
    for i, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        if i and not torch.equal(call.x, calls[i - 1].y):  # sync-ok: at load
            raise Unknown(f"{name}.{i} is not given what the layer before it gave")
        made.append(_layer(layer, f"{name}.{i}", call, seen, module, max_positions, known))
    return Decoder(embedding, tuple(made), final, head)


def _layers(base: nn.Module, count: int) -> nn.ModuleList:
    for _, child in base.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise Unknown(f"{type(base).__name__} has no list of {count} layers")


def _call(seen: Watch, module: nn.Module, at: str) -> Call:
    call = seen.of(module)
    if call is None:
        raise Unknown(f"{at} does not run exactly once")
    return call


def _nothing_else(base: nn.Module, known: set[nn.Module]) -> None:
    for name, child in base.named_children():
        if child not in known and next(child.parameters(), None) is not None:
            raise Unknown(f"{type(base).__name__} has the further part {name}")


# ---- ends ---------------------------------------------------------------------------------------------------------


def _embedding(module: nn.Module, seen: Watch, x: torch.Tensor) -> Embedding:
    if not isinstance(module, nn.Embedding):
        raise Unknown(f"the embedding is a {type(module).__name__}")
    rows = module.weight[seen.ids].detach()
    scale = _factor(rows, x)
    if scale is None:
        raise Unknown("the first layer is not given the embedding's rows, or a multiple of them")
    own = module(seen.ids).detach()  # some scale here, others what they are given too
    return Embedding(module.weight, scale, _factor(own.view(x.shape), x) or 1.0)


def _factor(x: torch.Tensor, y: torch.Tensor) -> float | None:
    """The number by which y is x times, up to rounding; a round one, or a root, if such fits as well."""
    if x.shape != y.shape:
        return None
    if torch.equal(x, y):  # sync-ok: at load
        return 1.0
    wide = x.double()
    ratio = float((wide * y.double()).sum() / wide.square().sum().clamp(min=1e-30))  # sync-ok: at load
    if not math.isfinite(ratio):
        return None
    root = math.sqrt(x.shape[-1])
    rounded = float(torch.tensor(root).to(x.dtype))
    for factor in (root, rounded, float(f"{ratio:.2g}"), float(f"{ratio:.3g}"), ratio):
        if torch.equal((x * factor), y):  # sync-ok: at load
            return factor
    return ratio if gap(x * ratio, y) < tolerance(x.dtype) / 4 else None


def _head(module: Any, base: nn.Module, layers: nn.Module, seen: Watch, x: torch.Tensor) -> tuple[Norm, Head]:
    linear = module.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise Unknown(f"the head is a {type(linear).__name__}")
    size, call = x.shape[-1], _call(seen, linear, "the head")
    for candidate in _norms_of(base, size, layers):
        found, own = norm.recognise(candidate, size), seen.of(candidate)
        if found is None or own is None or not torch.equal(own.x, x):  # sync-ok: at load
            continue
        if not torch.equal(own.y, call.x):  # sync-ok: at load
            raise Unknown("the head is not given the last norm's output")
        return found, _logits(module, Weight(linear.weight, linear.bias), call.y, seen.logits)
    raise Unknown("no norm of a known kind stands before the head")


def _logits(module: Any, weight: Weight, raw: torch.Tensor, logits: torch.Tensor) -> Head:
    scale = _factor(raw.to(logits.dtype), logits)
    if scale is not None:
        return Head(weight, scale)
    for value in {v for v in vars(module.config).values() if isinstance(v, float) and v > 1}:
        capped = value * torch.tanh(raw / value)
        if gap(capped, logits) < tolerance(raw.dtype) / 4:
            return Head(weight, 1.0, value)
    raise Unknown("the logits are neither the head's output nor a multiple or soft cap of it")


def _norms_of(parent: nn.Module, size: int, besides: nn.Module | None = None) -> list[nn.Module]:
    """Children of a parent that may be norms."""
    return [
        child
        for child in parent.children()
        if child is not besides
        and next(child.children(), None) is None
        and all(tuple(p.shape) == (size,) for p in child.parameters())
        and ("orm" in type(child).__name__)
    ]


# ---- layers -------------------------------------------------------------------------------------------------------


def _layer(
    layer: nn.Module,
    at: str,
    call: Call,
    seen: Watch,
    model: nn.Module,
    positions: int,
    known: dict[tuple[Any, ...], rotary.Rotary | None],
) -> Layer:
    size = call.x.shape[-1]
    norms = _norms_of(layer, size)
    inner = next(((n, m) for n, m in layer.named_modules() if hasattr(m, "_gapless_layer")), None)
    if inner is None:
        raise Unknown(f"{at} has no attention")
    own_name, own = inner[0].partition(".")[0], inner[1]
    if "." in inner[0]:
        raise Unknown(f"{at}.{inner[0]} lies deeper than expected")
    rest = [
        (n, m) for n, m in layer.named_children()
        if m is not own and m not in norms and next(m.parameters(), None) is not None
    ]  # fmt: skip
    if len(rest) != 1:
        raise Unknown(f"{at} has the parts {', '.join(n for n, _ in rest) or 'of attention only'} beside attention")
    mlp_name, mlp = rest[0]
    a, m = _call(seen, own, f"{at}.{own_name}"), _call(seen, mlp, f"{at}.{mlp_name}")
    flow = _Flow([(n, norm.recognise(n, size), c) for n in norms if (c := seen.of(n)) is not None], at)
    before_attention = flow.before(call.x, a.x, "attention")
    r1_parallel = flow.find(call.x, m.x)
    after_attention, gain = flow.after(a.y), 1.0
    added = a.y if after_attention is None else after_attention[1]
    if r1_parallel is not None or torch.equal(m.x, call.x):  # sync-ok: at load
        before_mlp, parallel, middle = r1_parallel, True, call.x
    else:
        before_mlp, middle = flow.into(m.x)
        parallel = False
    after_mlp = flow.after(m.y)
    more = m.y if after_mlp is None else after_mlp[1]
    if parallel:
        total = call.x + added + more
        if not gap(total, call.y) < tolerance(total.dtype) / 2:
            raise Unknown(f"{at} is not the sum of its input and its two parts")
    else:
        found = _gain(call.x, added, middle)
        second = _gain(middle, more, call.y)
        if found is None or second is None or abs(found - second) > 1e-2 * abs(found):
            raise Unknown(f"{at} does not add its parts to the residual")
        gain = found
    index, params = own._gapless_layer.index, own._gapless_layer.params
    heads = seen.heads.get(id(own))
    if heads is None:
        raise Unknown(f"{at}.{own_name} did not attend")
    table = _table(model, a, call, positions, known)
    ran = Seen(a.x, heads.q, heads.k, heads.v, heads.out, a.y)
    part = attention.recognise(own, f"{at}.{own_name}", ran, params, table, index, positions)
    where = f"{at}.{mlp_name}"
    known_part = feed_forward.recognise(mlp, where, m.x, m.y) or mixture.recognise(mlp, where, seen, m.x, m.y)
    forward = known_part or Module(mlp)
    if isinstance(forward, Module) and not gap(forward(m.x), m.y) < tolerance(m.x.dtype):
        raise Unknown(f"{at}.{mlp_name} does not give the same again")
    return Layer(
        before_attention,
        part,
        None if after_attention is None else after_attention[0],
        before_mlp,
        forward,
        None if after_mlp is None else after_mlp[0],
        gain,
        parallel,
    )


class _Flow:
    """Which norm of a layer took what to what."""

    def __init__(self, norms: Iterable[tuple[nn.Module, Norm | None, Call]], at: str) -> None:
        self._norms = list(norms)
        for module, found, _ in self._norms:
            if found is None:
                raise Unknown(f"{at}: a {type(module).__name__} is a norm of no known kind")

    def find(self, x: torch.Tensor, y: torch.Tensor) -> Norm | None:
        """The norm that took ``x`` to ``y``."""
        same = (n for _, n, c in self._norms if torch.equal(c.x, x) and torch.equal(c.y, y))  # sync-ok: at load
        return next(same, None)

    def before(self, x: torch.Tensor, y: torch.Tensor, what: str) -> Norm | None:
        """The same; None where ``y`` is ``x`` itself."""
        found = self.find(x, y)
        if found is None and not torch.equal(x, y):  # sync-ok: at load
            raise Unknown(f"{what} is given neither the layer's input nor a norm of it")
        return found

    def into(self, y: torch.Tensor) -> tuple[Norm | None, torch.Tensor]:
        """The norm that gave ``y``, and what it took; or none, and ``y``."""
        for _, found, call in self._norms:
            if torch.equal(call.y, y):  # sync-ok: at load
                return found, call.x
        return None, y

    def after(self, x: torch.Tensor) -> tuple[Norm, torch.Tensor] | None:
        """The norm that took ``x``, and what it gave."""
        for _, found, call in self._norms:
            if found is not None and torch.equal(call.x, x):  # sync-ok: at load
                return found, call.y
        return None


def _gain(before: torch.Tensor, part: torch.Tensor, after: torch.Tensor) -> float | None:
    """The multiplier with which ``part`` was added."""
    if torch.equal(before + part, after):  # sync-ok: at load
        return 1.0
    wide = part.double()
    ratio = float(((after.double() - before.double()) * wide).sum() / wide.square().sum().clamp(min=1e-30))
    for gain in (float(f"{ratio:.2g}"), float(f"{ratio:.3g}"), ratio):
        if gap(before + part * gain, after) < tolerance(before.dtype) / 4:
            return gain
    return None


def _table(
    model: nn.Module, own: Call, layer: Call, positions: int, known: dict[tuple[Any, ...], rotary.Rotary | None]
) -> rotary.Rotary | None:
    for value in (*own.options.values(), *layer.options.values()):
        if isinstance(value, tuple) and len(value) == 2 and all(isinstance(t, torch.Tensor) for t in value):
            cos, sin = value
            key = tuple(cos.flatten()[:64].tolist()), tuple(sin.flatten()[-64:].tolist()), cos.shape  # sync-ok: at load
            if key not in known:
                known[key] = rotary.tables(model, (cos, sin), own.x, positions)
            return known[key]
    return None


__all__ = ["Unknown", "describe"]
