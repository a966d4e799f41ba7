"""AdapterBank: the adapters of a model as views of one device buffer, and their products added to those of the model.

A *site* is one product of the model: x ``[T, K]`` times a weight gives y ``[T, N]``. It may consist of several linear
layers that share x, as q, k, v do once they are merged; each of these *parts* has an adapter's A and B of its own.
Adapter s adds

    y[t, part] += (x[t] @ A[s, part].T) @ B[s, part].T      for the tokens t that run with s

B is scaled already. All that belongs to one adapter is one row of the buffer, a *slot*, so that loading it is one
copy. Slot 0 stays zero: no adapter. Ranks smaller than the bank's are filled up with zeros, which change no sum.

The buffer belongs to the pipeline; it is written on the compute stream only, at an address that stays. A step reads
which slot each token has from the persistent rows, on the device.

Shape legend: T tokens, K inputs and N outputs of a site, P parts, R rank of the bank, L slots with slot 0, W words
(elements) of a slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch

from gapless.attention.context import AttentionContext
from gapless.errors import AdapterError, did_you_mean

ALIGN = 64
"""Elements; every matrix begins on so many, or wide loads would not be aligned."""


@dataclass(frozen=True, slots=True)
class Part:
    """One linear layer: its full name in the model, and its outputs."""

    name: str
    outputs: int


@dataclass(frozen=True, slots=True)
class Site:
    """Linear layers that share their input ``[T, inputs]`` and whose outputs lie side by side."""

    inputs: int
    parts: tuple[Part, ...]

    @property
    def outputs(self) -> int:
        """N, of all parts together."""
        return sum(part.outputs for part in self.parts)


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """An adapter's matrices for one linear layer: a ``[rank, K]``, b ``[N, rank]``, scaled already; on the host."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class SiteWeights:
    """Views of the buffer: a ``[L, P * R, K]``, b ``[L, N, R]``; ``ends`` are where the parts end among N."""

    a: torch.Tensor
    b: torch.Tensor
    ends: tuple[int, ...]


class AdapterBank:
    """See the module.

    Args:
        sites: in the order in which `add` numbers them.
        rank: largest that an adapter may have.
        slots: adapters that fit, slot 0 not counted.
        dtype: of the model's activations.
        ops: `gapless.lora.reference` or `gapless.lora.triton`.
    """

    def __init__(self, sites: Sequence[Site], *, rank: int, slots: int, dtype: torch.dtype, ops: ModuleType) -> None:
        self.sites = tuple(sites)
        self.rank = rank
        self.slots = slots
        self.dtype = dtype
        self._ops: Any = ops
        self._weights: list[SiteWeights] = []
        sizes = [_up(len(s.parts) * rank * s.inputs) + _up(s.outputs * rank) for s in self.sites]
        self._at = [0, *accumulate(sizes)]
        self.words = self._at[-1]
        self._place = {part.name: (i, p) for i, site in enumerate(self.sites) for p, part in enumerate(site.parts)}

    @property
    def shape(self) -> tuple[int, int]:
        """[L, W] of the buffer."""
        return self.slots + 1, self.words

    def bind(self, buffer: torch.Tensor) -> None:
        """Take ``buffer`` ``[L, W]``, zeroed, at its address for good. Before capture."""
        self._weights = []
        for i, site in enumerate(self.sites):
            a, b, rows = *self._offsets(i), len(site.parts) * self.rank
            self._weights.append(
                SiteWeights(
                    buffer[:, a : a + rows * site.inputs].view(-1, rows, site.inputs),
                    buffer[:, b : b + site.outputs * self.rank].view(-1, site.outputs, self.rank),
                    tuple(accumulate(part.outputs for part in site.parts)),
                )
            )

    def unbind(self) -> None:
        """Let go of the buffer."""
        self._weights = []

    def check(self, adapter: Mapping[str, LoraWeights]) -> None:
        """Refuse an adapter that does not fit.

        Raises:
            AdapterError: naming the module, what it has and what it should have.
        """
        if not adapter:
            raise AdapterError("it holds no LoRA weights")
        for name, weights in adapter.items():
            if name not in self._place:
                raise AdapterError(
                    f"it targets {name!r}, which cannot have an adapter here.{did_you_mean(name, self._place)} "
                    f"Served: {', '.join(self.targets())}"
                )
            index, p = self._place[name]
            site = self.sites[index]
            rank = weights.a.shape[0]
            if rank > self.rank:
                raise AdapterError(
                    f"{name} has rank {rank}; max_lora_rank={self.rank}. Start the engine with max_lora_rank={rank}"
                )
            shapes = tuple(weights.a.shape), tuple(weights.b.shape)
            expected = (rank, site.inputs), (site.parts[p].outputs, rank)
            if shapes != expected:
                raise AdapterError(
                    f"{name}: A and B have the shapes {shapes[0]} and {shapes[1]}, this model needs {expected[0]} and "
                    f"{expected[1]}; the adapter belongs to another model"
                )

    @property
    def modules(self) -> list[str]:
        """The names of all that can have an adapter."""
        return list(self._place)

    def targets(self) -> list[str]:
        """The last part of the names of all that can have an adapter, each once."""
        return sorted({name.rpartition(".")[2] for name in self._place})

    def pack(self, adapter: Mapping[str, LoraWeights], out: torch.Tensor) -> None:
        """Write a whole slot ``out`` ``[W]``, on the host; what the adapter does not have is zero."""
        out.zero_()
        for name, weights in adapter.items():
            index, p = self._place[name]
            site, (a, b) = self.sites[index], self._offsets(index)
            rank, rows = weights.a.shape[0], len(site.parts) * self.rank
            out[a : a + rows * site.inputs].view(rows, site.inputs)[p * self.rank :][:rank].copy_(weights.a)
            first = sum(part.outputs for part in site.parts[:p])
            whole = out[b : b + site.outputs * self.rank].view(site.outputs, self.rank)
            whole[first : first + site.parts[p].outputs, :rank].copy_(weights.b)

    def tokens(self, context: AttentionContext, count: int) -> Any:
        """Which slot each of ``count`` tokens of a step has: what `add` wants. ``context.row_loras`` must be there."""
        return self._ops.token_slots(context, count)

    def add(self, index: int, x: torch.Tensor, y: torch.Tensor, tokens: Any) -> None:
        """Add the adapters' part of site ``index`` to y ``[T, N]``, in place; x ``[T, K]``."""
        self._ops.add(x, y, self._weights[index], tokens)

    def _offsets(self, index: int) -> tuple[int, int]:
        site, at = self.sites[index], self._at[index]
        return at, at + _up(len(site.parts) * self.rank * site.inputs)


def _up(words: int) -> int:
    return -(-words // ALIGN) * ALIGN
