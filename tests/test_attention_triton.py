"""The Triton kernels against a brute-force oracle.

Without a GPU the whole file runs once more in a child process whose Triton interprets the kernels on the CPU
(the choice is made when the kernels are defined, so it cannot be made in a process that may have imported
them already). On a GPU the cases run natively, and larger ones with them; bfloat16 only there, since the
interpreter's ``dot`` has none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from gapless.attention.context import AttentionContext, AttentionParams
from gapless.attention.kv_format import decode, encode

pytest.importorskip("triton", reason="Triton is not installed")

from interpreted import CHILD, run_in_the_interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
runs_kernels = pytest.mark.skipif(not GPU and not CHILD, reason="runs in the interpreter, in a child process")


@pytest.mark.skipif(GPU or CHILD, reason="the kernels run in this process")
def test_all_cases_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


@dataclass(frozen=True)
class Shape:
    """``sequences``: (query tokens, tokens cached before them); ``padding``: extra padding sequences,
    tokens."""

    sequences: tuple[tuple[int, int], ...]
    hq: int = 4
    hk: int = 2
    d: int = 16
    block: int = 8
    padding: tuple[int, int] = (0, 0)
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    decode_only: bool = False
    kept: torch.dtype | None = None  # of the cache, if not ``dtype``
    scaled: bool = False


class Case:
    """Random tensors of one step. What must not be read holds NaN; block numbers past a row's end are
    wild."""

    def __init__(self, shape: Shape, seed: int, device: str = DEVICE) -> None:
        print(f"seed={seed} {shape}")
        self.shape = shape
        rng = random.Random(seed)
        gen = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=gen).to(shape.dtype).to(device)

        real, b = len(shape.sequences), shape.block
        q_lens = [n for n, _ in shape.sequences] + [0] * shape.padding[0]
        lens = [n + cached for n, cached in shape.sequences] + [0] * shape.padding[0]
        tokens = sum(q_lens) + shape.padding[1]
        persistent = real + 2
        width = max(-(-n // b) for n in lens) + 2
        blocks = 1 + sum(-(-n // b) for n in lens) + 3
        free = list(range(1, blocks))
        rng.shuffle(free)
        table = torch.full((persistent + 1, width), 2**30, dtype=torch.int32)
        table[persistent] = 0
        rows = rng.sample(range(persistent), real) + [persistent] * shape.padding[0]
        for row, n in zip(rows[:real], lens, strict=False):
            for p in range(-(-n // b)):
                table[row, p] = free.pop()
        # A view into a wider tensor for the cache: garbage everywhere but in what the requests have written.
        cache = torch.full((2, blocks, b, shape.hk, shape.d), float("nan"), dtype=shape.dtype)
        slots: list[int] = []
        for row, n, q_len in zip(rows, lens, q_lens, strict=True):
            for pos in range(n):
                block, offset = int(table[row, pos // b]), pos % b
                if pos >= n - q_len:
                    slots.append(block * b + offset)
                elif shape.window is None or pos > n - q_len - shape.window:
                    cache[:, block, offset] = torch.randn(2, shape.hk, shape.d, generator=gen).to(shape.dtype)
        slots += [rng.randrange(b) for _ in range(shape.padding[1])]
        if shape.window is not None:  # blocks behind the window are gone; their entries name the null block
            for row, n, q_len in zip(rows[:real], lens, q_lens, strict=False):
                for p in range(max(0, n - q_len + 1 - shape.window) // b):
                    table[row, p] = 0
        scales = 0.02 + torch.rand(2, shape.hk, generator=gen)  # so small that some keys and values saturate
        self.scales = scales.to(device) if shape.scaled else None
        kept = cache.dtype if shape.kept is None else shape.kept
        halves = (encode(half, kept, s if shape.scaled else None) for half, s in zip(cache, scales, strict=True))
        self.cache = torch.stack(list(halves)).to(device)
        qkv = normal(tokens, (shape.hq + 2 * shape.hk) * shape.d)
        q, k, v = qkv.split([shape.hq * shape.d, shape.hk * shape.d, shape.hk * shape.d], dim=-1)
        self.q = q.unflatten(-1, (shape.hq, shape.d))
        self.k, self.v = k.unflatten(-1, (shape.hk, shape.d)), v.unflatten(-1, (shape.hk, shape.d))
        starts = torch.tensor([0, *q_lens]).cumsum(0)
        self.q_lens, self.lens, self.rows, self.real_tokens = q_lens, lens, rows, sum(q_lens)
        self.context = AttentionContext(
            kv_caches=[self.cache],
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            query_start_loc=starts.to(torch.int32).to(device),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            rows=torch.tensor(rows, dtype=torch.int32, device=device),
            block_tables=table.to(device),
            block_size=b,
            decode_only=shape.decode_only,
        )
        sinks = normal(shape.hq) if shape.sinks else None
        self.params = AttentionParams(shape.d**-0.5, shape.window, shape.softcap, sinks)

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache after the write, and outputs of the real tokens in fp32: one token, one head at a time."""
        shape = self.shape
        cache = self.cache.clone()
        flat = cache.view(2, -1, shape.hk, shape.d)
        for half, new in enumerate((self.k, self.v)):
            flat[half, self.context.slot_mapping] = encode(new, cache.dtype, self.scale(half))
        return cache, self.attended(cache)

    def scale(self, half: int) -> torch.Tensor | None:
        return None if self.scales is None else self.scales[half]

    def attended(self, cache: torch.Tensor) -> torch.Tensor:
        """Of the real tokens, from a cache that holds their keys and values."""
        shape, params = self.shape, self.params
        flat = torch.stack([decode(cache[half].flatten(0, 1), torch.float32, self.scale(half)) for half in (0, 1)])
        out = torch.zeros(self.real_tokens, shape.hq, shape.d, device=self.q.device)
        group = shape.hq // shape.hk
        t = 0
        for row, n, q_len in zip(self.rows, self.lens, self.q_lens, strict=True):
            for own in range(n - q_len, n):
                low = 0 if shape.window is None else max(0, own + 1 - shape.window)
                pos = torch.arange(low, own + 1, device=self.q.device)
                table = self.context.block_tables[row].long()
                place = table[pos // shape.block] * shape.block + pos % shape.block
                keys = flat[0, place].repeat_interleave(group, 1)
                values = flat[1, place].repeat_interleave(group, 1)
                score = torch.einsum("hd,phd->hp", self.q[t].float(), keys) * params.scale
                if params.softcap is not None:
                    score = params.softcap * torch.tanh(score / params.softcap)
                if params.sinks is not None:
                    score = torch.cat([score, params.sinks.float()[:, None]], 1)
                weight = score.softmax(-1)[:, : pos.numel()]
                out[t] = torch.einsum("hp,phd->hd", weight, values)
                t += 1
        return out

    def check(self, **options: Any) -> torch.Tensor:
        from gapless.attention import triton as entry

        want_cache, want = self.oracle()
        if options:
            entry.write_kv(self.k, self.v, self.cache, self.context.slot_mapping, self.scales)
            got = entry.attend_cached(self.q, self.cache, self.context, self.params, self.scales, **options)
        else:
            got = entry.attend(self.q, self.k, self.v, self.cache, self.context, self.params, self.scales)
        assert got.shape == self.q.shape
        assert got.dtype == self.q.dtype
        kept = self.cache[:, 1:].float()
        torch.testing.assert_close(kept, want_cache[:, 1:].float(), rtol=0, atol=0, equal_nan=True)
        close = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[self.shape.dtype]
        torch.testing.assert_close(got[: self.real_tokens].float(), want, rtol=close, atol=close)
        assert not got.isnan().any()
        assert (got[self.real_tokens :] == 0).all()
        return got


def small_decode(**changes: Any) -> Any:
    from gapless.attention.triton_decode import DecodeConfig

    return replace(DecodeConfig(block_n=16, min_split=16, whole=20, even=0, programs=8, resident=64), **changes)


DECODE = Shape(((1, 0), (1, 36), (1, 100), (1, 15)), decode_only=True)


@runs_kernels
@pytest.mark.parametrize(
    ("shape", "last"),
    [
        (DECODE, True),
        (DECODE, False),
        (replace(DECODE, padding=(2, 2), d=80, hq=3, hk=1, block=16), True),
        (replace(DECODE, hq=32, hk=2, window=20, sinks=True), True),
        (replace(DECODE, hq=32, hk=2, window=20, sinks=True), False),
        (replace(DECODE, hq=2, hk=2, softcap=3.0, block=64, padding=(1, 1), sinks=True), True),
        (replace(DECODE, dtype=torch.float16), False),
    ],
)
def test_decode(shape: Shape, last: bool) -> None:
    Case(shape, seed=1).check(decode_config=small_decode(last_arriver_merges=last))


@runs_kernels
def test_decode_with_default_config() -> None:
    Case(DECODE, seed=2).check()


@runs_kernels
def test_layers_share_a_plan_and_counters_return_to_zero() -> None:
    case = Case(DECODE, seed=3)
    first = case.check(decode_config=small_decode())
    (plan,) = case.context.scratch.values()
    assert (plan.counters == 0).all()
    assert int(plan.first[0]) > len(DECODE.sequences), "no sequence was split: the test proves nothing"
    assert torch.equal(case.check(decode_config=small_decode()), first)
    assert len(case.context.scratch) == 1


@runs_kernels
def test_what_is_nearly_equal_is_not_split() -> None:
    """Three equal sequences stay whole, one of twice their length does not; the result is the same."""
    case = Case(replace(DECODE, sequences=((1, 63), (1, 63), (1, 63), (1, 127))), seed=4)
    want = case.check(decode_config=small_decode())
    case.context.scratch.clear()
    config = small_decode(programs=2 * DECODE.hk, even=1)  # two programs a head: 320 tokens are 160 each
    torch.testing.assert_close(case.check(decode_config=config), want, rtol=1e-4, atol=1e-4)
    (plan,) = case.context.scratch.values()
    if not torch.cuda.is_available():  # where there are more multiprocessors the share is another
        assert int(plan.first[0]) == len(case.shape.sequences)
    case.context.scratch.clear()
    case.check(decode_config=replace(config, programs=4 * DECODE.hk))  # 80 each
    (plan,) = case.context.scratch.values()
    if not torch.cuda.is_available():
        assert int(plan.first[0]) == 5
        assert (plan.first[1:4] == -1).all()


@runs_kernels
def test_a_long_sequence_is_split_into_what_fills_the_device_once() -> None:
    case = Case(replace(DECODE, sequences=((1, 0), (1, 390), (1, 40))), seed=5)
    want = case.check(decode_config=small_decode(programs=80))
    (plan,) = case.context.scratch.values()
    most = int(plan.first[0])
    case.context.scratch.clear()
    got = case.check(decode_config=small_decode(programs=80, resident=10))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    (plan,) = case.context.scratch.values()
    if not torch.cuda.is_available():  # five items a head: 391 tokens in five of 80, 41 in three of 16
        assert most > 9
        assert plan.first.tolist() == [9, -1, 1, 6]
        assert (plan.items[:9, 1] < plan.items[:9, 2]).all()


MIXED = Shape(((1, 40), (9, 0), (2, 11), (23, 18), (0, 0), (1, 7)), padding=(2, 5))


@runs_kernels
@pytest.mark.parametrize(
    ("shape", "last"),
    [
        (MIXED, True),
        (replace(MIXED, hq=3, hk=1, d=80, padding=(0, 0)), False),
        (replace(MIXED, window=6, sinks=True, block=16), True),
        (replace(MIXED, softcap=2.0, hq=8, hk=1, padding=(1, 40)), False),
        (replace(MIXED, hq=2, hk=2, window=30, softcap=4.0, sinks=True), True),
        (replace(MIXED, dtype=torch.float16), False),
    ],
)
def test_mixed(shape: Shape, last: bool) -> None:
    from gapless.attention.triton_prefill import PrefillConfig

    case = Case(shape, seed=4)
    small = PrefillConfig(16, 16, 4, 1)
    case.check(decode_config=small_decode(last_arriver_merges=last), prefill_config=small)


@runs_kernels
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("option", ["max_query_len", "split_query_len"])
def test_several_query_tokens_in_the_decode_kernel(option: str, window: int | None) -> None:
    shape = Shape(((5, 40), (1, 3), (4, 0), (2, 20)), hq=8, padding=(1, 3), window=window, sinks=True)
    Case(shape, seed=5).check(**{option: 5}, decode_config=small_decode())


@runs_kernels
@pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.float16, None])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        replace(DECODE, padding=(2, 2), d=80, hq=6, hk=3, block=16, sinks=True),
        replace(MIXED, softcap=2.0, window=30, sinks=True),
        replace(MIXED, d=24, hq=2, hk=2),
    ],
)
def test_formats_of_the_cache(shape: Shape, kept: torch.dtype | None, scaled: bool) -> None:
    from gapless.attention.triton_prefill import PrefillConfig

    for last in (True, False):
        case = Case(replace(shape, kept=kept, scaled=scaled), seed=9)
        config = small_decode(last_arriver_merges=last)
        case.check(decode_config=config, prefill_config=PrefillConfig(16, 16, 4, 1))
    few = replace(shape, sequences=((5, 40), (1, 3), (4, 0)), decode_only=False, padding=(1, 3))
    case = Case(replace(few, kept=kept, scaled=scaled), seed=10)
    case.check(max_query_len=5, decode_config=small_decode())


