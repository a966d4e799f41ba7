"""The gated delta rule over packed tokens, with the state of each row in a small ring.

A head keeps a matrix S of shape ``[DK, DV]``. For each token it is decayed by ``exp(g)``, corrected towards the
token's value, and read:

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q

with q and k of unit length and q divided by sqrt(DK). (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024.)

A matrix cannot be unrolled when a draft is rejected, so each row has M = 1 + num_speculative_tokens of them: the
state after position p lies in entry p % M. A sequence that begins at position p starts from entry (p - 1) % M, and at
position 0 from zeros. A step leaves the states of its last M tokens. Of these, whichever turns out to be the last one
accepted is found by the next step's own position: no count of accepted tokens is needed. A preempted row starts again
at position 0, so nothing is cleared, and the null row of padding is never read by anybody.

Several sequences of a step may name one row, side by side, one token each; they are one run.

This form reads lengths on the host and is for the CPU; `gapless.model.parts.delta_net_triton` is the GPU's.

Shape legend: T tokens, S sequences, R rows, M states of a row, HK key heads, HV value heads, DK, DV their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

EPS = 1e-6
CHUNK = 64
"""Tokens that the chunked form solves together."""
FEW = 8
"""Runs of at most so many tokens go token by token, all rows at once."""


@dataclass(frozen=True, slots=True)
class Run:
    """The step's tokens [start, stop), all of one row, from ``position`` on."""

    row: int
    start: int
    stop: int
    position: int


def runs_of(query_start_loc: torch.Tensor, seq_lens: torch.Tensor, rows: torch.Tensor) -> list[Run]:
    """The runs of a step, on the host. Arguments as in `gapless.attention.context.AttentionContext`."""
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()  # sync-ok: cpu reference
    runs: list[Run] = []
    for s, row in enumerate(rows.tolist()):  # sync-ok: cpu reference
        start, stop = starts[s], starts[s + 1]
        if start == stop:
            continue
        if runs and runs[-1].row == row:
            runs[-1] = Run(row, runs[-1].start, stop, runs[-1].position)
        else:
            runs.append(Run(row, start, stop, lens[s] - (stop - start)))
    return runs


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
    """Outputs of all tokens; the states of the rows move on.

    Args:
        q, k: ``[T, HK, DK]``, of any length.
        v: ``[T, HV, DV]``; value head h goes with key head ``h // (HV // HK)``.
        g: ``[T, HV]``, logarithm of the decay, not above 0.
        beta: ``[T, HV]``.
        states: fp32 ``[R, M, HV, DK, DV]``, written in place.
        query_start_loc, seq_lens, rows: of the step.

    Returns:
        ``[T, HV, DV]`` in the dtype of ``q``, zeros for padding. Computed in the dtype of ``states``.
    """
    group = v.shape[1] // k.shape[1]
    parts = _unit(q, states.dtype) * q.shape[-1] ** -0.5, _unit(k, states.dtype)
    q32, k32 = (x.repeat_interleave(group, 1) for x in parts)
    inputs = (q32, k32, v.to(states.dtype), g.to(states.dtype), beta.to(states.dtype))
    out = torch.zeros(v.shape, dtype=states.dtype, device=v.device)
    runs, size = runs_of(query_start_loc, seq_lens, rows), states.shape[1]
    long = [run for run in runs if run.stop - run.start > max(FEW, size)]
    short = [run for run in runs if run.stop - run.start <= max(FEW, size)]
    for run in long:
        middle = run.stop - size  # the last ones go one by one, because their states stay
        state = _start(states, run)
        for first in range(run.start, middle, CHUNK):
            part = slice(first, min(first + CHUNK, middle))
            out[part], state = _chunk([x[part].transpose(0, 1) for x in inputs], state)
        before = run.position + middle - run.start - 1
        states[run.row, before % size] = state
        short.append(Run(run.row, middle, run.stop, before + 1))
    if short:
        _one_by_one(inputs, out, states, short)
    return out.to(q.dtype)


def _unit(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = x.to(dtype)
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def _start(states: torch.Tensor, run: Run) -> torch.Tensor:
    """The state ``[HV, DK, DV]`` before the run's first token; a copy."""
    if run.position == 0:
        return torch.zeros_like(states[0, 0])
    return states[run.row, (run.position - 1) % states.shape[1]].clone()


def _one_by_one(inputs: tuple[torch.Tensor, ...], out: torch.Tensor, states: torch.Tensor, runs: list[Run]) -> None:
    """All runs together, token by token; the states of each run's last M tokens are kept."""
    runs = sorted(runs, key=lambda run: run.start - run.stop)  # the longest first, so that those left are a prefix
    state = torch.stack([_start(states, run) for run in runs])  # [runs, HV, DK, DV]
    size = states.shape[1]
    for i in range(runs[0].stop - runs[0].start):
        left = [run for run in runs if run.stop - run.start > i]
        state = state[: len(left)]
        q, k, v, g, beta = (x[[run.start + i for run in left]] for x in inputs)
        state = state * g.exp()[..., None, None]
        known = torch.einsum("rhkv,rhk->rhv", state, k)
        state = state + torch.einsum("rhk,rhv->rhkv", k, (v - known) * beta[..., None])
        out[[run.start + i for run in left]] = torch.einsum("rhkv,rhk->rhv", state, q)
        states[[run.row for run in left], [(run.position + i) % size for run in left]] = state


def _chunk(inputs: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Several tokens at once: q, k, v, g, beta ``[HV, n, ...]`` and the state ``[HV, DK, DV]`` before them.

    Returns outputs ``[n, HV, DV]`` and the state after them.

    With G_i the product of the decays up to token i, the corrections u_i solve a unit triangular system,

        u_i = beta_i (v_i - G_i S^T k_i - sum over j < i of (G_i / G_j) (k_i . k_j) u_j),

    and outputs and final state are sums over them.
    """
    q, k, v, g, beta = inputs
    log = g.cumsum(-1)
    ratio = log[:, :, None] - log[:, None, :]
    later = torch.ones(ratio.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    ratio = ratio.masked_fill(later, -torch.inf).exp()  # [HV, i, j], zero for j > i
    total = log.exp()[..., None]
    system = beta[..., None] * (k @ k.mT) * ratio
    known = beta[..., None] * (v - total * (k @ state))
    u = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    out = total * (q @ state) + ((q @ k.mT) * ratio) @ u
    fades = (log[:, -1:] - log).exp()[..., None]
    return out.transpose(0, 1), log[:, -1].exp()[:, None, None] * state + (k * fades).mT @ u
