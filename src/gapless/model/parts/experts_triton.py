# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Experts as kernels: pairs dealt out to experts, two grouped products, and the weighted sum.

Four launches whatever E and the routing are, without an atomic and without the host. A *pair* is a token and one of
its experts, numbered ``token * K + place``. Pairs are dealt out into *tiles* of ``BM`` pairs of one expert each, in the
order of experts and pairs, so that results do not depend on who ran first:

    deal    pairs[tile * BM + i], or T * K where a tile has fewer; experts[tile]; how many tiles there are
    up      rows of x of a tile's tokens, times the expert's first weights, and the gate   -> h, by place in a tile
    down    h times the expert's second weights                                            -> y, by pair
    sum     over each token's pairs, in their order, in fp32                               -> out

The grids are bounds that depend on shapes only; programs without a tile leave at once. An expert that nobody chose has
no tile, so its weights are not read; with few tokens each chosen one is read once.

Shape legend: T tokens, K experts a token, E experts, H hidden size, F width of an expert, N = T * K pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gapless.model.parts.experts import Experts, Gate

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3, "relu": 4}


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a grouped product is cut up: pairs, outputs and inputs of a tile; stages and warps of a program."""

    pairs: int
    outputs: int
    inputs: int
    stages: int
    warps: int


@triton.jit(do_not_specialize=["N"])
def _deal_kernel(
    chosen_ptr, pairs_ptr, experts_ptr, count_ptr, N, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Program e deals out the pairs of expert e; where they begin, all of them count for themselves."""
    e = tl.program_id(0)
    place = tl.arange(0, CHUNK)
    counts = tl.zeros((EP,), tl.int32)
    for at in range(0, N, CHUNK):
        ids = tl.load(chosen_ptr + at + place, mask=at + place < N, other=E).to(tl.int32)
        counts += tl.histogram(tl.minimum(ids, E), EP)
    index = tl.arange(0, EP)
    tiles = (counts + BM - 1) // BM
    before = tl.sum(tl.where(index < e, tiles, 0), 0)
    mine = tl.sum(tl.where(index == e, counts, 0), 0)
    own = (mine + BM - 1) // BM
    if e == E - 1:
        tl.store(count_ptr, before + own)
    for t in range(own):
        tl.store(experts_ptr + before + t, e)
    first = before * BM
    seen = 0
    for at in range(0, N, CHUNK):
        ids = tl.load(chosen_ptr + at + place, mask=at + place < N, other=E).to(tl.int32)
        hit = ids == e
        rank = tl.cumsum(hit.to(tl.int32), 0) - 1 + seen
        tl.store(pairs_ptr + first + rank, at + place, mask=hit)
        seen += tl.sum(hit.to(tl.int32), 0)
    pad = tl.arange(0, BM)
    tl.store(pairs_ptr + first + mine + pad, N, mask=mine + pad < own * BM)


@triton.jit
def _activate(x, KIND: tl.constexpr, ALPHA: tl.constexpr):
    if KIND == 0:
        y = x / (1.0 + tl.exp(-ALPHA * x))
    elif KIND == 1:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-2.0 * inner))
    elif KIND == 3:
        y = tl.where(x > 0, x * x, 0.0)
    else:
        y = tl.where(x > 0, x, 0.0)
    return y


