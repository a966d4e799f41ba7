"""The Triton start of a step against a brute force and against the reference in torch.

Without a GPU the file runs once more in a child process in which Triton interprets the kernels on the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gapless.batch.arena import arena_views
from gapless.batch.row_layout import RowLayout
from gapless.batch.slot_layout import HEADER_WORDS, StepInputs
from gapless.runner.masks import ROWS_AT, mask_inputs
from gapless.runner.masks import apply_masks as apply_masks_reference
from gapless.runner.prepare import StepIndices
from gapless.runner.prepare import prepare as prepare_reference

pytest.importorskip("triton", reason="Triton is not installed")

from interpreted import CHILD, run_in_the_interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
runs_kernels = pytest.mark.skipif(not GPU and not CHILD, reason="runs in the interpreter, in a child process")


@pytest.mark.skipif(GPU or CHILD, reason="the kernels run in this process")
def test_all_cases_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


class Step:
    """A random step, padded to T tokens and S sequences, and what it must give, token by token."""

    def __init__(
        self,
        seed: int,
        query_lens: list[int],
        num_tokens: int,
        num_seqs: int,
        updates: int,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        rng = np.random.default_rng(seed)
        self.layout = layout = RowLayout(num_seqs + 2, max_model_len=50, block_size=8, windows=windows)
        arena = rng.integers(1, 99, layout.num_words).astype(np.int32)
        s, t = len(query_lens), sum(query_lens)
        rows = np.full(num_seqs, layout.null_row, np.int32)
        rows[:s] = rng.permutation(layout.max_num_seqs)[:s]
        starts = np.zeros(num_seqs, np.int32)
        starts[:s] = [rng.integers(0, 51 - n) for n in query_lens]
        loc = np.full(num_seqs + 1, t, np.int32)
        loc[: s + 1] = np.concatenate(([0], np.cumsum(query_lens)))
        ids, carry = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.uint8)
        carry[:t] = rng.random(t) < 0.4
        ids[:t] = np.where(carry[:t], 0, rng.integers(100, 200, t))
        header = np.zeros(HEADER_WORDS, np.int32)
        header[:3] = t, s, updates
        words = rng.permutation(layout.num_words)[: updates + 3]
        changes = np.stack((words, rng.integers(1, 99, updates + 3)), 1).astype(np.int32)
        flags = np.zeros(num_seqs, np.int32)
        self.inputs = [header, rows, starts, loc, flags, ids, carry, changes]
        self.arena = arena.copy()

        for word, value in changes[:updates]:
            arena[word] = value
        table = arena[: layout.block_tables_at].reshape(layout.num_rows, -1)
        blocks = arena[layout.block_tables_at : layout.params_at].reshape(len(windows), layout.num_rows, -1)
        # A padding token: id 0, position 0, its offset in the null block.
        out = [np.zeros(num_tokens, np.int64) for _ in range(2)] + [
            np.zeros((len(windows), num_tokens), np.int64),
            *(np.zeros(num_seqs, np.int64) for _ in range(3)),
        ]
        out[2][:] = np.arange(num_tokens) % layout.block_size
        token = 0
        for i, length in enumerate(query_lens):
            for position in range(starts[i], starts[i] + length):
                if not carry[token]:
                    table[rows[i], position] = ids[token]
                out[0][token], out[1][token] = table[rows[i], position], position
                out[2][:, token] = blocks[:, rows[i], position // 8] * 8 + position % 8
                token += 1
            out[3][i] = out[5][i] = starts[i] + length
            out[4][i] = token - 1
        self.arena_after, self.out = arena, out

    def run(self, triton: bool) -> None:
        """Run one of the two and compare. The null row's tokens are nobody's."""
        if triton:
            from gapless.runner.prepare_triton import prepare
        else:
            prepare = prepare_reference
        device = DEVICE if triton else "cpu"
        num_tokens, num_seqs = len(self.out[0]), len(self.out[3])
        words = torch.from_numpy(self.arena.copy()).to(device)
        step = StepInputs(*(torch.from_numpy(a.copy()).to(device) for a in self.inputs))
        shapes = (num_tokens,), (num_tokens,), (self.layout.num_groups, num_tokens), (num_seqs,), (num_seqs,)
        long = [torch.full(shape, -7, device=device) for shape in shapes]
        lens = torch.full((num_seqs,), -7, dtype=torch.int32, device=device)
        indices = StepIndices(*long[:3], lens, *long[3:])
        prepare(step, arena_views(words, self.layout), self.layout, indices)
        got = [
            indices.input_ids,
            indices.positions,
            indices.slot_mapping,
            indices.seq_lens,
            indices.logits_index,
            indices.sample_positions,
        ]
        for g, expected in zip(got, self.out, strict=True):
            assert g.tolist() == expected.tolist()
        after = words.cpu().numpy()
        null = self.layout.null_row * self.layout.max_model_len
        assert (after[:null] == self.arena_after[:null]).all()
        at = self.layout.block_tables_at
        assert (after[at:] == self.arena_after[at:]).all()


CASES = [
    ([1], 1, 1, 0),
    ([1, 20, 1, 3, 30], 64, 5, 40, (None, 10)),
    ([1, 1, 1], 4, 4, 5, (5, 10, 30)),
    ([1, 1, 1], 4, 4, 5),
    ([1] * 33, 40, 40, 700),
    ([7], 16, 4, 9),
    ([1, 20, 1, 3, 30], 64, 5, 40),
    ([50, 1, 50, 49, 2], 160, 33, 3),
]


@pytest.mark.parametrize("case", CASES)
def test_reference(case: tuple[Any, ...]) -> None:
    Step(0, *case).run(triton=False)


@runs_kernels
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_triton(case: tuple[Any, ...], seed: int) -> None:
    Step(seed, *case).run(triton=True)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_a_graph_serves_steps_of_other_sizes() -> None:
    """One capture, then other contents of the same slot: nothing but padded sizes is baked in."""
    from gapless.runner.prepare_triton import prepare

    steps = [
        Step(s, lens, 64, 8, u)
        for s, (lens, u) in enumerate([([1] * 8, 5), ([9, 40, 1], 30), ([64 - 20], 0)])
    ]
    device_inputs = [
        torch.zeros(64 if a.ndim == 1 else (64, 2), dtype=torch.from_numpy(a).dtype, device="cuda")
        for a in steps[0].inputs
    ]
    sizes = [len(a) for a in steps[0].inputs[:7]]
    inputs = StepInputs(*(d[:n] for d, n in zip(device_inputs, sizes, strict=False)), device_inputs[7])
    words = torch.zeros(steps[0].layout.num_words, dtype=torch.int32, device="cuda")
    shapes = (64,), (64,), (1, 64), (8,), (8,)
    long = [torch.zeros(shape, dtype=torch.int64, device="cuda") for shape in shapes]
    indices = StepIndices(*long[:3], torch.zeros(8, dtype=torch.int32, device="cuda"), *long[3:])

    def work() -> None:
        prepare(inputs, arena_views(words, steps[0].layout), steps[0].layout, indices)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for step in steps:
        for target, array in zip(device_inputs, step.inputs, strict=True):
            target[: len(array)] = torch.from_numpy(array).cuda()
        words.copy_(torch.from_numpy(step.arena))
        graph.replay()
        for g, expected in zip((*long[:3], *long[3:]), (*step.out[:3], *step.out[4:]), strict=True):
            assert g.tolist() == expected.tolist()


@runs_kernels
@pytest.mark.parametrize("count", [0, 1, 5])
def test_masks_reach_their_rows(count: int) -> None:
    from gapless.runner.masks_triton import apply_masks

    layout = RowLayout(5, 16, 8, 40_000)
    rng = np.random.default_rng(count)
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, 4 + 8 + 5 * layout.mask_words).astype(np.int32))
    words[0] = count
    words[ROWS_AT : ROWS_AT + 5] = torch.from_numpy(rng.permutation(5).astype(np.int32))
    arena = torch.from_numpy(rng.integers(0, 9, layout.num_words).astype(np.int32))
    want, got = arena.clone(), arena.to(DEVICE)
    apply_masks_reference(mask_inputs(words, layout), want, layout)
    apply_masks(mask_inputs(words.to(DEVICE), layout), got, layout)
    assert torch.equal(got.cpu(), want)
