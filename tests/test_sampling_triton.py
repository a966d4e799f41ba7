"""The Triton sampler against the oracle of the reference's tests.

Without a GPU the file runs once more in a child process in which Triton interprets the kernels on the CPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import Feature, Word
from gapless.sampling import reference
from test_sampling_reference import ALL, Row, oracle, params, python_philox, random_batch

pytest.importorskip("triton", reason="Triton is not installed")

from interpreted import CHILD, run_in_the_interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
runs_kernels = pytest.mark.skipif(not GPU and not CHILD, reason="runs in the interpreter, in a child process")
ERROR = 1e-5


@pytest.mark.skipif(GPU or CHILD, reason="the kernels run in this process")
def test_all_cases_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def check(logits: torch.Tensor, rows: list[Row], features: Feature = ALL) -> list[int]:
    from gapless.sampling.triton import sample

    words, positions = params(rows)
    got = sample(logits.to(DEVICE), words.to(DEVICE), positions.to(DEVICE), features).tolist()
    wide = logits.double().numpy()
    for s, row in enumerate(rows):
        assert got[s] in oracle(wide[s], row, ERROR), (s, row)
    return [int(t) for t in got]


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 700, 5000])
def test_equals_brute_force(vocab: int, dtype: torch.dtype) -> None:
    logits, rows = random_batch(vocab, vocab, 64 if GPU else 4)
    check(logits.to(dtype), rows)


@runs_kernels
@pytest.mark.parametrize("features", [Feature.GREEDY, Feature.SAMPLE, Feature.SAMPLE | Feature.MIN_TOKENS])
def test_features(features: Feature) -> None:
    logits = torch.randn(6, 4200, generator=torch.Generator().manual_seed(2))
    logits[4, 4100] = float("nan")
    rows = [
        Row(0.7 * s if features else 0.0, seed=s, stop_ids=(int(logits[s].argmax()),), min_end=9)
        for s in range(6)
    ]
    if not features & Feature.MIN_TOKENS:
        rows = [Row(r.temperature, seed=r.seed) for r in rows]
    check(logits, rows, features)


@runs_kernels
@pytest.mark.parametrize(
    "row",
    [
        Row(top_k=1),
        Row(top_k=200),
        Row(top_p=0.9),
        Row(top_p=0.99999),
        Row(3.0, top_p=0.95, min_p=0.001),
        Row(min_p=0.05),
        Row(0.6, top_k=20, top_p=0.95),
    ],
)
@pytest.mark.parametrize("scale", [0.2, 4.0])
def test_filters(row: Row, scale: float) -> None:
    """Flat rows, in which most groups are searched, and peaked ones."""
    logits = torch.randn(GPU * 7 + 1, 4700, generator=torch.Generator().manual_seed(3)) * scale
    check(logits, [Row(**{**_fields(row), "position": s}) for s in range(len(logits))])


def _fields(row: Row) -> dict[str, object]:
    return {name: getattr(row, name) for name in Row.__dataclass_fields__}


@runs_kernels
def test_a_row_does_not_depend_on_its_neighbours_or_strides() -> None:
    from gapless.sampling.triton import sample

    logits, rows = random_batch(5, 300, 4)
    words, positions = (t.to(DEVICE) for t in params(rows))
    together = sample(logits.to(DEVICE), words, positions, ALL)
    wide = torch.full((4, 421), 99.0)
    wide[:, :300] = logits
    assert torch.equal(sample(wide.to(DEVICE)[:, :300], words, positions, ALL), together)
    for s in (0, 3):
        alone = sample(logits[s : s + 1].to(DEVICE), words[s : s + 1], positions[s : s + 1], ALL)
        assert alone[0] == together[s]


@runs_kernels
def test_store_equals_reference() -> None:
    from gapless.sampling.triton import sample_and_store

    layout = RowLayout(max_num_seqs=9, max_model_len=20, block_size=4)
    rng = np.random.default_rng(4)
    arena = torch.from_numpy(rng.integers(0, 50, layout.num_words).astype(np.int32))
    logits, params_rows = random_batch(6, 150, 8)
    logits[3, 7] = float("nan")
    words = arena[layout.params_at : layout.bias_at].view(-1, int(Word.COUNT))
    rows = torch.from_numpy(rng.permutation(9)[:8].astype(np.int32))
    rows[7] = layout.null_row
    words[rows.long()] = params(params_rows)[0]
    positions = torch.from_numpy(rng.integers(0, 20, 8))
    positions[2] = 20
    flags = torch.tensor([1, 1, 1, 1, 0, 3, 2, 0], dtype=torch.int32)
    results = []
    for store, device in ((reference.sample_and_store, "cpu"), (sample_and_store, DEVICE)):
        mine = arena.clone().to(device)
        out = torch.full((8,), 7, dtype=torch.int32, device=device)
        moved = (t.to(device) for t in (rows, positions, flags))
        store(logits.to(device), mine, layout, *moved, ALL, out)
        mine[layout.null_row * 20 : layout.block_tables_at] = 0
        results.append((mine.cpu(), out.cpu()))
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][0], results[1][0])


@runs_kernels
def test_philox_is_tritons() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(out_ptr, seed_low, seed_high, position):  # type: ignore[no-untyped-def]
        low = seed_low.to(tl.uint32, bitcast=True).to(tl.uint64)
        high = seed_high.to(tl.uint32, bitcast=True).to(tl.uint64)
        counter = position + tl.arange(0, 8)
        a, b, c, d = tl.philox((high << 32) | low, counter, counter * 0 + 1, counter * 0 + 2, counter * 0)
        place = tl.arange(0, 8)
        tl.store(out_ptr + place, a.to(tl.int64))
        tl.store(out_ptr + 8 + place, b.to(tl.int64))
        tl.store(out_ptr + 16 + place, c.to(tl.int64))
        tl.store(out_ptr + 24 + place, d.to(tl.int64))

    out = torch.zeros(4, 8, dtype=torch.int64, device=DEVICE)
    seed = torch.tensor([-5, 123456789], dtype=torch.int32, device=DEVICE)
    kernel[(1,)](out, -5, 123456789, 1000)
    position = torch.arange(1000, 1008, device=DEVICE)
    one = torch.ones_like(position)
    expected = reference_words(seed, position, one)
    assert torch.equal(out, expected)
    key = [2**32 - 5, 123456789]
    assert out[:, 3].tolist() == python_philox(key, [1003, 1, 2, 0])


def reference_words(seed: torch.Tensor, position: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    from gapless.sampling.philox import philox

    return torch.stack(philox((seed[0] * one, seed[1] * one), (position, one, 2 * one, 0 * one)))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_vocabulary(dtype: torch.dtype) -> None:
    logits, rows = random_batch(9, 151_936, 32)
    check(logits.to(dtype), rows)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_reference_on_the_gpu_never_syncs() -> None:
    logits, rows = random_batch(3, 2000, 32)
    words, positions = (t.cuda() for t in params(rows))
    logits = logits.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = reference.sample(logits, words, positions, ALL)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for s, row in enumerate(rows):
        assert int(got[s]) in oracle(logits[s].double().cpu().numpy(), row, ERROR)