@triton.jit
def _gated(
    gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr
):
    """Rounded where the modules round."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if OFFSET != 0:
        up = (up + OFFSET).to(dtype).to(tl.float32)
    return (_activate(gate, KIND, ALPHA).to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit(do_not_specialize=["N"])
def _up_kernel(
    x_ptr, w_ptr, bias_ptr, pairs_ptr, experts_ptr, count_ptr, out_ptr, N, stride_e, stride_n, stride_k,
    K: tl.constexpr, H: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """The weights are the left operand: their tile has the 64 rows that wgmma asks for, the pairs may be few."""
    tile = tl.program_id(0)
    if tile >= tl.load(count_ptr):
        return
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    WIDE: tl.constexpr = 2 * BN if INTERLEAVED else BN
    ROWS: tl.constexpr = 2 * F if INTERLEAVED else F
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    m = tl.arange(0, BM)
    pair = tl.load(pairs_ptr + tile * BM + m)
    real = pair < N
    n = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    k = tl.arange(0, BK)
    x_row = x_ptr + (pair // K).to(tl.int64)[:, None] * H
    w_row = w_ptr + expert * stride_e + n[:, None] * stride_n
    acc = tl.zeros((WIDE, BM), tl.float32)
    if GATED and not INTERLEAVED:
        up = tl.zeros((BN, BM), tl.float32)
    for b in range(0, H, BK):
        at = b + k
        inside = (at < H)[None, :] if H % BK != 0 else None
        x_mask = real[:, None] & inside if H % BK != 0 else real[:, None]
        w_mask = (n < ROWS)[:, None] & inside if H % BK != 0 else (n < ROWS)[:, None]
        x = tl.load(x_row + at[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_row + at[None, :] * stride_k, mask=w_mask, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if GATED and not INTERLEAVED:
            v = tl.load(w_row + F * stride_n + at[None, :] * stride_k, mask=w_mask, other=0.0)
            up = tl.dot(v, tl.trans(x), up, input_precision="ieee")
    if bias_ptr is not None:
        bias_row = bias_ptr + expert * (2 * F if GATED else F) + n
        acc = acc.to(dtype).to(tl.float32) + tl.load(bias_row, mask=n < ROWS, other=0.0).to(tl.float32)[:, None]
        if GATED and not INTERLEAVED:
            more = tl.load(bias_row + F, mask=n < ROWS, other=0.0).to(tl.float32)[:, None]
            up = up.to(dtype).to(tl.float32) + more
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    place = (tile * BM + m).to(tl.int64)[None, :] * F + column[:, None]
    mask = (column < F)[:, None] & real[None, :]
    if INTERLEAVED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BN, 2, BM)), (0, 2, 1)))
        tl.store(out_ptr + place, _gated(gate, up, KIND, ALPHA, LIMIT, OFFSET, dtype), mask=mask)
    elif GATED:
        tl.store(out_ptr + place, _gated(acc, up, KIND, ALPHA, LIMIT, OFFSET, dtype), mask=mask)
    else:
        tl.store(out_ptr + place, _activate(acc.to(dtype).to(tl.float32), KIND, ALPHA).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["N"])
def _down_kernel(
    h_ptr, w_ptr, bias_ptr, pairs_ptr, experts_ptr, count_ptr, out_ptr, N, stride_e, stride_n, stride_k,
    H: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile >= tl.load(count_ptr):
        return
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    m = tl.arange(0, BM)
    pair = tl.load(pairs_ptr + tile * BM + m)
    real = pair < N
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    h_row = h_ptr + (tile * BM + m).to(tl.int64)[:, None] * F
    w_row = w_ptr + expert * stride_e + n[:, None] * stride_n
    acc = tl.zeros((BN, BM), tl.float32)
    for b in range(0, F, BK):
        at = b + k
        inside = (at < F)[None, :] if F % BK != 0 else None
        h_mask = real[:, None] & inside if F % BK != 0 else real[:, None]
        w_mask = (n < H)[:, None] & inside if F % BK != 0 else (n < H)[:, None]
        h = tl.load(h_row + at[None, :], mask=h_mask, other=0.0)
        w = tl.load(w_row + at[None, :] * stride_k, mask=w_mask, other=0.0)
        acc = tl.dot(w, tl.trans(h), acc, input_precision="ieee")
    y = acc.to(dtype)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * H + n, mask=n < H, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) + bias[:, None]).to(dtype)
    place = pair.to(tl.int64)[None, :] * H + n[:, None]
    tl.store(out_ptr + place, y, mask=(n < H)[:, None] & real[None, :])


@triton.jit
def _sum_kernel(y_ptr, weights_ptr, out_ptr, K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """``WIDE``: the weights are fp32, so that the products are not rounded."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        y = tl.load(y_ptr + (token * K + k) * H + column, mask=inside, other=0.0)
        term = y.to(tl.float32) * tl.load(weights_ptr + token * K + k).to(tl.float32)
        total += term if WIDE else term.to(y.dtype).to(tl.float32)
    tl.store(out_ptr + token * H + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def tiles_for(pairs: int, experts: int, dtype: torch.dtype) -> tuple[Tiles, Tiles]:
    """Of the two products, by the pairs of an expert, were they dealt out evenly: what `benchmarks/experts.py` found
    best on an H200 for 128 narrow and 32 wide experts."""
    if dtype == torch.float32:
        return Tiles(16, 32, 32, 2, 4), Tiles(16, 32, 32, 2, 4)
    each = pairs / experts
    if each <= 8:
        return Tiles(16, 64, 128, 4, 4), Tiles(16, 64, 128, 4, 4)
    if each <= 24:
        return Tiles(32, 64, 64, 3, 4), Tiles(32, 64, 64, 3, 4)
    if each <= 96:
        return Tiles(64, 64, 64, 3, 4), Tiles(64, 64, 64, 3, 4)
    return Tiles(128, 64, 64, 3, 8), Tiles(128, 256, 64, 3, 8)


def run(
    x: torch.Tensor,
    experts: Experts,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> torch.Tensor:
    """As `gapless.model.parts.experts.reference`, up to the order of sums within a product."""
    tokens, k = chosen.shape
    n, count, hidden, width = tokens * k, experts.count, experts.hidden, experts.width
    up_tiles, down_tiles = tiles or tiles_for(n, count, x.dtype)
    if up_tiles.pairs != down_tiles.pairs:
        raise ValueError(f"tiles of {up_tiles.pairs} and {down_tiles.pairs} pairs: both products share the deal")
    bm = up_tiles.pairs
    bound = n // bm + min(n, count)  # sum over experts of ceil(pairs / bm)
    x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
    pairs = torch.empty(bound * bm, dtype=torch.int32, device=x.device)
    numbers = torch.empty(bound + 1, dtype=torch.int32, device=x.device)  # of experts; the last: how many tiles
    number, total = numbers[:-1], numbers[-1:]
    _deal_kernel[(count,)](
        chosen, pairs, number, total, n, E=count, EP=triton.next_power_of_2(count + 1), BM=bm,
        CHUNK=min(1024, max(16, triton.next_power_of_2(n))), num_warps=4,
    )  # fmt: skip
    gate: Gate = experts.gate
    h = torch.empty((bound * bm, width), dtype=x.dtype, device=x.device)
    strides = _strides(experts.up, experts.transposed)
    _up_kernel[(bound, -(-width // up_tiles.outputs))](
        x, experts.up, experts.up_bias, pairs, number, total, h, n, *strides, K=k, H=hidden, F=width, BM=bm,
        BN=up_tiles.outputs, BK=up_tiles.inputs, GATED=gate.gated, INTERLEAVED=gate.interleaved,
        KIND=KINDS[gate.activation], ALPHA=gate.alpha, LIMIT=gate.limit, OFFSET=gate.offset,
        num_warps=up_tiles.warps, num_stages=up_tiles.stages,
    )  # fmt: skip
    y = torch.empty((n, hidden), dtype=x.dtype, device=x.device)
    strides = _strides(experts.down, experts.transposed)
    _down_kernel[(bound, -(-hidden // down_tiles.outputs))](
        h, experts.down, experts.down_bias, pairs, number, total, y, n, *strides, H=hidden, F=width, BM=bm,
        BN=down_tiles.outputs, BK=down_tiles.inputs, num_warps=down_tiles.warps, num_stages=down_tiles.stages,
    )  # fmt: skip
    out = torch.empty_like(x)
    block = min(1024, triton.next_power_of_2(hidden))
    _sum_kernel[(tokens, -(-hidden // block))](
        y, weights, out, K=k, H=hidden, BLOCK=block, WIDE=weights.dtype == torch.float32, num_warps=4
    )
    return out


def _strides(weight: torch.Tensor, transposed: bool) -> tuple[int, int, int]:
    """Of expert, output and input."""
    e, a, b = weight.stride()
    return (e, b, a) if transposed else (e, a, b)
