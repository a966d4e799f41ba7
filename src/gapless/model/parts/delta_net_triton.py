# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""`gapless.model.parts.delta_net` as one kernel: a program walks the tokens of one run for some columns of one head.

Columns of the state are independent of each other: program (s, h, c) holds ``[DK, TILE]`` of it in registers from the
run's first token to its last, and writes it out after each of the last M. Lengths, rows and positions are read on the
device, so that one captured launch serves prompts, decode steps and drafts alike. The entry that a run starts from may
be one that it writes later; it is read first, by the same program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.model.parts.delta_net import EPS

TILE = 16
"""Columns of a program. One warp holds them, so that sums over the rows need no barrier."""


@triton.jit
def _kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, states_ptr, starts_ptr, lens_ptr, rows_ptr, out_ptr, scale, eps, q_token,
    k_token, v_token, g_token, beta_token, HV: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    M: tl.constexpr, BK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    h = tl.program_id(1)
    row = tl.load(rows_ptr + s)
    first = tl.load(starts_ptr + s)
    stop = tl.load(starts_ptr + s + 1)
    position = tl.load(lens_ptr + s) - (stop - first)
    before = tl.load(rows_ptr + tl.maximum(s - 1, 0))
    if (stop > first) & ((s == 0) | (before != row)):
        final = tl.num_programs(0) - 1
        last = s + 1  # the run goes on while the next sequence is of the same row
        while (last <= final) & (tl.load(rows_ptr + tl.minimum(last, final)) == row):
            last += 1
        stop = tl.load(starts_ptr + last)
        dk = tl.arange(0, BK)
        dv = tl.program_id(2) * TILE + tl.arange(0, TILE)
        in_k = dk < DK
        in_v = dv < DV
        here = states_ptr + row.to(tl.int64) * (M * HV * DK * DV) + h * (DK * DV) + dk[:, None] * DV + dv[None, :]
        both = in_k[:, None] & in_v[None, :]
        entry = (position + M - 1) % M
        state = tl.load(here + entry * (HV * DK * DV), mask=both, other=0.0)
        state = tl.where(position > 0, state, 0.0)
        begin = first.to(tl.int64)
        count = stop - first
        in_q = h // GROUP * DK + dk
        q_new = tl.load(q_ptr + begin * q_token + in_q, mask=in_k, other=0.0)
        k_new = tl.load(k_ptr + begin * k_token + in_q, mask=in_k, other=0.0)
        v_new = tl.load(v_ptr + begin * v_token + h * DV + dv, mask=in_v, other=0.0)
        g_new = tl.load(g_ptr + begin * g_token + h)
        beta_new = tl.load(beta_ptr + begin * beta_token + h)
        for i in range(count):
            q, k, v = q_new.to(tl.float32), k_new.to(tl.float32), v_new.to(tl.float32)
            g, beta = g_new.to(tl.float32), beta_new.to(tl.float32)
            # What the next token brings is on its way while this one is computed; nothing here waits for memory.
            ahead = begin + tl.minimum(i + 1, count - 1)
            q_new = tl.load(q_ptr + ahead * q_token + in_q, mask=in_k, other=0.0)
            k_new = tl.load(k_ptr + ahead * k_token + in_q, mask=in_k, other=0.0)
            v_new = tl.load(v_ptr + ahead * v_token + h * DV + dv, mask=in_v, other=0.0)
            g_new = tl.load(g_ptr + ahead * g_token + h)
            beta_new = tl.load(beta_ptr + ahead * beta_token + h)
            q = q * (scale / tl.sqrt(tl.sum(q * q, 0) + eps))
            k = k * (1.0 / tl.sqrt(tl.sum(k * k, 0) + eps))
            state = state * tl.exp(g)
            known = tl.sum(state * k[:, None], 0)
            state += k[:, None] * ((v - known) * beta)[None, :]
            out = tl.sum(state * q[:, None], 0)
            tl.store(out_ptr + ((begin + i) * HV + h) * DV + dv, out.to(out_ptr.dtype.element_ty), mask=in_v)
            if count - i <= M:
                entry = (position + i) % M
                tl.store(here + entry * (HV * DK * DV), state, mask=both)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """See `gapless.model.parts.delta_net.gated_delta_rule`; outputs of padding tokens are zero, too.

    Heads and their elements are contiguous in q, k, v, g and beta; tokens may have any stride.
    """
    tokens, key_heads, dk = k.shape
    heads, dv = v.shape[1:]
    for x in (q, k, v, g, beta):
        if x[0].is_contiguous() is False:
            raise ValueError("the heads of one token must be contiguous")
    if states.dtype != torch.float32 or not states.is_contiguous():
        raise ValueError("the states must be contiguous and in fp32")
    out = torch.zeros(tokens, heads, dv, dtype=q.dtype, device=q.device)
    tile = min(TILE, triton.next_power_of_2(dv))
    _kernel[(len(rows), heads, triton.cdiv(dv, tile))](
        q, k, v, g, beta, states, query_start_loc, seq_lens, rows, out, dk**-0.5, EPS, q.stride(0), k.stride(0),
        v.stride(0), g.stride(0), beta.stride(0), HV=heads, GROUP=heads // key_heads, DK=dk, DV=dv,
        M=states.shape[1], BK=triton.next_power_of_2(dk), TILE=tile, num_warps=1,
    )  # fmt: skip
    return out