@runs_kernels
def test_random_cases() -> None:
    from gapless.attention.triton_prefill import PrefillConfig

    rng = random.Random(6)
    for seed in range(100, 112 if GPU else 104):
        decode_only = rng.random() < 0.4
        count = rng.randrange(1, 5)
        q_lens = [1 if decode_only or rng.random() < 0.4 else rng.randrange(2, 30) for _ in range(count)]
        hk, pads = rng.choice([1, 2, 3]), rng.randrange(3)
        shape = Shape(
            tuple((n, rng.randrange(70)) for n in q_lens),
            hq=hk * rng.choice([1, 2, 5, 6]),
            hk=hk,
            d=rng.choice([16, 24, 64]),
            block=rng.choice([8, 16, 32]),
            padding=(pads, pads if decode_only else rng.randrange(20)),
            window=rng.choice([None, None, 1, 17]),
            softcap=rng.choice([None, 5.0]),
            sinks=rng.random() < 0.5,
            decode_only=decode_only,
            kept=rng.choice([None, torch.float8_e4m3fn]),
            scaled=rng.random() < 0.5,
        )
        small = PrefillConfig(32, 16, 4, 1)
        config = small_decode(last_arriver_merges=rng.random() < 0.5)
        Case(shape, seed).check(decode_config=config, prefill_config=small)


