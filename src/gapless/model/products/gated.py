"""A gated product of some hundred tokens, ``silu(x @ gate.T) * (x @ up.T)`` in one kernel.

It rounds as a product and the SiLU kernel after it do (gate, up and SiLU to the dtype), so that only the order of sums
differs. `gapless.model.products.choice.GATED` says where it is used. Shape legend: M tokens, N outputs, K inputs;
weights ``[2 N, K]``, gate first.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gapless.model.products.fusion import _gate


@dataclass(frozen=True, slots=True)
class Gated:
    """How a gated product is cut up.

    Attributes:
        tokens, outputs, inputs: of a tile.
        stages, warps: of a program.
        programs: that share the tiles; one a multiprocessor.
    """

    tokens: int
    outputs: int
    inputs: int
    stages: int
    warps: int
    programs: int = 132


@triton.jit(do_not_specialize=["M"])
def _gated_kernel(x_desc, w_desc, out_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Persistent. Gate and up are one product of twice the width, taken apart in registers. The tiles of the same
    outputs go to programs side by side, so that weights are read once."""
    rows = tl.cdiv(M, BM)
    for tile in tl.range(tl.program_id(0), rows * tl.cdiv(N, BN), tl.num_programs(0), flatten=True):
        row = (tile % rows) * BM
        col = (tile // rows) * BN
        both = tl.zeros((BM, 2 * BN), tl.float32)
        for k in range(tl.cdiv(K, BK)):
            x = x_desc.load([row, k * BK])
            w = tl.reshape(w_desc.load([0, col, k * BK]), (2 * BN, BK))
            both = tl.dot(x, w.T, both)
        gate, up = tl.split(tl.permute(tl.reshape(both, (BM, 2, BN)), (0, 2, 1)))
        m = row + tl.arange(0, BM)
        n = col + tl.arange(0, BN)
        mask = (m < M)[:, None] & (n < N)[None, :]
        tl.store(out_ptr + m[:, None] * N + n[None, :], _gate(gate, up, 0, out_ptr.dtype.element_ty), mask=mask)


def gated(x: torch.Tensor, w: torch.Tensor, config: Gated) -> torch.Tensor:
    """``[M, N]`` of contiguous ``x`` ``[M, K]`` and ``w``, which begin at multiples of 16 bytes.

    In a graph, both addresses are kept by value, as those of any kernel.
    """
    (m, k), n = x.shape, w.shape[0] // 2
    bm, bn, bk = config.tokens, config.outputs, config.inputs
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    _gated_kernel[(min(config.programs, -(-m // bm) * -(-n // bn)),)](
        TensorDescriptor.from_tensor(x, [bm, bk]),
        TensorDescriptor(w, [2, n, k], [n * k, k, 1], [2, bn, bk]),  # rows of both halves in one tile
        out, m, n, k, BM=bm, BN=bn, BK=bk, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out
