"""The kernels around a step with drafts: against a brute force, token by token, and Triton against plain torch.

Without a GPU the file runs once more in a child process in which Triton interprets the kernels on the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gapless.attention.context import AttentionContext, AttentionParams
from gapless.attention.reference import attend_brute
from gapless.batch.arena import arena_views
from gapless.batch.plan import SeqFlag
from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import Feature, Word
from gapless.device.cpu import CpuDevice
from gapless.speculative import steps
from gapless.speculative.base import DraftIndices, Sequences
from gapless.speculative.ngram import NgramProposer, lookup

pytest.importorskip("triton", reason="Triton is not installed")

from interpreted import CHILD, run_in_the_interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
runs_kernels = pytest.mark.skipif(not GPU and not CHILD, reason="runs in the interpreter, in a child process")


@pytest.mark.skipif(GPU or CHILD, reason="the kernels run in this process")
def test_all_cases_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__, "-k", "triton")


# ---- lookup ----------------------------------------------------------------------------------------------------------


def brute_lookup(tokens: list[int], k: int, least: int, most: int) -> list[int]:
    """The rule of `gapless.speculative.ngram`, as it is said."""
    length = len(tokens)
    for n in range(most, least - 1, -1):
        for end in range(length - 1, n - 1, -1):
            if n < length and tokens[end - n : end] == tokens[length - n :]:
                more = list(tokens)
                for i in range(k):
                    more.append(more[end + i])
                return more[length:]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_lookup_is_the_rule(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(40):
        tokens = rng.integers(0, rng.integers(2, 6), rng.integers(1, 40)).astype(np.int32)
        least = int(rng.integers(1, 5))
        most = int(rng.integers(least, 7))
        k = int(rng.integers(1, 9))
        found = lookup(torch.from_numpy(tokens), k, least, most)
        assert found.tolist() == brute_lookup(tokens.tolist(), k, least, most), (tokens.tolist(), k, least, most)


def test_lookup_goes_on_with_the_period() -> None:
    assert lookup(torch.tensor([9, 1, 2, 3, 1, 2, 3], dtype=torch.int32), 5, 2, 4).tolist() == [1, 2, 3, 1, 2]
    assert lookup(torch.tensor([5, 5, 5], dtype=torch.int32), 4, 2, 4).tolist() == [5, 5, 5, 5]
    assert lookup(torch.tensor([1, 2, 3, 4], dtype=torch.int32), 4, 1, 4).tolist() == []


# ---- random steps ----------------------------------------------------------------------------------------------------


class Step:
    """Random sequences: drafts, rows that follow, chunks, scores, padding; and words of rows around them."""

    def __init__(self, seed: int, width: int, by_token: bool = False) -> None:
        self.by_token = by_token
        rng = np.random.default_rng(seed)
        self.width = width
        seqs = int(rng.integers(1, 7))
        self.padded = padded = seqs + int(rng.integers(0, 3))
        self.layout = layout = RowLayout(padded + 1, 60 + width, 8)
        arena = rng.integers(0, 4, layout.num_words).astype(np.int32)
        params = arena[layout.params_at : layout.bias_at].reshape(layout.num_rows, int(Word.COUNT))
        rows, starts = np.full(padded, layout.null_row, np.int32), np.zeros(padded, np.int32)
        rows[:seqs] = rng.permutation(layout.max_num_seqs)[:seqs]
        flags, lens = np.zeros(padded, np.int32), np.zeros(padded, np.int32)
        self.true_starts = np.zeros(padded, np.int32)
        for s in range(seqs):
            kind = rng.integers(0, 5)
            length = int(rng.integers(2, 60))  # of the row, before the step
            params[rows[s], Word.LENGTH] = length
            params[rows[s], Word.LIMIT] = min(length + int(rng.integers(0, 2 * width)), 60)
            params[rows[s], Word.NUM_DRAFTS] = rng.integers(0, width)
            starts[s] = self.true_starts[s] = length - 1
            lens[s], flags[s] = 1, SeqFlag.DRAWS
            if kind <= 1:
                lens[s], flags[s] = width, SeqFlag.DRAWS | SeqFlag.DRAFTS
            if kind in (1, 2):
                flags[s] |= SeqFlag.DEVICE_START
                starts[s] = max(0, length - 1 - int(rng.integers(0, width)))
            if kind >= 3 and not by_token:
                lens[s] = rng.integers(1, 5)
                flags[s] = [SeqFlag.DRAWS, SeqFlag.SCORES, 0][rng.integers(0, 3)]
                lens[s] = 1 if flags[s] == SeqFlag.SCORES else lens[s]
                starts[s] = self.true_starts[s] = rng.integers(0, 50)
                params[rows[s], Word.LIMIT] = starts[s] + lens[s] + int(rng.integers(1, 5))
        loc = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        self.num_tokens = int(loc[-1]) + int(rng.integers(0, 4))
        self.lens, self.flags, self.rows, self.loc, self.params, self.arena = lens, flags, rows, loc, params, arena
        self.input_ids = rng.integers(0, 3, self.num_tokens)
        self.positions = rng.integers(0, 60, self.num_tokens)
        self.num_logits = self.num_tokens if by_token else padded * width
        self.tokens = rng.integers(-1, 3, self.num_logits).astype(np.int32)
        self.slot_starts = starts

    def sequences(self, device: str) -> Sequences:
        made = (torch.from_numpy(a.copy()).to(device) for a in (self.rows, self.slot_starts, self.flags, self.loc))
        return Sequences(*made, arena_views(torch.from_numpy(self.arena.copy()).to(device), self.layout), self.layout)

    def indices(self, device: str) -> DraftIndices:
        n = self.num_logits
        ints = [torch.full((size,), 77, dtype=torch.int32, device=device) for size in (self.padded, n, n)]
        longs = [torch.full((n,), 77, dtype=torch.int64, device=device) for _ in range(2)]
        return DraftIndices(*ints, *longs, self.width, self.by_token)

    def run(self, kernels: Any, device: str = "cpu") -> dict[str, list[int]]:
        sequences, indices = self.sequences(device), self.indices(device)
        positions = torch.from_numpy(self.positions.copy()).to(device)
        counts, proposed = (torch.full((self.padded,), 9, dtype=torch.int32, device=device) for _ in range(2))
        kernels.place(sequences, indices.starts)
        kernels.expand(sequences, positions, indices)
        ids, tokens = (torch.from_numpy(a.copy()).to(device) for a in (self.input_ids, self.tokens))
        kernels.accept(sequences, indices, ids, tokens, counts, proposed)
        sequences.arena.params[self.layout.null_row] = 0
        named = {"positions": positions, "counts": counts, "proposed": proposed, "arena": sequences.arena.words}
        for name in ("starts", "rows", "flags", "logits_index", "positions"):
            named[f"indices.{name}"] = getattr(indices, name)
        return {name: tensor.tolist() for name, tensor in named.items()}

    def expected(self) -> dict[str, list[int]]:
        """One sequence and one token after the other."""
        w, n = self.width, self.num_logits
        arena, positions = self.arena.copy(), self.positions.copy()
        words = arena[self.layout.params_at : self.layout.bias_at].reshape(-1, int(Word.COUNT))
        rows, flags, index, after = (np.zeros(n, np.int64) for _ in range(4))
        rows[:] = self.layout.null_row
        counts, proposed = np.zeros(self.padded, np.int64), np.zeros(self.padded, np.int64)
        for s in range(self.padded):
            row, limit = words[self.rows[s]], int(words[self.rows[s], Word.LIMIT])
            first, lens, start = int(self.loc[s]), int(self.lens[s]), int(self.true_starts[s])
            drafting = bool(self.flags[s] & SeqFlag.DRAFTS)
            chosen = range(lens) if drafting else range(lens - 1, lens)
            for j, token in enumerate(chosen if lens else ()):
                position = start + token
                at = first + token if self.by_token else s * w + j
                rows[at], index[at], after[at] = self.rows[s], first + token, position + 1
                draws = self.flags[s] & SeqFlag.DRAWS if position + 1 < limit else 0
                flags[at] = draws | (self.flags[s] & SeqFlag.SCORES if j == 0 else 0)
                if position >= limit:
                    positions[first + token] = 0
            if self.flags[s] & SeqFlag.DRAWS:
                base = start + (1 if drafting else lens)
                most = min(int(row[Word.NUM_DRAFTS]), lens - 1) if drafting else 0
                proposed[s] = max(0, min(most, limit - base - 1))
                count = 0
                while base + count < limit:
                    count += 1
                    j = count - 1
                    drawn = self.tokens[(first if self.by_token else s * w) + j] if j < proposed[s] else None
                    if drawn is None or drawn != self.input_ids[first + 1 + j]:
                        break
                counts[s] = count
                row[Word.LENGTH] = base + count
        words[self.layout.null_row] = 0
        return {
            "positions": positions.tolist(), "counts": counts.tolist(), "proposed": proposed.tolist(),
            "arena": arena.tolist(), "indices.starts": self.true_starts.tolist(), "indices.rows": rows.tolist(),
            "indices.flags": flags.tolist(), "indices.logits_index": index.tolist(),
            "indices.positions": after.tolist(),
        }  # fmt: skip


def _same(made: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    for name, value in expected.items():
        assert made[name] == value, name


@pytest.mark.parametrize("seed", range(30))
def test_steps_are_the_brute_force(seed: int) -> None:
    print(f"seed {seed}")
    step = Step(seed, 2 + seed % 4, by_token=seed % 2 == 1)
    _same(step.run(steps), step.expected())


@runs_kernels
@pytest.mark.parametrize("seed", range(8))
def test_triton_steps_are_the_brute_force(seed: int) -> None:
    from gapless.speculative import steps_triton

    print(f"seed {seed}")
    step = Step(seed, 2 + seed % 7, by_token=seed % 2 == 1)
    _same(step.run(steps_triton, DEVICE), step.expected())


@runs_kernels
@pytest.mark.parametrize("seed", range(5))
def test_triton_lookup_is_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from gapless.speculative import ngram_triton

    print(f"seed {seed}")
    monkeypatch.setattr(ngram_triton, "_BLOCK", 16)  # several programs, several turns of each
    monkeypatch.setattr(ngram_triton, "_MAX_PROGRAMS", 3)
    k, least = 1 + seed, 1 + seed % 3
    step = Step(seed, k + 1)
    step.flags |= np.where(step.lens > 0, SeqFlag.DRAFTS, 0).astype(np.int32)
    expected = step.sequences("cpu")
    NgramProposer(k, least, least + 2).propose(expected, Feature.GREEDY)
    device = CpuDevice()
    proposer = ngram_triton.TritonNgramProposer(k, least, least + 2, device, step.padded)
    proposer._best = proposer._best.to(DEVICE)
    made = step.sequences(DEVICE)
    proposer.propose(made, Feature.GREEDY)
    device.close()
    assert made.arena.words.tolist() == expected.arena.words.tolist()
    assert not proposer._best.any(), "ready for the next step"


@runs_kernels
@pytest.mark.parametrize(("group", "width"), [(1, 9), (3, 3), (4, 5)])
def test_triton_decode_of_rows_with_drafts(group: int, width: int) -> None:
    """The form that a step with drafts bakes in: every sequence has 1 or ``width`` tokens, and padding follows."""
    from gapless.attention.triton import attend

    torch.manual_seed(group)
    hk, d, size = 2, 16, 8
    lens, lengths = [width, 1, width], [width + 5, 20, 33]
    loc = torch.tensor([0, width, width + 1, 2 * width + 1, 2 * width + 1], dtype=torch.int32)
    tokens = 3 * width
    slots, tables = [], torch.arange(5 * 5, dtype=torch.int32).view(5, 5) + 1
    tables[4] = 0
    for s, (new, length) in enumerate(zip(lens, lengths, strict=True)):
        slots += [int(tables[s, p // size]) * size + p % size for p in range(length - new, length)]
    slots += [t % size for t in range(len(slots), tokens)]
    cache = torch.randn(2, 27, size, hk, d)
    q, k, v = (torch.randn(tokens, heads, d) for heads in (hk * group, hk, hk))

    def context(device: str) -> AttentionContext:
        return AttentionContext(
            [], torch.tensor(slots).to(device), loc.to(device),
            torch.tensor([*lengths, 0], dtype=torch.int32).to(device),
            torch.tensor([0, 1, 2, 4], dtype=torch.int32).to(device), tables.to(device), size, False, width,
        )  # fmt: skip

    params = AttentionParams(0.3)
    expected = attend_brute(q, k, v, cache.clone(), context("cpu"), params)
    made = attend(*(x.to(DEVICE) for x in (q, k, v, cache.clone())), context(DEVICE), params).cpu()
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
