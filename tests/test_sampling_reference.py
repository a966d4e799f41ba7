"""The sampler in plain torch against a brute-force oracle: one row at a time, float64, a full sort."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import Feature, Word
from gapless.sampling.philox import Purpose, philox, uniform
from gapless.sampling.reference import _CANDIDATES, draw, sample, sample_and_store

F64 = npt.NDArray[np.float64]
ALL = Feature.SAMPLE | Feature.FILTER | Feature.MIN_TOKENS


@dataclass(frozen=True)
class Row:
    """One row's parameters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 5
    min_end: int = 0
    stop_ids: tuple[int, ...] = field(default=())

    def words(self) -> npt.NDArray[np.int32]:
        w = np.zeros(Word.COUNT, np.int32)
        f = w.view(np.float32)
        f[Word.TEMPERATURE], f[Word.TOP_P], f[Word.MIN_P] = self.temperature, self.top_p, self.min_p
        w[Word.TOP_K], w[Word.MIN_END], w[Word.NUM_STOP] = self.top_k, self.min_end, len(self.stop_ids)
        w[Word.SEED_LOW : Word.SEED_HIGH + 1] = np.array([self.seed % 2**64], np.uint64).view(np.int32)
        w[Word.STOP_IDS : Word.STOP_IDS + len(self.stop_ids)] = self.stop_ids
        return w


