"""The kernels of adapters against a brute force and the reference; the fused decoder with either.

Without a GPU the file runs once more in a child process in which Triton interprets the kernels on the CPU.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from gapless.attention.context import AttentionContext
from gapless.lora import reference
from gapless.lora.bank import AdapterBank, LoraWeights, Part, Site

pytest.importorskip("triton", reason="Triton is not installed")

from interpreted import CHILD, run_in_the_interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
runs_kernels = pytest.mark.skipif(not GPU and not CHILD, reason="runs in the interpreter, in a child process")


@pytest.mark.skipif(GPU or CHILD, reason="the kernels run in this process")
def test_all_cases_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__, "-k", "kernel")


def triton_ops() -> ModuleType:
    from gapless.lora import triton

    return triton


def bank_of(
    ops: ModuleType, parts: tuple[int, ...], inputs: int, *, rank: int, slots: int, dtype: torch.dtype, seed: int = 0
) -> tuple[AdapterBank, list[dict[str, LoraWeights]]]:
    """A bank of two sites whose second has the given parts, and the adapters in it; some lack a part, or have a
    smaller rank."""
    sites = [Site(8, (Part("first", 24),)), Site(inputs, tuple(Part(f"p{i}", n) for i, n in enumerate(parts)))]
    bank = AdapterBank(sites, rank=rank, slots=slots, dtype=dtype, ops=ops)
    generator = torch.Generator().manual_seed(seed)
    buffer, adapters = torch.zeros(bank.shape, dtype=dtype), []
    for slot in range(1, slots + 1):
        adapter = {}
        for i, outputs in enumerate(parts):
            if (slot + i) % 4 == 0:
                continue
            own = max(1, rank - slot)
            a = torch.randn(own, inputs, generator=generator) / inputs**0.5
            adapter[f"p{i}"] = LoraWeights(a, torch.randn(outputs, own, generator=generator) / rank**0.5)
        bank.check(adapter)
        bank.pack(adapter, buffer[slot])
        adapters.append(adapter)
    bank.bind(buffer.to(DEVICE))
    return bank, adapters


def context_of(query_lens: list[int], slots: list[int], padded: int, stride: int = 5) -> AttentionContext:
    """A step whose sequence s runs with adapter ``slots[s]``; rows lie in another order."""
    count, table = len(query_lens), torch.zeros(padded + 3, stride, dtype=torch.int32)
    rows = torch.full((padded,), padded + 2, dtype=torch.int32)  # the null row
    rows[:count] = torch.arange(count, dtype=torch.int32).flip(0)
    table[rows[:count].long(), 2] = torch.tensor(slots, dtype=torch.int32)
    loc = torch.full((padded + 1,), sum(query_lens), dtype=torch.int32)
    loc[: count + 1] = torch.tensor([0, *query_lens]).cumsum(0)
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return AttentionContext(
        kv_caches=[], slot_mapping=none, query_start_loc=loc.to(DEVICE), seq_lens=none, rows=rows.to(DEVICE),
        block_tables=none, block_size=8, decode_only=False, row_loras=table.to(DEVICE)[:, 2],
    )  # fmt: skip


def brute(
    x: torch.Tensor, y: torch.Tensor, adapters: list[dict[str, LoraWeights]], slots: list[int], parts: tuple[int, ...]
) -> torch.Tensor:
    out = y.double().clone()
    for t, slot in enumerate(slots):
        at = 0
        for i, outputs in enumerate(parts):
            if slot and (pair := adapters[slot - 1].get(f"p{i}")) is not None:
                out[t, at : at + outputs] += pair.b.double() @ (pair.a.double() @ x[t].double())
            at += outputs
    return out


SHAPES = [
    ((40,), 70, 8, [3, 1, 1, 5], [1, 0, 2, 3], 5, 12),
    ((48, 16, 16), 100, 5, [1] * 6, [3, 1, 0, 2, 2, 1], 8, 8),
    ((130, 130), 1100, 20, [20], [2], 1, 20),
    ((24,), 33, 2, [4, 7], [0, 0], 2, 16),
    ((20, 20), 40, 100, [3, 2], [3, 1], 2, 5),
]
CASES = pytest.mark.parametrize(("parts", "inputs", "rank", "query_lens", "slots", "seqs", "tokens"), SHAPES)


def check(
    ops: ModuleType, dtype: torch.dtype, parts: tuple[int, ...], inputs: int, rank: int, query_lens: list[int],
    slots: list[int], seqs: int, tokens: int,
) -> None:  # fmt: skip
    bank, adapters = bank_of(ops, parts, inputs, rank=rank, slots=3, dtype=dtype)
    context = context_of(query_lens, slots, seqs)
    expected_slots = [s for s, n in zip(slots, query_lens, strict=True) for _ in range(n)]
    expected_slots += [0] * (tokens - len(expected_slots))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, inputs + 3, generator=generator).to(DEVICE, dtype)[:, :inputs]  # rows with a stride
    y = torch.randn(tokens, sum(parts), generator=generator).to(DEVICE, dtype)
    found = bank.tokens(context, tokens)
    assert found.slots.tolist() == expected_slots
    out = y.clone()
    bank.add(1, x, out, found)
    expected = brute(x.cpu(), y.cpu(), adapters, expected_slots, parts)
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)
    idle = torch.tensor(expected_slots) == 0
    assert torch.equal(out.cpu()[idle], y.cpu()[idle])


@CASES
def test_reference(
    parts: tuple[int, ...], inputs: int, rank: int, query_lens: list[int], slots: list[int], seqs: int, tokens: int
) -> None:
    if not GPU:
        check(reference, torch.float32, parts, inputs, rank, query_lens, slots, seqs, tokens)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@CASES
def test_kernels(
    dtype: torch.dtype, parts: tuple[int, ...], inputs: int, rank: int, query_lens: list[int], slots: list[int],
    seqs: int, tokens: int,
) -> None:  # fmt: skip
    if dtype == torch.bfloat16 and not GPU:
        pytest.skip("the interpreter multiplies the bits of bf16")
    check(triton_ops(), dtype, parts, inputs, rank, query_lens, slots, seqs, tokens)


@runs_kernels
def test_kernels_of_long_steps_are_those_of_short_ones() -> None:
    """Beyond a number of tokens the tiles are longer; what a token gets stays the same."""
    bank, _ = bank_of(triton_ops(), (40,), 70, rank=4, slots=3, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(150, 70, generator=generator).to(DEVICE)
    long, short = (torch.zeros(n, 40, device=DEVICE) for n in (150, 100))
    bank.add(1, x, long, bank.tokens(context_of([100, 50], [2, 3], 2), 150))
    bank.add(1, x[:100], short, bank.tokens(context_of([100], [2], 2), 100))
    torch.testing.assert_close(long[:100], short, rtol=1e-6, atol=1e-6)
    assert bool(long[100:].any())


@runs_kernels
def test_kernels_give_a_token_equal_bits_whatever_runs_beside_it() -> None:
    bank, _ = bank_of(triton_ops(), (40,), 70, rank=4, slots=3, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(9, 70, generator=generator).to(DEVICE), torch.randn(9, 40, generator=generator).to(DEVICE)
    results = []
    for others in ([0] * 8, [2] * 8, [1, 2, 3, 0, 3, 2, 1, 1]):
        out = y.clone()
        bank.add(1, x, out, bank.tokens(context_of([1] * 9, [2, *others], 9), 9))
        results.append(out[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.gpu
def test_a_graph_serves_other_mixes() -> None:
    """Slots, lengths and weights are read on the device: one capture, many steps."""
    bank, adapters = bank_of(triton_ops(), (48, 16, 16), 256, rank=8, slots=3, dtype=torch.float32)
    context = context_of([4, 4, 4], [0, 0, 0], 4)
    x, y, out = (torch.randn(16, n, device="cuda") for n in (256, 80, 80))

    def work() -> None:
        out.copy_(y)
        bank.add(1, x, out, bank.tokens(context, 16))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        work()
        graph.capture_end()
    for query_lens, slots in (([5, 6, 1], [1, 2, 3]), ([16], [2]), ([1, 1], [0, 3])):
        other = context_of(query_lens, slots, 4)
        assert context.row_loras is not None
        assert other.row_loras is not None
        for mine, theirs in (
            (context.query_start_loc, other.query_start_loc), (context.rows, other.rows),
            (context.row_loras, other.row_loras),
        ):  # fmt: skip
            mine.copy_(theirs)
        x.normal_()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        flat = [s for s, n in zip(slots, query_lens, strict=True) for _ in range(n)]
        flat += [0] * (16 - len(flat))
        expected = brute(x.cpu(), y.cpu(), adapters, flat, (48, 16, 16))
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)
