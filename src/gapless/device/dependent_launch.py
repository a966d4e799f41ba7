# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Kernels that start while the one before them still runs: dependent launch, of Hopper and later (`pdl`).

The rule that makes this safe, for every kernel launched so:

1. Before `gdc_wait` it reads only what no kernel of the step writes (weights), and writes nothing at all, atomics
   included. So there is no read-after-write hazard with any earlier kernel, and no write-after-read hazard: by the
   time of its first write the kernel before is complete and its writes visible.
2. Every program calls `gdc_wait`, also one that has nothing to do. A grid is then complete only after the grid
   before it is, and by induction "the kernel before is complete" means all before it. Without this a kernel whose
   programs leave early could complete ahead of its predecessor, and let its successor through.
3. A kernel without the attribute (cuBLAS, torch) starts after full completion of its predecessor, as ever.

So partials, counters and buffers that the caching allocator hands out twice are shared by the kernels of one stream
as without dependent launch. An update of the weights in place must not be in the same graph as kernels that
prefetch them; between graphs and before an ordinary kernel of the same stream it is ordered.

`EARLY` lets the successor start before the wait (it may prefetch two kernels ahead), `LATE` after it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

OFF, LATE, EARLY = 0, 1, 2


@triton.jit
def depend(PDL: tl.constexpr):
    """Wait for the kernel before. Everything that a kernel of the step may have written is read after this."""
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _prefetch(base, K: tl.constexpr, BN: tl.constexpr, PF: tl.constexpr, THREADS: tl.constexpr):
    """Bring the first PF inputs of BN rows to the second-level cache, each byte asked for once."""
    COUNT: tl.constexpr = BN if BN > THREADS else THREADS
    PARTS: tl.constexpr = COUNT // BN
    EACH: tl.constexpr = PF // PARTS
    i = tl.arange(0, COUNT)
    address = (base + (i // PARTS) * K + (i % PARTS) * EACH).to(tl.int64)
    size = tl.full((COUNT,), EACH * (base.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0", "=r,l,r", [address, size], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


def launch_options(pdl: int) -> dict[str, bool]:
    # The interpreter and older devices know no such option; they are never asked for it.
    return {"launch_pdl": True} if pdl else {}


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether dependent launch and bulk prefetch exist there."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] >= 9
        and hasattr(tl.extra.cuda, "gdc_wait")
    )
