"""Weight: a matrix of a model as products see it, and the merging of neighbouring ones.

Storage, format and shard are its own business: what multiplies by a weight asks it for a product, with what comes
before (`Stream` may bring an unfinished norm along) and what comes after (an `Epilogue`). How that is computed is up to
the kernels that an executor brings, see `gapless.model.run.walk.Kernels`.

Merged weights keep the caller's parameters: ``q.data``, ``k.data`` and ``v.data`` become views of one matrix, so that
an optimizer that updates them in place updates what runs here.

Shape legend: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

Scaling = Literal["none", "tensor", "row", "block", "group"]
Shard = Literal["none", "rows", "columns"]


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """See the module.

    Attributes:
        data: ``[N, K]``.
        bias: ``[N]``, or None.
        parts: the linear layers that lie in it one after the other: their full names in the model, and their outputs.
        scaling: what a scale of ``data`` belongs to. Only ``none`` exists so far.
        shard: which part of the whole matrix this is. Only ``none`` exists so far.
    """

    data: torch.Tensor
    bias: torch.Tensor | None = None
    parts: tuple[tuple[str, int], ...] = ()
    scaling: Scaling = "none"
    shard: Shard = "none"
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("scaling", "shard"):
            if getattr(self, name) != "none":
                raise NotImplementedError(f"a weight with {name}={getattr(self, name)!r}: only 'none' is computed yet")
        object.__setattr__(self, "shape", tuple(self.data.shape))

    @property
    def outputs(self) -> int:
        """N."""
        return self.shape[0]

    @property
    def inputs(self) -> int:
        """K."""
        return self.shape[1]


def merge(linears: Sequence[nn.Linear], names: Sequence[str]) -> Weight:
    """Linear layers with equal inputs as one weight. All of them have a bias, or none has."""
    parts = tuple((name, linear.out_features) for name, linear in zip(names, linears, strict=True))
    if len(linears) == 1:
        return Weight(linears[0].weight, linears[0].bias, parts)
    bias = None if linears[0].bias is None else _merged(linears, "bias")
    return Weight(_merged(linears, "weight"), bias, parts)


def _merged(linears: Sequence[nn.Linear], name: str) -> torch.Tensor:
    """The parts' rows in one tensor; the parameters, and the caller's with which they share, become views of it."""
    parameters = [getattr(part, name) for part in linears]
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
