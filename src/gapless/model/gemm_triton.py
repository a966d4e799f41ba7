# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Products with few tokens, bound by the bytes of their weights: a decode step's GEMMs as Triton kernels.

**What is fused.** A norm needs the whole row, a GEMM program has one tile of it. So the program that finishes a
tile of the residual stores it three times over: the residual r, r times the weight of the norm that follows, and
the tile's sum of r squared per token. The next product runs on r * weight as if it were normed, and multiplies its
result by rsqrt(mean square): one scalar per token, which commutes with the product. Against the unfused path the
input of the product is rounded once instead of twice, and nothing else changes.

**Split K.** Programs of one tile leave fp32 partials; the last to arrive adds them in the order of their parts, so
that the result does not depend on who was last. It sets the counter back to zero, for the next launch.

**Dependent launch** (`pdl`, Hopper and later). A kernel may start while the one before it still runs. The rule
that makes this safe, for every kernel launched so:

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

Shape legend: M tokens, N outputs, K inputs; weights ``[N, K]``, contiguous.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

OFF, LATE, EARLY = 0, 1, 2

# What is done with the product.
PLAIN = tl.constexpr(0)  # scaled, bias added
RESIDUAL = tl.constexpr(1)  # bias added, added to the residual; with weight and squares for the norm that follows
GLU = tl.constexpr(2)  # scaled, silu(first half) * second half
OPS = {"plain": 0, "residual": 1, "glu": 2}


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How one product is cut up.

    Attributes:
        dot: tensor cores; else plain arithmetic, for one token.
        block_n: outputs of a program; with GLU, of each half.
        block_k: inputs of a step of its loop.
        split: programs that share the inputs of a tile; dot only.
        preload: whether the first block of weights is loaded into registers before the wait.
        prefetch: inputs per output whose weights are brought to the second-level cache before the wait.
        block_m: tokens of a program; 0 for all.
    """

    dot: bool
    block_n: int
    block_k: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    preload: bool = False
    prefetch: int = 0
    block_m: int = 0

    def tiles(self, n: int) -> int:
        return -(-n // self.block_n)

    def rows(self, m: int) -> int:
        """Tokens of a program."""
        return self.block_m or max(16, triton.next_power_of_2(m))

    def fit(self, k: int) -> GemmConfig:
        """The nearest that the kernel takes, for ``k`` inputs."""
        block_k = min(self.block_k, max(16, triton.next_power_of_2(k)))
        blocks = -(-k // block_k)
        split = max(1, min(self.split, blocks))
        prefetch = min(self.prefetch, blocks // split * block_k) if k % block_k == 0 else 0
        return GemmConfig(
            self.dot, self.block_n, block_k, split, self.warps, self.stages, self.preload, prefetch, self.block_m
        )


class Workspace:
    """Partials and counters of the split products of one stream.

    Captured graphs hold its addresses, so it must not grow after the first capture: `reserve` first.
    """

    def __init__(self, device: torch.device) -> None:
        self.partials = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = torch.zeros(0, dtype=torch.int32, device=device)

    def fits(self, partials: int, counters: int) -> bool:
        return partials <= self.partials.numel() and counters <= self.counters.numel()

    def reserve(self, partials: int, counters: int) -> None:
        """Make room. The numbers are those of `workspace_size`."""
        if not self.fits(partials, counters):
            device = self.counters.device
            self.partials = self.partials.new_empty(max(partials, self.partials.numel()))
            self.counters = torch.zeros(max(counters, self.counters.numel()), dtype=torch.int32, device=device)


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


@triton.jit
def _scales(sq_ptr, m, inside, eps, SQ, K: tl.constexpr, SQP: tl.constexpr):
    """1 / root mean square of the tokens ``m``, from the sums of squares of the tiles of the residual."""
    j = tl.arange(0, SQP)
    mask = inside[:, None] & (j < SQ)[None, :]
    squares = tl.load(sq_ptr + m[:, None] * SQ + j[None, :], mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit
def _silu(gate, up, dtype: tl.constexpr):
    """Rounded where the modules round."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)


