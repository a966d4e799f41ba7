"""`attend` against `attend_brute`, and `attend_brute` against SDPA on an unpaged sequence."""

from __future__ import annotations

import random

import pytest
import torch

from gapless.attention import reference, rows
from gapless.attention.context import AttentionContext, AttentionParams

STALE = 1e4  # what unused places of the pool hold: a leak of it cannot be missed


def make_step(
    rng: random.Random,
    lengths: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    size: int,
    block: int,
    pad_sequences: int = 0,
    pad_tokens: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, AttentionContext]:
    """A step of sequences (new tokens, length) over a scrambled pool. Returns q, k, v, kv_cache, context."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    num_rows, blocks_per_row = len(lengths) + 2, max(-(-length // block) for _, length in lengths) + 1
    needed = [-(-length // block) for _, length in lengths]
    free = list(range(1, sum(needed) + 5))
    rng.shuffle(free)
    tables = torch.randint(
        -(2**31), 2**31 - 1, (num_rows + 1, blocks_per_row), dtype=torch.int64
    ).int()  # stale
    row_of = rng.sample(range(num_rows), len(lengths))
    cache = torch.full((2, sum(needed) + 5, block, kv_heads, size), STALE, dtype=dtype)
    starts, slots = [0], []
    for (new, length), row, count in zip(lengths, row_of, needed, strict=True):
        table = [free.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(table, dtype=torch.int32)
        places = [table[p // block] * block + p % block for p in range(length)]
        for place in places[: length - new]:
            cache[:, place // block, place % block] = torch.randn(2, kv_heads, size, generator=generator).to(
                dtype
            )
        slots += places[length - new :]
        starts.append(starts[-1] + new)
    total = starts[-1] + pad_tokens
    slots += [rng.randrange(block) for _ in range(pad_tokens)]
    context = AttentionContext(
        kv_caches=[cache],
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_start_loc=torch.tensor(starts + [starts[-1]] * pad_sequences, dtype=torch.int32),
        seq_lens=torch.tensor([length for _, length in lengths] + [0] * pad_sequences, dtype=torch.int32),
        rows=torch.tensor(row_of + [num_rows] * pad_sequences, dtype=torch.int32),
        block_tables=tables,
        block_size=block,
        decode_only=all(new == 1 for new, _ in lengths) and not pad_tokens,
    )
    q, k, v = (
        torch.randn(total, count, size, generator=generator).to(dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    return q, k, v, cache, context


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    context: AttentionContext,
    params: AttentionParams,
    tolerance: float,
) -> None:
    brute_cache = cache.clone()
    expected = reference.attend_brute(q, k, v, brute_cache, context, params)
    for _ in range(2):  # the second call reuses the first one's scratch, as the next layer does
        got = reference.attend(q, k, v, cache, context, params)
        real = int(context.query_start_loc[-1])
        assert got.shape == q.shape
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got[:real], expected[:real], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache[:, 1:], brute_cache[:, 1:], rtol=0, atol=0)


@pytest.mark.parametrize("case", range(40))
def test_random_steps_equal_brute(case: int) -> None:
    seed = 1000 + case
    rng = random.Random(seed)
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
    lengths = []
    for _ in range(rng.randint(1, 6)):
        length = rng.randint(1, 70)
        new = rng.choice([1, 1, 1, rng.randint(1, min(length, 4)), rng.randint(1, length), length])
        lengths.append((new, length))
    params = AttentionParams(
        scale=rng.choice([0.125, 0.3]),
        window=rng.choice([None, None, 1, 5, 16, 33, 200]),
        softcap=rng.choice([None, None, 2.0, 30.0]),
        sinks=rng.choice([None, None, torch.linspace(-2, 3, kv_heads * group, dtype=torch.float64)]),
    )
    pads = (rng.choice([0, 0, 1, 3]), rng.choice([0, 0, 1, 7]))
    print(f"seed={seed} lengths={lengths} kv_heads={kv_heads} group={group} pads={pads} params={params}")
    block = rng.choice([1, 4, 8, 16])
    step = make_step(
        rng,
        lengths,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        size=8,
        block=block,
        pad_sequences=pads[0],
        pad_tokens=pads[1],
    )
    check(*step, params, 1e-10)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, sinks: bool) -> None:
    """Half precision has no sparse kernels and takes the gathering form."""
    step = make_step(
        random.Random(7),
        [(1, 30), (1, 9), (12, 20), (3, 3)],
        heads=6,
        kv_heads=2,
        size=16,
        block=8,
        dtype=dtype,
    )
    params = AttentionParams(scale=0.25, sinks=torch.ones(6, dtype=dtype) if sinks else None)
    check(*step, params, 2e-5 if dtype == torch.float32 else 3e-2)


def test_gathering_form_equals_in_place_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_sparse_kernels_work", lambda device, dtype: False)
    for softcap in (None, 5.0):
        step = make_step(random.Random(8), [(1, 30), (1, 9), (2, 20)], heads=6, kv_heads=2, size=16, block=8)
        check(*step, AttentionParams(scale=0.25, window=11, softcap=softcap), 1e-10)


def test_sparse_kernels_are_used_here() -> None:
    """A torch build that loses them would make the CPU slow without a word."""
    assert rows._sparse_kernels_work("cpu", torch.float32)


def test_very_different_lengths_make_several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "GROUP_COST", 3000)
    lengths = [(1, 4), (1, 600), (1, 5), (1, 590), (1, 300), (1, 3)] + [(1, 8)] * 4
    step = make_step(random.Random(9), lengths, heads=8, kv_heads=2, size=8, block=16)
    params = AttentionParams(scale=0.3)
    check(*step, params, 1e-10)
    made = [value for value in step[-1].scratch.values() if isinstance(value, rows._Groups)]
    assert len(made) == 1
    assert 2 <= len(made[0].groups) <= 4


def test_long_sequence_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The explicit softmax bounds its memory by taking some queries at a time."""
    monkeypatch.setattr(reference, "MAX_SCORES", 4 * 40 * 7)
    step = make_step(random.Random(10), [(30, 40)], heads=4, kv_heads=2, size=8, block=16)
    check(*step, AttentionParams(scale=0.3, softcap=3.0, sinks=torch.zeros(4, dtype=torch.float64)), 1e-10)


def test_only_padding() -> None:
    q, k, v, cache, context = make_step(random.Random(11), [(1, 1)], heads=2, kv_heads=1, size=8, block=4)
    context.query_start_loc.zero_()
    context.seq_lens.zero_()
    before = cache.clone()
    assert torch.equal(
        reference.attend(q, k, v, cache, context, AttentionParams(scale=1.0)), torch.zeros_like(q)
    )
    assert torch.equal(cache, before)


def test_brute_equals_sdpa_on_one_sequence() -> None:
    """The oracle itself, against torch on an unpaged prompt."""
    q, k, v, cache, context = make_step(random.Random(12), [(23, 23)], heads=4, kv_heads=2, size=8, block=4)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, scale=0.3, enable_gqa=True
    ).transpose(0, 1)
    got = reference.attend_brute(q, k, v, cache, context, AttentionParams(scale=0.3))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_stale_nan_does_not_leak() -> None:
    """Nothing outside a query's range is read, so even NaN there changes nothing."""
    for lengths in ([(1, 13), (1, 3)], [(9, 13)], [(7, 7)]):
        step = make_step(random.Random(13), lengths, heads=4, kv_heads=2, size=8, block=8)
        step[3][step[3] == STALE] = torch.nan
        got = reference.attend(*step, AttentionParams(scale=0.3, window=6))
        assert torch.isfinite(got).all()
