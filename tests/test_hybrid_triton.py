"""The kernels of parts that keep a past against their definitions in torch, on the same random ragged steps.

Without a GPU the whole file runs once more in a child process whose Triton interprets the kernels on the CPU.
"""

from __future__ import annotations

import pytest
import torch

from gapless.attention.kv_format import put, scale_of
from gapless.model.parts import delta_net, short_conv, sparse_attention
from gapless.model.parts.sparse_attention import SparseParams, write_index_keys
from ragged import BLOCK, Ragged, Step, drive

pytest.importorskip("triton", reason="Triton is not installed")
from gapless.model.parts import delta_net_triton, short_conv_triton, sparse_attention_triton
from interpreted import CHILD, run_in_the_interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
runs_kernels = pytest.mark.skipif(not GPU and not CHILD, reason="runs in the interpreter, in a child process")
LENGTHS = (7, 1, 10)
CASES = [("whole", 0), ("ones", 0), ("chunks", 2)]
each_style = pytest.mark.parametrize(("style", "drafts"), CASES, ids=[f"{s}-{d}" for s, d in CASES])


@pytest.mark.skipif(GPU or CHILD, reason="the kernels run in this process")
def test_all_cases_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__, "-p", "no:xdist")


def random_inputs(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, *shape, generator=generator) for n in LENGTHS]