@triton.jit(do_not_specialize=["M", "SQ"])
def _dot_kernel(
    x_ptr, w_ptr, bias_ptr, sq_ptr, res_ptr, norm_ptr, out_ptr, next_ptr, sq_out_ptr, part_ptr, count_ptr, M, SQ,
    eps, N: tl.constexpr, K: tl.constexpr, SQP: tl.constexpr, OP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, S: tl.constexpr, PRE: tl.constexpr, PF: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weights are the left operand: their tile has the 64 rows that wgmma asks for, the tokens may be few."""
    TILES: tl.constexpr = (N + BN - 1) // BN
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    EVEN_N: tl.constexpr = N % BN == 0
    EVEN_K: tl.constexpr = K % BK == 0
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    # Programs that share weights run side by side.
    m_tile = tl.program_id(0)
    tile = tl.program_id(1) // S
    part = tl.program_id(1) % S
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()

    row = tl.arange(0, BN)
    col = tl.arange(0, BK)
    n = tile * BN + row
    begin = part * BLOCKS // S
    end = (part + 1) * BLOCKS // S
    w_off = row[:, None] * K + col[None, :]
    w_base = w_ptr + tile.to(tl.int64) * (BN * K) + begin * BK
    if OP == GLU:
        up_base = w_base + N * K
    w_mask = (n < N)[:, None] & (col < K)[None, :]
    if PRE:
        in_first = (n < N)[:, None] & (begin * BK + col < K)[None, :]
        w_first = tl.load(w_base + w_off, mask=in_first, other=0.0, eviction_policy="evict_first")
        if OP == GLU:
            up_first = tl.load(up_base + w_off, mask=in_first, other=0.0, eviction_policy="evict_first")
    if PF > 0 and EVEN_N:
        _prefetch(w_base, K, BN, PF, THREADS)
        if OP == GLU:
            _prefetch(up_base, K, BN, PF, THREADS)
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()

    m = m_tile * BM + tl.arange(0, BM)
    m_in = m < M
    x_off = m[:, None] * K + col[None, :]
    x_base = x_ptr + begin * BK
    if PRE:
        x_first = tl.load(x_base + x_off, mask=m_in[:, None] & (begin * BK + col < K)[None, :], other=0.0)
    if sq_ptr is not None:
        scale = _scales(sq_ptr, m, m_in, eps, SQ, K, SQP)

    acc = tl.zeros((BN, BM), tl.float32)
    if OP == GLU:
        up = tl.zeros((BN, BM), tl.float32)
    for b in range(PRE, end - begin):
        k = b * BK
        x_mask = m_in[:, None]
        if not EVEN_K:
            inside = ((begin + b) * BK + col < K)[None, :]
            x_mask = x_mask & inside
            w_mask = (n < N)[:, None] & inside
        if EVEN_K and EVEN_N:
            w = tl.load(w_base + k + w_off, eviction_policy="evict_first")
        elif EVEN_K:
            w = tl.load(w_base + k + w_off, mask=(n < N)[:, None], other=0.0, eviction_policy="evict_first")
        else:
            w = tl.load(w_base + k + w_off, mask=w_mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_base + k + x_off, mask=x_mask, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if OP == GLU:
            if EVEN_K and EVEN_N:
                v = tl.load(up_base + k + w_off, eviction_policy="evict_first")
            elif EVEN_K:
                v = tl.load(up_base + k + w_off, mask=(n < N)[:, None], other=0.0, eviction_policy="evict_first")
            else:
                v = tl.load(up_base + k + w_off, mask=w_mask, other=0.0, eviction_policy="evict_first")
            up = tl.dot(v, tl.trans(x), up, input_precision="ieee")
    if PRE:  # last, so that the loop's loads are on their way meanwhile
        acc = tl.dot(w_first, tl.trans(x_first), acc, input_precision="ieee")
        if OP == GLU:
            up = tl.dot(up_first, tl.trans(x_first), up, input_precision="ieee")

    if S > 1:
        SIZE: tl.constexpr = BN * BM
        place = row[:, None] * BM + tl.arange(0, BM)[None, :]
        HALVES: tl.constexpr = 2 if OP == GLU else 1
        which = m_tile * TILES + tile
        base = part_ptr + which.to(tl.int64) * (S * HALVES * SIZE)
        mine = base + part * (HALVES * SIZE) + place
        # Tokens beyond M are stored too: a mask along the contiguous dimension would halve the width of an access.
        tl.store(mine, acc)
        if OP == GLU:
            tl.store(mine + SIZE, up)
        # All threads' stores, then one thread's release; its acquire, then all threads' loads (the broadcast of
        # its result has a barrier). The loads bypass the first-level cache, which is not coherent.
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + which, 1, sem="acq_rel") != S - 1:
            return
        tl.store(count_ptr + which, 0)
        acc = tl.zeros((BN, BM), tl.float32)
        for s in tl.static_range(S):
            acc += tl.load(base + s * (HALVES * SIZE) + place, cache_modifier=".cg")
        if OP == GLU:
            up = tl.zeros((BN, BM), tl.float32)
            for s in tl.static_range(S):
                up += tl.load(base + (s * HALVES + 1) * SIZE + place, cache_modifier=".cg")

    if OP == RESIDUAL:
        sq_out_ptr += tile
    _finish_tile(
        acc, up if OP == GLU else acc, scale if sq_ptr is not None else acc, n, m, M, bias_ptr, sq_ptr, res_ptr,
        norm_ptr, out_ptr, next_ptr, sq_out_ptr, N, TILES, OP, dtype,
    )  # fmt: skip


@triton.jit
def _finish_tile(
    acc, up, scale, n, m, M, bias_ptr, sq_ptr, res_ptr, norm_ptr, out_ptr, next_ptr, sq_out_ptr,
    N: tl.constexpr, TILES: tl.constexpr, OP: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Epilogue of a tile ``[BN, BM]``."""
    n_in = n < N
    mask = n_in[:, None] & (m < M)[None, :]
    place = m[None, :].to(tl.int64) * N + n[:, None]
    if sq_ptr is not None:
        acc *= scale[None, :]
        if OP == GLU:
            up *= scale[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n_in, other=0.0).to(tl.float32)[:, None]
    if OP == GLU:
        tl.store(out_ptr + place, _silu(acc, up, dtype), mask=mask)
    elif OP == RESIDUAL:
        residual = tl.load(res_ptr + place, mask=mask, other=0.0).to(tl.float32)
        total = (residual + acc.to(dtype).to(tl.float32)).to(dtype)
        tl.store(out_ptr + place, total, mask=mask)
        wide = total.to(tl.float32)
        weight = tl.load(norm_ptr + n, mask=n_in, other=0.0).to(tl.float32)
        tl.store(next_ptr + place, (wide * weight[:, None]).to(dtype), mask=mask)
        tl.store(sq_out_ptr + m * TILES, tl.sum(wide * wide, 0), mask=m < M)
    else:
        tl.store(out_ptr + place, acc.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["SQ"])
def _one_token_kernel(
    x_ptr, w_ptr, bias_ptr, sq_ptr, res_ptr, norm_ptr, out_ptr, next_ptr, sq_out_ptr, SQ, eps,
    N: tl.constexpr, K: tl.constexpr, SQP: tl.constexpr, OP: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRE: tl.constexpr, PF: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token needs no tensor core: weights go from memory to registers, many loads of 16 bytes in flight."""
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    tile = tl.program_id(0)
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, BN)
    col = tl.arange(0, BK)
    n = tile * BN + row
    n_in = n < N
    w_base = w_ptr + tile.to(tl.int64) * (BN * K)
    w_off = row[:, None] * K + col[None, :]
    in_first = n_in[:, None] & (col < K)[None, :]
    if PRE:
        w_first = tl.load(w_base + w_off, mask=in_first, other=0.0, eviction_policy="evict_first")
        if OP == GLU:
            up_first = tl.load(w_base + N * K + w_off, mask=in_first, other=0.0, eviction_policy="evict_first")
    if PF > 0 and N % BN == 0:
        _prefetch(w_base, K, BN, PF, THREADS)
        if OP == GLU:
            _prefetch(w_base + N * K, K, BN, PF, THREADS)
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()

    if sq_ptr is not None:
        j = tl.arange(0, SQP)
        squares = tl.load(sq_ptr + j, mask=j < SQ, other=0.0)
    if OP == RESIDUAL:
        residual = tl.load(res_ptr + n, mask=n_in, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + n, mask=n_in, other=0.0).to(tl.float32)
    # Sums stay spread over the threads until the end.
    acc = tl.zeros((BN, BK), tl.float32)
    if OP == GLU:
        up = tl.zeros((BN, BK), tl.float32)
    for b in tl.static_range(BLOCKS):
        k = b * BK
        x = tl.load(x_ptr + k + col, mask=k + col < K, other=0.0).to(tl.float32)[None, :]
        mask = n_in[:, None] & (k + col < K)[None, :]
        if PRE and b == 0:
            acc += w_first.to(tl.float32) * x
            if OP == GLU:
                up += up_first.to(tl.float32) * x
        else:
            w = tl.load(w_base + k + w_off, mask=mask, other=0.0, eviction_policy="evict_first")
            if OP == GLU:
                v = tl.load(w_base + N * K + k + w_off, mask=mask, other=0.0, eviction_policy="evict_first")
                up += v.to(tl.float32) * x
            acc += w.to(tl.float32) * x

    y = tl.sum(acc, 1)
    if sq_ptr is not None:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= scale
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n_in, other=0.0).to(tl.float32)
    if OP == GLU:
        z = tl.sum(up, 1)
        if sq_ptr is not None:
            z *= scale
        tl.store(out_ptr + n, _silu(y, z, dtype), mask=n_in)
    elif OP == RESIDUAL:
        total = (residual + y.to(dtype).to(tl.float32)).to(dtype)
        tl.store(out_ptr + n, total, mask=n_in)
        wide = total.to(tl.float32)
        tl.store(next_ptr + n, (wide * weight).to(dtype), mask=n_in)
        tl.store(sq_out_ptr + tile, tl.sum(wide * wide, 0))
    else:
        tl.store(out_ptr + n, y.to(dtype), mask=n_in)


@triton.jit
def _embed_kernel(
    ids_ptr, table_ptr, norm_ptr, out_ptr, next_ptr, sq_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    depend(PDL)
    row = tl.load(ids_ptr + token).to(tl.int64)
    x = tl.load(table_ptr + row * SIZE + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    tl.store(out_ptr + token * SIZE + column, x, mask=inside)
    tl.store(next_ptr + token * SIZE + column, (wide * weight).to(x.dtype), mask=inside)
    tl.store(sq_ptr + token, tl.sum(wide * wide, 0))


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream between two products.

    Attributes:
        residual: ``[M, H]``.
        x: ``[M, H]``, input of the product that follows: normed, or if there are squares, the residual times the
            weight of the norm.
        squares: fp32 ``[M, tiles]``, sums of squares of the residual's tiles.
    """

    residual: torch.Tensor
    x: torch.Tensor
    squares: torch.Tensor | None


def embed(
    ids: torch.Tensor, table: torch.Tensor, norm: torch.Tensor, pdl: int = OFF, out: Stream | None = None
) -> Stream:
    """Rows of the table, prepared for the first norm."""
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
        ids, table, norm, out.residual, out.x, out.squares, SIZE=size, BLOCK=block, PDL=pdl,
        num_warps=min(16, max(1, block // 512)), **_launch(pdl),
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
) -> torch.Tensor:
    """``silu(g) * u`` with ``[g, u] = norm(x) @ weight.T``."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _gemm("glu", x, weight, config, workspace, out, squares=squares, eps=eps, pdl=pdl)
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
) -> Stream:
    """``residual + (x @ weight.T + bias)``, prepared for the norm with the weight ``norm``."""
    total, ahead = torch.empty_like(residual), torch.empty_like(residual)
    tiles = config.tiles(weight.shape[0])
    squares = torch.empty((x.shape[0], tiles), dtype=torch.float32, device=x.device)
    _gemm(
        "residual", x, weight, config, workspace, total, bias=bias, residual=residual, norm=norm, ahead=ahead,
        squares_out=squares, pdl=pdl,
    )  # fmt: skip
    return Stream(total, ahead, squares)


def workspace_size(op: str, m: int, n: int, config: GemmConfig) -> tuple[int, int]:
    """Partials and counters that a product needs; ``n`` rows of weights."""
    if not config.dot or config.split == 1:
        return 0, 0
    halves = 2 if op == "glu" else 1
    rows = config.rows(m)
    tiles = config.tiles(n // halves) * -(-m // rows)
    return tiles * config.split * halves * config.block_n * rows, tiles


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
        "THREADS": 32 * config.warps, "PDL": pdl, "num_warps": config.warps, **_launch(pdl),
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


def _launch(pdl: int) -> dict[str, bool]:
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