LARGE = [
    Shape(
        ((1, 3000), (1, 17), (1, 511), (1, 0)) * 4,
        hq=32,
        hk=8,
        d=128,
        block=16,
        padding=(3, 3),
        decode_only=True,
    ),
    Shape(((1, 3000), (700, 0), (1, 64), (300, 900), (3, 5)), hq=32, hk=8, d=128, block=16, padding=(2, 70)),
    Shape(((1, 900), (130, 40), (5, 300)), hq=8, hk=4, d=256, block=16, window=128, softcap=50.0),
    Shape(((1, 900), (130, 40), (5, 300)), hq=64, hk=8, d=64, block=16, window=128, sinks=True),
    Shape(((1, 900), (130, 40), (5, 300)), hq=14, hk=2, d=64, block=256),
    Shape(((1, 900), (130, 40), (5, 300)), hq=9, hk=3, d=96, block=64),
]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", LARGE)
def test_large_cases_on_the_gpu(shape: Shape, dtype: torch.dtype) -> None:
    Case(replace(shape, dtype=dtype), seed=7).check()
    Case(replace(shape, dtype=dtype, kept=torch.float8_e4m3fn, scaled=True), seed=7).check()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("last", [True, False])
def test_graph_replays_with_other_lengths(last: bool) -> None:
    """One capture serves any lengths: shrink them in place and replay; run twice, for the counters."""
    from gapless.attention import triton as entry

    case = Case(replace(LARGE[0], dtype=torch.bfloat16), seed=8)
    config = small_decode(block_n=64, last_arriver_merges=last)

    def step() -> torch.Tensor:
        case.context.scratch.clear()
        return entry.attend_cached(case.q, case.cache, case.context, case.params, decode_config=config)

    entry.write_kv(case.k, case.v, case.cache, case.context.slot_mapping)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    lens = case.context.seq_lens.clone()
    for share in (1.0, 0.3, 1.0, 0.01):
        # The cache before a token is full, so that any shorter length is valid too.
        case.context.seq_lens.copy_((lens * share).ceil().to(torch.int32))
        for _ in range(2):
            graph.replay()
        torch.testing.assert_close(out, step(), rtol=1e-2, atol=1e-2)
