"""The products of small batches against plain torch.

Without a GPU the file runs once more in a child process whose Triton interprets the kernels on the CPU; bfloat16,
dependent launch and real sizes only on a GPU.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed")

from gapless.attention.context import AttentionContext
from gapless.device.dependent_launch import EARLY, LATE, OFF
from gapless.model.ops import reference as ops_reference
from gapless.model.products.choice import default
from gapless.model.products.config import GemmConfig, Workspace, workspace_size
from gapless.model.products.few_tokens import embed, glu, plain, residual
from gapless.model.products.rule import Product, bucket, named, recipes
from interpreted import CHILD, run_in_the_interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EPS = 1e-5
runs_kernels = pytest.mark.skipif(not GPU and not CHILD, reason="runs in the interpreter, in a child process")


@pytest.mark.skipif(GPU or CHILD, reason="the kernels run in this process")
def test_all_cases_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


class Chain:
    """Embedding, product with norm, residual, GLU, residual, product with norm: kernels and unfused operations."""

    def __init__(
        self, m: int, h: int, f: int, seed: int, dtype: torch.dtype = torch.float32, device: str = DEVICE
    ) -> None:
        print(f"seed={seed} m={m} h={h} f={f}")
        gen = torch.Generator().manual_seed(seed)

        def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*size, generator=gen) * scale).to(dtype).to(device)

        self.m, self.h, self.f, self.device = m, h, f, device
        self.table = normal(50, h)
        self.ids = torch.randint(0, 50, (m,), generator=gen).to(device)
        self.norms = [(1 + normal(h, scale=0.2)) for _ in range(3)]
        self.first, self.first_bias = normal(f, h, scale=h**-0.5), normal(f, scale=0.1)
        self.out, self.out_bias = normal(h, f, scale=f**-0.5), normal(h, scale=0.1)
        self.gate_up = normal(2 * f, h, scale=h**-0.5)
        self.down = normal(h, f, scale=f**-0.5)
        self.last = normal(f + 8, h, scale=h**-0.5)

    def unfused(self, wide: bool = False) -> list[torch.Tensor]:
        def w(x: torch.Tensor) -> torch.Tensor:
            return x.double() if wide else x

        total = functional.embedding(self.ids, w(self.table))
        norms = [w(n) for n in self.norms]

        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if wide:
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
            return ops_reference.rms_norm(x, weight, EPS)

        a = functional.linear(norm(total, norms[0]), w(self.first), w(self.first_bias))
        b = total + functional.linear(a, w(self.out), w(self.out_bias))
        c = ops_reference.act_mul(functional.linear(norm(b, norms[1]), w(self.gate_up)))
        d = b + functional.linear(c, w(self.down))
        return [a, b, c, d, functional.linear(norm(d, norms[2]), w(self.last))]

    def fused(
        self, config: GemmConfig, pdl: int = OFF, space: Workspace | None = None, for_glu: GemmConfig | None = None
    ) -> list[torch.Tensor]:
        for_glu = for_glu or config
        if space is None:
            space = Workspace(torch.device(self.device))
        for op, weight in (("plain", self.first), ("residual", self.out), ("glu", self.gate_up),
                           ("residual", self.down), ("plain", self.last)):  # fmt: skip
            chosen = for_glu if op == "glu" else config
            space.reserve(*workspace_size(op, self.m, weight.shape[0], chosen.fit(weight.shape[1])))
        start = embed(self.ids, self.table, self.norms[0])
        a = plain(start.x, self.first, config, space, bias=self.first_bias, squares=start.squares, eps=EPS, pdl=pdl)
        b = residual(a, self.out, config, space, start.residual, self.norms[1], bias=self.out_bias, pdl=pdl)
        c = glu(b.x, self.gate_up, for_glu, space, squares=b.squares, eps=EPS, pdl=pdl)
        d = residual(c, self.down, config, space, b.residual, self.norms[2], pdl=pdl)
        e = plain(d.x, self.last, config, space, squares=d.squares, eps=EPS, pdl=pdl)
        assert not space.counters.any()
        return [a, b.residual, c, d.residual, e]


CASES = [
    (1, 32, 48, GemmConfig(False, 4, 16)),
    (1, 32, 64, GemmConfig(False, 8, 32, preload=True)),
    (1, 40, 24, GemmConfig(False, 2, 16, preload=True)),
    (1, 32, 48, GemmConfig(True, 16, 16)),
    (5, 32, 48, GemmConfig(True, 16, 16, split=2)),
    (17, 64, 32, GemmConfig(True, 32, 16, split=3, preload=True)),
    (20, 48, 40, GemmConfig(True, 16, 32, split=2, preload=True)),  # neither outputs nor inputs fill the tiles
    (35, 32, 48, GemmConfig(True, 32, 16, split=2, block_m=16)),
]


@runs_kernels
@pytest.mark.parametrize(("m", "h", "f", "config"), CASES)
def test_chain_equals_unfused(m: int, h: int, f: int, config: GemmConfig) -> None:
    chain = Chain(m, h, f, seed=random.randrange(2**31))
    for got, want in zip(chain.fused(config), chain.unfused(), strict=True):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


@runs_kernels
@pytest.mark.parametrize("h", [48, 96])
@pytest.mark.parametrize("given", [1.0, 2.0])
def test_embed_takes_rows_of_overrides_where_ids_are_negative(h: int, given: float) -> None:
    generator = torch.Generator().manual_seed(h)
    table, overrides, norm = (torch.randn(n, h, generator=generator).to(DEVICE) for n in (9, 5, 1))
    overrides[3] = float("nan")  # nobody's
    ids = torch.tensor([0, -1, 8, -5, -3], device=DEVICE)
    made = embed(ids, table, norm[0], overrides=overrides, scale=3.0, given=given)
    rows = given * overrides
    expected = torch.stack([3 * table[0], rows[0], 3 * table[8], rows[4], rows[2]])
    assert torch.equal(made.residual, expected)
    torch.testing.assert_close(made.x, expected * norm)
    assert made.squares is not None
    torch.testing.assert_close(made.squares[:, 0], expected.square().sum(1))


@runs_kernels
def test_rounding_of_the_unfused_path() -> None:
    """In half precision nearly every element has the very same bits; a missing or added rounding would show."""
    chain = Chain(3, 32, 48, seed=random.randrange(2**31), dtype=torch.float16)
    for i, (got, want) in enumerate(
        zip(chain.fused(GemmConfig(True, 16, 16, split=2)), chain.unfused(), strict=True)
    ):
        gap = ((got.double() - want.double()).norm() / want.double().norm()).item()
        assert gap < 2e-3, i


@runs_kernels
def test_workspace_must_be_reserved() -> None:
    x, weight = torch.randn(3, 32, device=DEVICE), torch.randn(32, 32, device=DEVICE)
    with pytest.raises(RuntimeError, match="reserve"):
        plain(x, weight, GemmConfig(True, 16, 16, split=2), Workspace(torch.device(DEVICE)))


@runs_kernels
def test_operands_must_fit() -> None:
    x, weight = torch.randn(3, 32, device=DEVICE), torch.randn(32, 64, device=DEVICE)[:, ::2]
    with pytest.raises(ValueError, match="contiguous"):
        plain(x, weight, GemmConfig(True, 16, 16), Workspace(torch.device(DEVICE)))


def test_config_is_fitted_to_the_inputs() -> None:
    config = GemmConfig(True, 64, 128, split=8, prefetch=512).fit(256)
    assert (config.block_k, config.split, config.prefetch) == (128, 2, 128)
    assert GemmConfig(True, 64, 128).fit(48).block_k == 64


def test_every_shape_has_recipes() -> None:
    for op in ("plain", "residual", "glu"):
        for m in (1, 2, 17, 64, 100, 256, 1000):
            for n, k in ((96, 64), (6144, 4096), (4096, 14336), (128256, 4096)):
                product = Product(op, m, n, k)
                assert default(product) == default(replace(product, m=bucket(m)))
                assert (name := named(product)) is None or name in recipes(product)
                for recipe in recipes(product).values():
                    fitted = recipe.config(product).fit(k)
                    assert fitted.split <= -(-k // fitted.block_k)
                    assert fitted.dot or m == 1


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 7, 32, 64, 128, 200])
def test_native_bf16(m: int) -> None:
    """Not further from exact arithmetic than the unfused operations, by more than a little."""
    chain = Chain(m, 1024, 3072, seed=random.randrange(2**31), dtype=torch.bfloat16)
    exact, unfused = chain.unfused(wide=True), chain.unfused()
    # A gated product reads two tiles of weights, so that its recipes are fewer.
    products = Product("plain", m, 3072, 1024), Product("glu", m, 6144, 1024)
    plains, gated = ({name: r.config(p) for name, r in recipes(p).items()} for p in products)
    for name, for_glu in zip(plains, itertools.cycle(gated)):
        for i, got in enumerate(chain.fused(plains[name], for_glu=gated[for_glu])):
            gap, usual = ((x.double() - exact[i]).norm() / exact[i].norm() for x in (got, unfused[i]))
            assert gap < 1.3 * usual + 1e-4, (name, for_glu, i)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [OFF, LATE, EARLY])
def test_replays_do_not_differ_by_one_bit(pdl: int) -> None:
    if pdl and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs dependent launch")
    chain = Chain(32, 1024, 3072, seed=random.randrange(2**31), dtype=torch.bfloat16)
    config = GemmConfig(True, 64, 128, split=4, preload=True, prefetch=256)
    space = Workspace(torch.device("cuda"))
    want = chain.fused(config, OFF, space)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            chain_out = _captured(chain, config, pdl, space)
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        graph.replay()
        for got, expected in zip(chain_out, want, strict=True):
            bad += (got != expected).any()
    assert int(bad) == 0


def _captured(chain: Chain, config: GemmConfig, pdl: int, space: Workspace) -> list[torch.Tensor]:
    start = embed(chain.ids, chain.table, chain.norms[0])
    a = plain(start.x, chain.first, config, space, bias=chain.first_bias, squares=start.squares, eps=EPS, pdl=pdl)
    b = residual(a, chain.out, config, space, start.residual, chain.norms[1], bias=chain.out_bias, pdl=pdl)
    c = glu(b.x, chain.gate_up, config, space, squares=b.squares, eps=EPS, pdl=pdl)
    d = residual(c, chain.down, config, space, b.residual, chain.norms[2], pdl=pdl)
    return [a, b.residual, c, d.residual, plain(d.x, chain.last, config, space, squares=d.squares, eps=EPS, pdl=pdl)]


def tiny_configs(unfused: set[str]) -> Callable[[Product], GemmConfig | None]:
    """Every other product by cuBLAS: all pairs of neighbours."""

    def choose(product: Product) -> GemmConfig | None:
        if product.op in unfused:
            return None
        if product.m == 1:
            return GemmConfig(False, 32, 32, preload=True)
        return GemmConfig(True, 64, 32, split=2)

    return choose


@pytest.mark.skipif(not CHILD, reason="the tiny models and the reference attention are on the CPU")
@pytest.mark.parametrize(  # biases; norms of q and k
    ("kind", "unfused"), [("qwen2", set()), ("qwen3", {"plain"}), ("qwen3", {"residual"}), ("qwen2", {"glu"})]
)
def test_small_batch_gives_the_decoder_s_logits(kind: str, unfused: set[str]) -> None:
    from gapless.model.adapter import TransformersModel
    from gapless.model.run.few_tokens import FewTokens
    from gapless.model.run.walk import walk
    from models import tiny
    from test_fused import attend_cached, described

    plain_model = TransformersModel(tiny(kind))
    decoder = described(plain_model)
    small = FewTokens(decoder.decoder, attend_cached, limit=16, choose=tiny_configs(unfused))
    for batch in (1, 3):
        caches = [
            torch.randn(2, 4, 8, spec.num_kv_heads, spec.head_dim_k) for spec in plain_model.kv_specs
        ]
        ids, positions = torch.arange(5, 5 + batch), torch.arange(batch) + 2
        logits = []
        for path in ("plain", "small"):
            context = AttentionContext(
                kv_caches=[c.clone() for c in caches],
                slot_mapping=8 * (torch.arange(batch) + 1) + positions,
                query_start_loc=torch.arange(batch + 1, dtype=torch.int32),
                seq_lens=(positions + 1).int(),
                rows=torch.arange(batch, dtype=torch.int32),
                block_tables=(torch.arange(batch, dtype=torch.int32) + 1)[:, None],
                block_size=8,
                decode_only=True,
            )
            out = torch.empty(batch, plain_model.vocab_size)
            if path == "plain":
                decoder.forward(ids, positions, context, ids, out)
            else:
                walk(decoder.decoder, small, ids, positions, context, None, out)
            logits.append(out)
        torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=2e-4)


DRAFT_POSITIONS = torch.tensor([2, 3, 4, 1, 0, 0])


def draft_step(caches: list[torch.Tensor]) -> AttentionContext:
    """Two sequences, of three tokens and of one, and two tokens of padding."""
    return AttentionContext(
        kv_caches=[c.clone() for c in caches],
        slot_mapping=torch.tensor([10, 11, 12, 17, 4, 5]),
        query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32),
        seq_lens=torch.tensor([5, 2], dtype=torch.int32),
        rows=torch.arange(2, dtype=torch.int32),
        block_tables=torch.tensor([[1], [2]], dtype=torch.int32),
        block_size=8,
        decode_only=False,
        max_query_len=3,
    )


@pytest.mark.skipif(not CHILD, reason="the tiny models and the reference attention are on the CPU")
@pytest.mark.parametrize("unfused", [set(), {"plain", "residual"}])
def test_small_batch_of_rows_with_drafts_gives_the_decoder_s_logits(unfused: set[str]) -> None:
    """Logits in another order than that of the tokens. And what padding tokens hold reaches no other: the attention
    that starts early leaves old memory in their outputs. NaN there stays in their own rows and in the null block."""
    from gapless.model.adapter import TransformersModel
    from gapless.model.run.few_tokens import FewTokens
    from gapless.model.run.walk import walk
    from models import tiny
    from test_fused import attend_cached, described

    plain_model = TransformersModel(tiny("qwen3"))
    decoder = described(plain_model)
    caches = [torch.randn(2, 4, 8, spec.num_kv_heads, spec.head_dim_k) for spec in plain_model.kv_specs]
    ids, index, padding = torch.arange(5, 11), torch.tensor([2, 3, 0, 0, 1]), [0.0]

    def attend(q: torch.Tensor, cache: torch.Tensor, step: AttentionContext, *rest: Any) -> torch.Tensor:
        out = attend_cached(q, cache, step, *rest)
        out[4:] = padding[0]
        return out

    small = FewTokens(decoder.decoder, attend, limit=16, choose=tiny_configs(unfused))
    context, out = draft_step(caches), torch.empty(5, plain_model.vocab_size)
    decoder.forward(ids, DRAFT_POSITIONS, context, index, out)
    results = []
    for padding[0] in (0.0, float("nan")):
        for which in (index, None):
            context, logits = draft_step(caches), torch.empty(6 if which is None else 5, plain_model.vocab_size)
            walk(decoder.decoder, small, ids, DRAFT_POSITIONS, context, which, logits)
            results.append((logits, context.kv_caches))
    (chosen, _), (clean, blocks), (chosen_beside_nan, _), (spoilt, spoilt_blocks) = results
    torch.testing.assert_close(chosen, out, atol=2e-4, rtol=2e-4)
    assert torch.equal(chosen_beside_nan, chosen)
    assert spoilt[4:].isnan().all()
    assert torch.equal(spoilt[:4], clean[:4])
    for a, b in zip(spoilt_blocks, blocks, strict=True):
        assert torch.equal(a[:, 1:], b[:, 1:])
