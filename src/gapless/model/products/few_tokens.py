# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Products with few tokens, bound by the bytes of their weights: a decode step's GEMMs as Triton kernels.

**What is fused.** A norm needs the whole row, a GEMM program has one tile of it. So the program that finishes a
tile of the residual stores it three times over: the residual r, r times the weight of the norm that follows, and
the tile's sum of r squared per token. The next product runs on r * weight as if it were normed, and multiplies its
result by rsqrt(mean square): one scalar per token, which commutes with the product. Against the unfused path the
input of the product is rounded once instead of twice, and nothing else changes.

The kernels are those of `gapless.model.products.tensor_cores` and, for one token, `gapless.model.products.one_token`.
They may start before their predecessor has ended, by the rule of `gapless.device.dependent_launch`.

Shape legend: M tokens, N outputs, K inputs; weights ``[N, K]``, contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.device.dependent_launch import OFF, depend, launch_options, supports_pdl
from gapless.model.products.config import GemmConfig, Workspace, workspace_size
from gapless.model.products.fusion import OPS
from gapless.model.products.one_token import _one_token_kernel
from gapless.model.products.stream import Stream
from gapless.model.products.tensor_cores import _dot_kernel


@triton.jit
def _embed_kernel(
    ids_ptr, table_ptr, overrides_ptr, norm_ptr, out_ptr, next_ptr, sq_ptr, scale, given, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr, SCALED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    depend(PDL)
    row = tl.load(ids_ptr + token).to(tl.int64)
    end = SIZE if overrides_ptr is None else tl.where(row < 0, 0, SIZE)  # an id below 0 has no row here
    x = tl.load(table_ptr + row * SIZE + column, mask=column < end, other=0.0)
    if SCALED:
        x = (x.to(tl.float32) * scale).to(x.dtype)
    if overrides_ptr is not None:
        y = tl.load(overrides_ptr + (-1 - row) * SIZE + column, mask=column < SIZE - end, other=0.0)
        if given is not None:
            y = (y.to(tl.float32) * given).to(y.dtype)
        x = tl.where(row < 0, y, x)
    wide = x.to(tl.float32)
    tl.store(out_ptr + token * SIZE + column, x, mask=inside)
    tl.store(next_ptr + token * SIZE + column, (wide * (1.0 + weight if SHIFT else weight)).to(x.dtype), mask=inside)
    tl.store(sq_ptr + token, tl.sum(wide * wide, 0))


def embed(
    ids: torch.Tensor,
    table: torch.Tensor,
    norm: torch.Tensor,
    pdl: int = OFF,
    out: Stream | None = None,
    scale: float = 1.0,
    shift: bool = False,
    overrides: torch.Tensor | None = None,
    given: float = 1.0,
) -> Stream:
    """Rows of the table, times ``scale``, prepared for the first norm; see `residual` for ``shift``. And where an id is
    negative, of ``overrides``, times ``given``; see `gapless.model.embedding`."""
    size = table.shape[1]
    if out is None:
        shape = (ids.shape[0], size)
        out = Stream(
            torch.empty(shape, dtype=table.dtype, device=table.device),
            torch.empty(shape, dtype=table.dtype, device=table.device),
            torch.empty((ids.shape[0], 1), dtype=torch.float32, device=table.device),
        )
    block = triton.next_power_of_2(size)
    _embed_kernel[(ids.shape[0],)](
        ids, table, overrides, norm, out.residual, out.x, out.squares, scale,
        None if overrides is None or given == 1.0 else given, SIZE=size, BLOCK=block, PDL=pdl, SCALED=scale != 1.0,
        SHIFT=shift, num_warps=min(16, max(1, block // 512)), **launch_options(pdl),
    )  # fmt: skip
    return out


def plain(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: GemmConfig,
    workspace: Workspace,
    *,
    bias: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
    pdl: int = OFF,
) -> torch.Tensor:
    """``norm(x) @ weight.T + bias``; without squares the norm is left out."""
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _gemm("plain", x, weight, config, workspace, out, bias=bias, squares=squares, eps=eps, pdl=pdl)
    return out


def glu(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: GemmConfig,
    workspace: Workspace,
    *,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    pdl: int = OFF,
    activation: int = 0,
) -> torch.Tensor:
    """``f(g) * u`` with ``[g, u] = norm(x) @ weight.T``; f as for `gapless.model.ops.reference.act_mul`."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _gemm("glu", x, weight, config, workspace, out, squares=squares, eps=eps, pdl=pdl, activation=activation)
    return out


def residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: GemmConfig,
    workspace: Workspace,
    residual: torch.Tensor,
    norm: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    pdl: int = OFF,
    shift: bool = False,
) -> Stream:
    """``residual + (x @ weight.T + bias)``, prepared for the norm with the weight ``norm``, or 1 + it (``shift``)."""
    total, ahead = torch.empty_like(residual), torch.empty_like(residual)
    tiles = config.tiles(weight.shape[0])
    squares = torch.empty((x.shape[0], tiles), dtype=torch.float32, device=x.device)
    _gemm(
        "residual", x, weight, config, workspace, total, bias=bias, residual=residual, norm=norm, ahead=ahead,
        squares_out=squares, pdl=pdl, shift=shift,
    )  # fmt: skip
    return Stream(total, ahead, squares)


def _gemm(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    config: GemmConfig,
    workspace: Workspace,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    ahead: torch.Tensor | None = None,
    squares_out: torch.Tensor | None = None,
    pdl: int = OFF,
    activation: int = 0,
    shift: bool = False,
) -> None:
    m, k = x.shape
    rows = weight.shape[0]
    n = rows // 2 if op == "glu" else rows
    if not (x.is_contiguous() and weight.is_contiguous() and out.is_contiguous() and weight.shape[1] == k):
        raise ValueError(f"products need contiguous operands that fit: {tuple(x.shape)}, {tuple(weight.shape)}")
    config = config.fit(k)
    count = 1 if squares is None else squares.shape[1]
    shared = {
        "N": n, "K": k, "SQP": _padded(count), "OP": OPS[op], "BN": config.block_n,
        "BK": config.block_k, "PRE": int(config.preload), "PF": _prefetched(config, x.device),
        "THREADS": 32 * config.warps, "PDL": pdl, "ACT": activation, "SHIFT": shift,
        "num_warps": config.warps, **launch_options(pdl),
    }  # fmt: skip
    if not config.dot:
        if m != 1:
            raise ValueError(f"the kernel for one token was chosen for {m}")
        _one_token_kernel[(config.tiles(n),)](
            x, weight, bias, squares, residual, norm, out, ahead, squares_out, count, eps, **shared
        )
        return
    if not workspace.fits(*workspace_size(op, m, rows, config)):
        raise RuntimeError(f"the workspace has no room for {op} of {m} x {rows} x {k}: reserve it first")
    bm = config.rows(m)
    _dot_kernel[(-(-m // bm), config.tiles(n) * config.split)](
        x, weight, bias, squares, residual, norm, out, ahead, squares_out, workspace.partials,
        workspace.counters, m, count, eps, BM=bm, S=config.split, num_stages=config.stages, **shared,
    )  # fmt: skip


def _padded(squares: int) -> int:
    # Few sizes, so that few variants of a kernel are compiled.
    return 64 if squares <= 64 else max(1024, triton.next_power_of_2(squares))


def _prefetched(config: GemmConfig, device: torch.device) -> int:
    """Inputs to prefetch per row: what `_prefetch` can deal out in pieces of 16 bytes, on Hopper and later."""
    if not config.prefetch or not supports_pdl(device):
        return 0
    parts = max(config.block_n, 32 * config.warps) // config.block_n
    return config.prefetch // (8 * parts) * (8 * parts)
