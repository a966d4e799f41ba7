# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Embeddings of n-grams in the host's memory, read by the GPU row by row across the bus.

A table of n-grams can be larger than all other weights together, while a token reads a few hundred numbers of it. So
the table may stay where it is: its pages are locked, which gives the GPU an address for them, and one kernel of the
step copies the named rows into device memory. Nothing of it involves the host's threads, and a CUDA graph can hold it.
Weights that are changed in place are seen by the next step.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from gapless.errors import ConfigError


@triton.jit
def _gather_kernel(table_ptr, ids_ptr, out_ptr, W: tl.constexpr, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, TILE)
    row = tl.load(ids_ptr + i)
    tl.store(out_ptr + i * W + w, tl.load(table_ptr + row * W + w, mask=w < W), mask=w < W)


def gather_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``table[ids]`` for a table in device memory or in locked pages: ``[N, W]``, int64 ``[...]`` -> ``[..., W]``."""
    width = table.shape[1]
    out = torch.empty(*ids.shape, width, dtype=table.dtype, device=ids.device)
    _gather_kernel[(ids.numel(),)](table, ids, out, W=width, TILE=triton.next_power_of_2(width), num_warps=1)
    return out


class HostEmbedding:
    """An embedding whose weight lies in host memory and whose ids lie on the GPU; locks the pages for its lifetime.

    Raises:
        ConfigError: the driver cannot lock them.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        self._weight = embedding.weight.detach()
        if not self._weight.is_contiguous():
            raise ConfigError("the table of n-grams must be contiguous to be read from host memory")
        if not self._weight.is_pinned():
            self._lock()

    def _lock(self) -> None:
        runtime: Any = torch.cuda.cudart()
        address, size = self._weight.data_ptr(), self._weight.numel() * self._weight.element_size()
        code = int(runtime.cudaHostRegister(address, size, 0))
        if code:
            raise ConfigError(
                f"{size / 2**30:.1f} GiB of n-grams cannot be locked in host memory (CUDA error {code}). Raise the "
                "limit of locked memory (ulimit -l), or put the tables on the device: ple_tables_on_host=False"
            )
        weakref.finalize(self, runtime.cudaHostUnregister, address)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[T, H]`` -> ``[T, H, W]``, on the device of the ids."""
        return gather_rows(self._weight, ids)
