"""Layers that keep something else than keys and values, run packed: which models have them, and what replaces them.

``transformers``' own convolutions, recurrences and indexers take a batch entry for one sequence, and would mix the
prompts of a packed step. In the private copy of a model each decoder layer with such a part gets another ``forward``:
given an engine's step, it runs the layer with the parts of this package, over the same parameters; without one, it
calls the layer's own, which is what the parity probe compares with. The module tree and its names stay as they are.

What a layer keeps is told as `LayerSpec`s, and `HybridLayer.places` says where in ``kv_caches`` they ended up.
A layer that does not have exactly the expected parts is refused, by name.
"""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gapless.cache.spec import LayerSpec
from gapless.errors import UnsupportedModelError
from gapless.model.parts import delta_net, short_conv
from gapless.model.token_rows import PackedStep


class Operations:
    """The forms of the parts for one device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            from gapless.model.parts import delta_net_triton, short_conv_triton

            convolution: ModuleType = short_conv_triton
            recurrence: ModuleType = delta_net_triton
        else:
            convolution, recurrence = short_conv, delta_net
        self.short_conv: Any = convolution.short_conv
        self.gated_delta_rule: Any = recurrence.gated_delta_rule


class HybridLayer:
    """A decoder layer of ``transformers`` that also runs packed.

    Attributes:
        layer: of a private copy; its ``forward`` is replaced by `install`.
        specs: what it keeps.
        places: for each of ``specs``, its index in ``AttentionContext.kv_caches``; set by the adapter.
    """

    def __init__(self, layer: nn.Module, operations: Operations) -> None:
        self.layer: Any = layer
        self.operations = operations
        self.specs: tuple[LayerSpec, ...] = ()
        self.places: tuple[int, ...] = ()

    def install(self) -> None:
        """From now on the layer runs packed where it is given a step.

        The third thing that it may be given is what a survey passes, which is let by. The layer holds no reference to
        this object, or both would outlive their engine until a garbage collection.
        """
        own, reference = type(self.layer).forward, weakref.ref(self)

        def forward(hidden_states: torch.Tensor, *args: Any, gapless_step: Any = None, **kwargs: Any) -> torch.Tensor:
            hybrid = reference()
            if hybrid is None:
                raise RuntimeError("a hybrid layer is called after its engine's model is gone")
            if isinstance(gapless_step, PackedStep):
                return hybrid.packed(hidden_states, gapless_step, kwargs)
            if gapless_step is not None:
                return hidden_states
            out: torch.Tensor = own(hybrid.layer, hidden_states, *args, **kwargs)
            return out

        self.layer.forward = forward

    def packed(self, hidden_states: torch.Tensor, step: PackedStep, kwargs: dict[str, Any]) -> torch.Tensor:
        """``[1, T, ...]`` to the same, for the tokens of ``step``."""
        raise NotImplementedError

    def convolve(
        self, x: torch.Tensor, step: PackedStep, which: int, conv: nn.Module, *, dilation: int = 1, silu: bool = False
    ) -> torch.Tensor:
        """The short convolution ``conv`` of ``x [T, W]``, whose inputs are kept as ``specs[which]``."""
        place = self.places[which]
        own = step.context.of(place)
        weight: Any = conv.weight
        out: torch.Tensor = self.operations.short_conv(
            x, step.context.kv_caches[place], own.block_tables, own.slot_mapping, step.token_rows, step.positions,
            weight[:, 0], conv.bias, dilation=dilation, silu=silu,
        )  # fmt: skip
        return out


def ple_tables(model: nn.Module) -> list[nn.Embedding]:
    """The tables of n-grams of a model; they may lie in host memory while everything else is on a GPU."""
    parts = [getattr(m, "ngram_embedding", None) for m in model.modules()]
    return [part for part in parts if isinstance(part, nn.Embedding)]


def require_parts(module: nn.Module, where: str, parts: set[str]) -> None:
    """Refuse a module whose children are not exactly ``parts``.

    Raises:
        UnsupportedModelError: naming what is missing or unknown.
    """
    found = {name for name, child in module.named_children() if child is not None}
    if found != parts:
        odd = ", ".join(sorted(found ^ parts))
        raise UnsupportedModelError(f"{where} ({type(module).__name__}) has other parts than expected: {odd}")


def require_conv(conv: nn.Module, where: str, width: int, taps: int, dilation: int) -> None:
    """Refuse a convolution that is not depthwise over ``width`` channels with these taps.

    Raises:
        UnsupportedModelError: naming it.
    """
    same = (
        isinstance(conv, nn.Conv1d)
        and conv.groups == conv.in_channels == conv.out_channels == width
        and conv.kernel_size == (taps,)
        and conv.dilation == (dilation,)
        and conv.stride == (1,)
    )
    if not same:
        raise UnsupportedModelError(
            f"{where} is not a depthwise convolution of {width} channels with {taps} taps and dilation {dilation}"
        )