def compare(ours: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


@runs_kernels
@each_style
@pytest.mark.parametrize(("dilation", "silu", "bias"), [(1, False, True), (3, True, False)])
def test_short_conv(style: str, drafts: int, dilation: int, silu: bool, bias: bool) -> None:
    weight = torch.randn(10, 4, device=DEVICE)
    offset = torch.randn(10, device=DEVICE) if bias else None

    def run(form: object) -> list[torch.Tensor]:
        ragged = Ragged(len(LENGTHS), 16, device=DEVICE)
        cache = ragged.cache(10)

        def part(x: torch.Tensor, s: Step) -> torch.Tensor:
            return form.short_conv(  # type: ignore[attr-defined]
                x, cache, s.block_tables, s.slot_mapping, s.token_rows, s.positions, weight, offset, dilation=dilation,
                silu=silu,
            )  # fmt: skip

        return drive(ragged, random_inputs(10), part, style=style, drafts=drafts)

    compare(run(short_conv_triton), run(short_conv))


@runs_kernels
@each_style
def test_gated_delta_rule(style: str, drafts: int) -> None:
    heads, key_heads, dk, dv = 2, 1, 6, 18
    sizes = [key_heads * dk, key_heads * dk, heads * dv, heads, heads]

    def run(form: object) -> list[torch.Tensor]:
        ragged = Ragged(len(LENGTHS), 16, device=DEVICE)
        states = torch.full((len(LENGTHS) + 1, 1 + drafts, heads, dk, dv), float("nan"), device=DEVICE)

        def part(x: torch.Tensor, s: Step) -> torch.Tensor:
            q, k, v, g, beta = x.split(sizes, -1)
            q, k, v = q.unflatten(-1, (-1, dk)), k.unflatten(-1, (-1, dk)), v.unflatten(-1, (-1, dv))
            out = form.gated_delta_rule(  # type: ignore[attr-defined]
                q, k, v, -g.exp(), beta.sigmoid(), states, s.query_start_loc, s.seq_lens, s.rows
            )
            return out.flatten(1)

        return drive(ragged, random_inputs(sum(sizes)), part, style=style, drafts=drafts)

    compare(run(delta_net_triton), run(delta_net))


@runs_kernels
@each_style
@pytest.mark.parametrize("ratio", [3])
@pytest.mark.parametrize(("kept", "scaled"), [(torch.float32, False), (torch.float8_e4m3fn, True)])
def test_sparse_attention(style: str, drafts: int, ratio: int, kept: torch.dtype, scaled: bool) -> None:
    hq, hk, d, hi, di = 4, 2, 8, 5, 6
    params = SparseParams(ratio, 2, 0.3)
    scales = torch.tensor([[0.5, 2.0], [0.1, 1.5]], device=DEVICE) if scaled else None
    sizes = [hq * d, hk * d, hk * d, hi * di, di]

    def run(triton: bool) -> list[torch.Tensor]:
        ragged = Ragged(len(LENGTHS), 16, device=DEVICE)
        index_cache = ragged.cache(2 * di)
        kv_cache = torch.full((2, ragged.num_blocks, BLOCK, hk, d), 100.0, device=DEVICE).to(kept)

        def part(x: torch.Tensor, s: Step) -> torch.Tensor:
            q, k, v, index_q, index_k = x.split(sizes, -1)
            q, index_q = q.unflatten(-1, (hq, d)), index_q.unflatten(-1, (hi, di)).contiguous()
            write_index_keys(
                index_k, index_cache, s.block_tables, s.slot_mapping, s.token_rows, s.positions, ratio, torch.sin
            )
            for i, value in enumerate((k, v)):
                put(kv_cache[i].view(-1, hk, d), s.slot_mapping, value.view(-1, hk, d), scale_of(scales, i))
            caches = (q, index_q, kv_cache, index_cache, s.block_tables)
            if triton:
                out = sparse_attention_triton.sparse_attend(*caches, s.token_rows, s.positions, params, scales)
            else:
                out = sparse_attention.sparse_attend(*caches, s.query_start_loc, s.seq_lens, s.rows, params, scales)
            return out.flatten(1)

        return drive(ragged, random_inputs(sum(sizes)), part, style=style, drafts=drafts)

    compare(run(True), run(False))


@pytest.mark.gpu
def test_captured_once_and_replayed_for_other_sizes() -> None:
    """One capture over padded sizes serves any ragged step within them."""
    heads, dk, dv, width = 4, 16, 16, 24
    ragged = Ragged(3, 64, device="cuda")
    weight = torch.randn(width, 4, device="cuda")
    caches = [torch.zeros(ragged.num_blocks, BLOCK, width, device="cuda") for _ in range(2)]
    states = [torch.zeros(4, 2, heads, dk, dv, device="cuda") for _ in range(2)]

    def compute(x: torch.Tensor, s: Step, which: int) -> torch.Tensor:
        mixed = short_conv_triton.short_conv(
            x, caches[which], s.block_tables, s.slot_mapping, s.token_rows, s.positions, weight
        )
        q = mixed[:, :16].reshape(-1, 1, 16)
        v = mixed[:, 8:24].reshape(-1, 1, 16).repeat(1, heads, 1)
        gates = mixed[:, :heads].sigmoid()
        return delta_net_triton.gated_delta_rule(
            q, q.flip(-1).contiguous(), v, -gates, gates, states[which], s.query_start_loc, s.seq_lens, s.rows
        )

    static = ragged.step([(0, 8), (1, 4), (2, 4)])
    held = torch.zeros(16, width, device="cuda")
    compute(held, static, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compute(held, static, 0)
    states[0].zero_()
    for plan in ([(0, 5), (2, 3)], [(1, 6), (0, 1), (2, 2)], [(2, 1)]):
        count = sum(n for _, n in plan)
        step = ragged.step(plan, 16 - count, 3 - len(plan))
        for row, n in plan:
            ragged.done[row] += n
        held.normal_()
        for name in ("query_start_loc", "seq_lens", "rows", "positions", "token_rows", "slot_mapping"):
            getattr(static, name).copy_(getattr(step, name))
        graph.replay()
        expected = compute(held, step, 1)
        torch.testing.assert_close(result[:count], expected[:count])


@runs_kernels
def test_rows_of_a_table() -> None:
    from gapless.model.parts.ple_host import gather_rows

    table = torch.randn(40, 6, device=DEVICE)
    ids = torch.randint(40, (5, 3), device=DEVICE)
    assert torch.equal(gather_rows(table, ids), table[ids])


@pytest.mark.gpu
def test_a_table_in_host_memory_is_read_by_a_captured_step() -> None:
    """In place changes are seen, and the pages are released with the embedding."""
    from gapless.model.parts.ple_host import HostEmbedding

    embedding = torch.nn.Embedding(1000, 48)
    table = HostEmbedding(embedding)
    ids = torch.randint(1000, (5, 3), device="cuda")
    table(ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = table(ids)
    with torch.no_grad():
        embedding.weight.mul_(2)
    graph.replay()
    assert torch.equal(out.cpu(), embedding.weight.detach()[ids.cpu()])
    del table
    assert not embedding.weight.is_pinned()