def params(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.from_numpy(np.stack([r.words() for r in rows]))
    return words, torch.tensor([r.position for r in rows])


def python_philox(key: list[int], counter: list[int]) -> list[int]:
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b % 2**32, (a >> 32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def row_u(row: Row) -> float:
    seed = row.seed % 2**64
    return python_philox([seed % 2**32, seed >> 32], [row.position, 0, 0, 0])[0] / 2**32


def kept_weights(logits: F64, row: Row, top_p_error: float = 0.0) -> F64 | None:
    """Weights with dropped tokens at 0; None for an invalid row."""
    x = logits.copy()
    if np.isnan(x).any():
        return None
    if row.position < row.min_end:
        x[[i for i in row.stop_ids if 0 <= i < len(x)]] = -np.inf
    if not np.isfinite(x.max()):
        return None
    if row.temperature == 0:
        return (np.arange(len(x)) == x.argmax()).astype(np.float64)
    x = (x - x.max()) / float(np.float32(row.temperature))
    kept = np.ones(len(x), bool)
    if 0 < row.top_k < len(x):
        kept &= x >= np.sort(x)[-row.top_k]
    top_p = float(np.float32(row.top_p))
    if top_p < 1:
        order = [i for i in np.argsort(-x, kind="stable") if kept[i]]
        share = np.cumsum(np.exp(x[order])) / np.exp(x[order]).sum()
        kept &= x >= x[order[int((share < top_p + top_p_error).sum().clip(max=len(order) - 1))]]
    kept &= np.exp(x) >= float(np.float32(row.min_p))
    return np.where(kept, np.exp(x), 0.0)


def oracle(logits: F64, row: Row, error: float = 0.0) -> set[int]:
    """The token; with ``error``, all tokens that rounding of this size may give."""
    tokens = set()
    for top_p_error in {-error, 0.0, error}:
        weights = kept_weights(logits, row, top_p_error)
        if weights is None:
            return {-1}
        cumulative = np.cumsum(weights)
        for u in {row_u(row) - error, row_u(row), row_u(row) + error}:
            hit = (cumulative > u * cumulative[-1]) & (weights > 0)
            tokens.add(int(hit.argmax() if hit.any() else np.flatnonzero(weights)[-1]))
    return tokens


def random_row(rng: np.random.Generator, vocab: int) -> Row:
    def one_of(*values: float) -> float:
        return values[int(rng.integers(len(values)))]

    return Row(
        temperature=one_of(0.0, 0.3, 0.8, 1.0, 3.0),
        top_k=int(one_of(0, 0, 1, 3, vocab // 2, vocab - 1, vocab, vocab + 7)),
        top_p=one_of(1.0, 1.0, 0.1, 0.5, 0.9, 0.999, 1e-6),
        min_p=one_of(0.0, 0.0, 0.01, 0.3, 1.0),
        seed=int(rng.integers(2**64, dtype=np.uint64)),
        position=int(rng.integers(1, 10000)),
        min_end=int(one_of(0, 0, 20000)),
        stop_ids=tuple(int(i) for i in rng.integers(-2, vocab + 3, int(rng.integers(0, 33)))),
    )


def random_batch(seed: int, vocab: int, num_rows: int) -> tuple[torch.Tensor, list[Row]]:
    """Logits of many shapes: rounded ones with ties, flat ones, ones with -inf, and invalid ones."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, vocab)) * rng.choice([0.1, 1.0, 4.0, 20.0], (num_rows, 1))
    x[rng.random(num_rows) < 0.3] = np.round(x[rng.random(num_rows) < 0.3][:1])
    x[rng.random(x.shape) < 0.05] = -np.inf
    logits = torch.from_numpy(x).float().bfloat16().float()
    for s in range(num_rows):
        if rng.random() < 0.1:
            logits[s, int(rng.integers(vocab))] = [float("nan"), float("inf")][int(rng.integers(2))]
        if rng.random() < 0.05:
            logits[s] = -float("inf")
    return logits, [random_row(rng, vocab) for _ in range(num_rows)]


@pytest.mark.parametrize("vocab", [1, 2, 5, 97, 256, 700, 1500])
def test_equals_brute_force(vocab: int) -> None:
    for seed in range(3):
        logits, rows = random_batch(seed, vocab, 40)
        got = sample(logits, *params(rows), ALL).tolist()
        for s, row in enumerate(rows):
            assert got[s] in oracle(logits[s].double().numpy(), row, 1e-6), (seed, s, row)


@pytest.mark.parametrize("top_p", [1.0, 0.99])
@pytest.mark.parametrize("top_k", [_CANDIDATES - 1, _CANDIDATES, _CANDIDATES + 1, _CANDIDATES + 2, 399])
def test_top_k_about_the_number_of_candidates(top_k: int, top_p: float) -> None:
    """In a larger vocabulary, with logits so flat that the last of the kept ones is drawn now and then."""
    torch.manual_seed(0)
    logits = torch.rand(1, 400) * 0.01
    row = Row(top_k=top_k, top_p=top_p, temperature=1.0)
    weights = kept_weights(logits[0].double().numpy(), row)
    assert weights is not None
    assert reached(logits, row, 8_000) == set(np.flatnonzero(weights).tolist())


def reached(logits: torch.Tensor, row: Row, count: int) -> set[int]:
    """Tokens that ``count`` positions give."""
    rows = [replace(row, position=i) for i in range(count)]
    return set(sample(logits.expand(count, -1), *params(rows), ALL).tolist())


@pytest.mark.parametrize(
    "row",
    [
        Row(top_k=4),
        Row(top_p=0.7),
        Row(min_p=0.2),
        Row(top_k=9, top_p=0.8),
        Row(top_p=0.9, min_p=0.15, temperature=1.5),
        Row(top_k=6, top_p=0.95, min_p=0.05, temperature=0.5),
        Row(top_k=3, stop_ids=(0, 3, 5), min_end=10**6),
        Row(top_p=0.5, temperature=0.01),
    ],
)
def test_kept_set_is_reached_and_no_other(row: Row) -> None:
    logits = torch.tensor([[2.0, 1.5, 1.5, 1.5, 1.0, 0.5, 0.5, 0.0, -0.0, -1.0, -float("inf"), -3.0]])
    weights = kept_weights(logits[0].double().numpy(), row)
    assert weights is not None
    assert reached(logits, row, 4000) == set(np.flatnonzero(weights).tolist())


@pytest.mark.parametrize("features", [Feature.SAMPLE, ALL])
def test_draws_follow_the_distribution(features: Feature) -> None:
    count, logits = 20_000, torch.randn(40, generator=torch.Generator().manual_seed(1))
    for by_seed in (False, True):
        rows = [Row(0.8, seed=i if by_seed else 3, position=9 if by_seed else i) for i in range(count)]
        tokens = sample(logits.expand(count, -1), *params(rows), features)
        expected = torch.softmax(logits.double() / 0.8, -1) * count
        chi_square = ((tokens.bincount(minlength=40) - expected) ** 2 / expected).sum()
        assert chi_square < 80  # 39 degrees of freedom: exceeded once in 9000


def test_draws_at_neighbouring_keys_are_independent() -> None:
    u = uniform(*torch.zeros(2, 20_000, dtype=torch.int64), torch.arange(20_000), Purpose.SAMPLE)
    assert abs(np.corrcoef(u[:-1].numpy(), u[1:].numpy())[0, 1]) < 0.03
    other = uniform(*torch.zeros(2, 20_000, dtype=torch.int64), torch.arange(20_000), Purpose.DRAFT)
    assert abs(np.corrcoef(u.numpy(), other.numpy())[0, 1]) < 0.03
    assert float(u.min()) >= 0
    assert float(u.max()) < 1


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ([0, 0], [0, 0, 0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 2, [2**32 - 1] * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0xA4093822, 0x299F31D0],
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(key: list[int], counter: list[int], words: list[int]) -> None:
    k0, k1 = (torch.tensor([k]) for k in key)
    c0, c1, c2, c3 = (torch.tensor([c]) for c in counter)
    assert [int(w) for w in philox((k0, k1), (c0, c1, c2, c3))] == words
    assert python_philox(key, counter) == words


def test_each_parameter_changes_the_output() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).expand(64, -1)

    def run(**changes: object) -> list[int]:
        rows = [replace(Row(seed=1, position=i, stop_ids=(1, 2, 3)), **changes) for i in range(64)]  # type: ignore[arg-type]
        return sample(logits, *params(rows), ALL).tolist()  # type: ignore[no-any-return]

    base = run()
    assert run() == base
    top = [int(i) for i in logits[0].topk(20).indices]
    for changes in (
        {"temperature": 0.0},
        {"temperature": 0.5},
        {"top_k": 10},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"seed": 2},
        {"seed": 1 + 2**32},
        {"stop_ids": tuple(top), "min_end": 10**6},
    ):
        assert run(**changes) != base, changes


def test_a_feature_that_is_not_set_is_not_looked_at() -> None:
    logits = torch.randn(1, 50)
    best = int(logits.argmax())
    row = Row(temperature=1.0, top_k=1, stop_ids=(best,), min_end=100)
    assert sample(logits, *params([row]), Feature.GREEDY).tolist() == [best]
    assert sample(logits, *params([row]), Feature.MIN_TOKENS).tolist() != [best]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits, rows = random_batch(7, 400, 32)
    together = sample(logits, *params(rows), ALL)
    for s, row in enumerate(rows):
        assert sample(logits[s : s + 1], *params([row]), ALL)[0] == together[s]
    order = torch.randperm(32)
    assert torch.equal(sample(logits[order], *params([rows[int(i)] for i in order]), ALL), together[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_takes_the_lowest_of_equal_ids(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 1000, dtype=dtype)
    logits[1, 500:] = 1
    logits[2, 999] = 2
    assert sample(logits, *params([Row(0.0)] * 3), ALL).tolist() == [0, 500, 999]


def test_invalid_rows() -> None:
    logits = torch.zeros(5, 10)
    logits[0, 3], logits[1, 3], logits[3] = float("nan"), float("inf"), -float("inf")
    logits[2, 4] = float("nan")
    rows = [
        Row(),
        Row(),
        Row(0.0, stop_ids=(4,), min_end=100),
        Row(top_k=2),
        Row(stop_ids=(*range(10),), min_end=9),
    ]
    for features in (ALL, ALL & ~Feature.FILTER):
        assert sample(logits, *params(rows), features).tolist() == [-1] * 5


def test_extreme_temperatures() -> None:
    logits = torch.tensor([[0.0, 1e-3, 5.0, 5.0, -5.0]])
    for temperature in (1e-40, 1e-10):
        assert reached(logits, Row(temperature), 200) == {2, 3}
    assert reached(logits, Row(1e4), 400) == {0, 1, 2, 3, 4}


def test_draw_never_gives_a_token_without_weight() -> None:
    weights = torch.zeros(3, 600)
    weights[0, 599], weights[1, 0], weights[2, 300] = 1.0, 1e-30, 1e-38
    for u in (0.0, 0.5, 1 - 2.0**-32):
        assert draw(weights, torch.full((3,), u, dtype=torch.float64)).tolist() == [599, 0, 300]


def test_bisection_equals_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would run: no candidates, thresholds by bisection for all rows."""
    logits, rows = random_batch(11, 3000, 24)
    expected = sample(logits, *params(rows), ALL)
    monkeypatch.setattr("gapless.sampling.reference._on_cpu", lambda x: False)
    assert torch.equal(sample(logits, *params(rows), ALL), expected)


def test_store_writes_only_flagged_valid_places() -> None:
    layout = RowLayout(max_num_seqs=4, max_model_len=8, block_size=4)
    arena = torch.full((layout.num_words,), 77, dtype=torch.int32)
    logits = torch.eye(5, 20)[:, 3:].contiguous()  # token s - 3, or 0 if all are equal
    logits[2, 0] = float("nan")
    logits[4, 9] = 2.0
    rows = torch.tensor([2, 0, 1, 3, 4], dtype=torch.int32)
    positions = torch.tensor([7, 1, 2, 8, 0])
    flags = torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32)
    for r in range(5):
        arena[layout.params_at + r * Word.COUNT :][: Word.COUNT] = torch.from_numpy(Row(0.0).words())
    before, out = arena.clone(), torch.full((5,), 5, dtype=torch.int32)
    sample_and_store(logits, arena, layout, rows, positions, flags, Feature.GREEDY, out)
    assert out.tolist() == [0, 0, -1, 0, 0]
    before[2 * 8 + 7] = 0
    live = layout.null_row * layout.max_model_len
    assert torch.equal(arena[:live], before[:live])
    assert torch.equal(arena[layout.block_tables_at :], before[layout.block_tables_at :])
