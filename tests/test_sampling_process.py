"""Penalties, bias, masks, bad words and log-probabilities against brute force in float64, one row at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gapless.batch.row_layout import Record, RowLayout
from gapless.batch.row_params import Feature, Word
from gapless.batch.row_updates import request_updates
from gapless.request.request import Request
from gapless.request.sampling_params import SamplingParams
from gapless.sampling.process import process
from gapless.sampling.reference import sample_and_store

F64 = npt.NDArray[np.float64]
EVERYTHING = Feature.SAMPLE | Feature.FILTER | Feature.MIN_TOKENS | Feature.PROCESS | Feature.LOGPROBS


@dataclass
class Case:
    """Rows with their tokens so far, in an arena that was written as the engine writes it."""

    vocab: int
    max_model_len: int = 40
    tokens: list[list[int]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def add(self, prompt: list[int], generated: list[int], **params: Any) -> None:
        bad = tuple(tuple(w) for w in params.get("bad_words", ()))
        stops = tuple(params.get("stop_token_ids", ()))
        sampling = SamplingParams(**{"temperature": 0, "max_tokens": None, **params})
        number = len(self.requests)
        seed = sampling.seed if sampling.seed is not None else number
        ids = np.array(prompt, np.int32)
        self.requests.append(Request(number, ids, sampling, 9, stops, seed, False, bad_words=bad))
        self.tokens.append(prompt + generated)

    @property
    def layout(self) -> RowLayout:
        return RowLayout(len(self.requests) + 2, self.max_model_len, 8, self.vocab)

    def rows(self) -> torch.Tensor:
        """Not in the order of the batch."""
        return torch.arange(len(self.requests), dtype=torch.int32).flip(0) + 1

    def arena(self) -> torch.Tensor:
        layout = self.layout
        words = torch.from_numpy(np.random.default_rng(0).integers(0, 9, layout.num_words).astype(np.int32))
        for row, request, tokens in zip(self.rows().tolist(), self.requests, self.tokens, strict=True):
            words[row * self.max_model_len :][: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            updates = torch.from_numpy(request_updates(request, layout, row))
            words[updates[:, 0].long()] = updates[:, 1]
        return words

    def positions(self) -> torch.Tensor:
        return torch.tensor([len(t) for t in self.tokens])

    def inputs(self) -> tuple[Any, ...]:
        flags = torch.ones(len(self.requests), dtype=torch.int32)
        return self.arena(), self.layout, self.rows(), self.positions(), flags


def brute(logits: F64, request: Request, tokens: list[int]) -> F64:
    """vLLM's rules, written out. The parameters pass through float32, as the engine's do."""
    p, n = request.params, len(request.prompt_token_ids)
    output, x = tokens[n:], logits.copy()
    if p.allowed_token_ids is not None:
        x[[i for i in range(len(x)) if i not in p.allowed_token_ids]] = -np.inf
    for word in request.bad_words:
        if list(word[:-1]) == (output[-len(word) + 1 :] if len(word) > 1 else []):
            x[word[-1]] = -np.inf
    for i, bias in (p.logit_bias or {}).items():
        x[i] += float(np.float32(bias))
    r, f, s = (float(np.float32(v)) for v in (p.repetition_penalty, p.frequency_penalty, p.presence_penalty))
    for i in set(tokens):
        x[i] = x[i] / r if x[i] > 0 else x[i] * r
    for i in set(output):
        x[i] -= f * output.count(i) + s
    return x


def random_case(rng: np.random.Generator, vocab: int, rows: int) -> Case:
    case = Case(vocab)
    ids = lambda n: [int(i) for i in rng.integers(0, vocab, n)]  # noqa: E731
    for _ in range(rows):
        prompt, generated = ids(rng.integers(1, 20)), ids(rng.integers(0, 20))
        params: dict[str, Any] = {}
        if rng.random() < 0.5:
            params["repetition_penalty"] = rng.choice([0.5, 1.3, 2.0])
        if rng.random() < 0.5:
            params["frequency_penalty"] = float(rng.uniform(-2, 2))
        if rng.random() < 0.5:
            params["presence_penalty"] = float(rng.uniform(-2, 2))
        if rng.random() < 0.5:
            params["logit_bias"] = {i: float(rng.uniform(-100, 100)) for i in ids(rng.integers(1, 30))}
        if rng.random() < 0.4:
            params["allowed_token_ids"] = ids(rng.integers(1, 40))
        if rng.random() < 0.5:
            words = [ids(rng.integers(1, 5)) for _ in range(rng.integers(1, 6))]
            for k in range(1, min(len(generated), 4)):  # and some that match, or match but for one token
                words += [[*generated[-k:], ids(1)[0]], [*ids(1), *generated[-k:][1:], ids(1)[0]]]
            words.append([*(prompt + generated)[-len(generated) - 1 :], 0])  # begins in the prompt: no match
            params["bad_words"] = words
        case.add(prompt, generated, **params)
    return case


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    logits = torch.from_numpy(rng.normal(size=(rows, vocab)) * 4).float().bfloat16().float()
    logits[torch.from_numpy(rng.random((rows, vocab)) < 0.05)] = -float("inf")
    return logits


@pytest.mark.parametrize("vocab", [33, 200, 5000])
@pytest.mark.parametrize("seed", range(4))
def test_process_equals_brute_force(vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng, vocab, 12)
    logits = random_logits(rng, 12, vocab)
    got = process(logits, *case.inputs()).double().numpy()
    for s, (request, tokens) in enumerate(zip(case.requests, case.tokens, strict=True)):
        np.testing.assert_allclose(got[s], brute(logits[s].double().numpy(), request, tokens), rtol=1e-5, atol=1e-4)


CHANGES: list[dict[str, Any]] = [
    {"repetition_penalty": 3.0},
    {"frequency_penalty": 2.0},
    {"presence_penalty": 2.0},
    {"logit_bias": {7: 100}},
    {"allowed_token_ids": [1, 2, 3]},
    {"bad_words": [[0], [1], [2], [3], [4], [5]]},
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda c: next(iter(c)))
def test_each_parameter_changes_the_output(changes: dict[str, Any]) -> None:
    logits = torch.linspace(1, 0.5, 40).repeat(2, 1)
    case = Case(40)
    case.add([9], [0, 0, 1])
    case.add([9], [0, 0, 1], **changes)
    out = torch.zeros(2, dtype=torch.int32)
    sample_and_store(logits, *case.inputs(), EVERYTHING, out)
    assert out[0] == 0
    assert out[1] != 0


def test_a_nan_is_not_hidden_and_neighbours_are_not_touched() -> None:
    logits = torch.zeros(3, 10)
    logits[0, 5] = float("nan")
    logits[1, 3] = 1
    case = Case(10)
    case.add([1], [], allowed_token_ids=[2])
    case.add([1], [])
    case.add([1], [], allowed_token_ids=[4], bad_words=[[4]])  # nothing is left
    out = torch.zeros(3, dtype=torch.int32)
    sample_and_store(logits, *case.inputs(), EVERYTHING, out)
    assert out.tolist() == [-1, 3, -1]


def expected_record(x: F64, token: int, k: int) -> tuple[float, int, list[int], list[float]]:
    logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
    order = np.argsort(-logprobs, kind="stable")[:k]
    return logprobs[token], int((x >= x[token]).sum()), order.tolist(), logprobs[order].tolist()


def check_records(records: torch.Tensor, expected: list[tuple[float, int, list[int], list[float]] | None]) -> None:
    floats = records.view(torch.float32)
    for s, want in enumerate(expected):
        if want is None:
            assert records[s].tolist() == [77] * Record.COUNT
            continue
        chosen, rank, ids, values = want
        k = len(ids)
        assert records[s, Record.RANK] == rank
        assert records[s, Record.IDS : Record.IDS + k].tolist() == ids
        np.testing.assert_allclose(float(floats[s, Record.LOGPROB]), chosen, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(floats[s, Record.LOGPROBS :][:k].numpy(), values, rtol=1e-5, atol=1e-5)


def logprob_case(vocab: int) -> tuple[torch.Tensor, Case]:
    """Ties, no request, a NaN, k = 0, drawn rows, filters, a stop token that is masked."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(8, vocab)) * 2).float().bfloat16().float()
    logits[0, : vocab // 2] = 3.0
    logits[3, 1] = float("nan")
    case = Case(vocab)
    case.add([1], [2], logprobs=5)
    case.add([1], [2])
    case.add([1], [2], logprobs=0)
    case.add([1], [2], logprobs=3)
    case.add([1], [2, 2], logprobs=20, temperature=0.7, repetition_penalty=1.4, logit_bias={3: 4.0})
    case.add([1], [2], logprobs=6, temperature=1.5, top_k=4)
    case.add([1], [2], logprobs=6, temperature=1.5, top_p=0.8, min_p=0.01)
    case.add([1], [2], logprobs=4, min_tokens=5, stop_token_ids=[int(logits[7].argmax())])
    return logits, case


def expected_records(logits: torch.Tensor, case: Case, out: list[int], processed: bool) -> list[Any]:
    expected: list[Any] = []
    for s, (request, tokens) in enumerate(zip(case.requests, case.tokens, strict=True)):
        x, p = logits[s].double().numpy(), request.params
        if p.logprobs is None or out[s] < 0:
            expected.append(None)
            continue
        if processed:
            x = brute(x, request, tokens)
            if len(tokens) - len(request.prompt_token_ids) < p.min_tokens:
                x[list(request.stop_token_ids)] = -np.inf
            if p.temperature:
                x = (x - x.max()) / float(np.float32(p.temperature))
                kept = np.ones(len(x), bool)
                if p.top_k:
                    kept &= x >= np.sort(x)[-p.top_k]
                if p.top_p < 1:
                    order = np.argsort(-x, kind="stable")
                    share = np.cumsum(np.exp(x[order])) / np.exp(x).sum()
                    kept &= x >= x[order[int((share < p.top_p).sum())]]
                kept &= np.exp(x) >= p.min_p
                x = np.where(kept, x, -np.inf)
        expected.append(expected_record(x, out[s], p.logprobs))
    return expected


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("vocab", [64, 5000])
def test_logprobs_equal_brute_force(vocab: int, processed: bool) -> None:
    logits, case = logprob_case(vocab)
    out, records = torch.zeros(8, dtype=torch.int32), torch.full((8, Record.COUNT), 77, dtype=torch.int32)
    sample_and_store(logits, *case.inputs(), EVERYTHING, out, records, processed_logprobs=processed)
    assert out[3] == -1
    check_records(records, expected_records(logits, case, out.tolist(), processed))


def test_a_feature_that_is_not_set_is_not_looked_at() -> None:
    logits, case = logprob_case(64)
    out, records = torch.zeros(8, dtype=torch.int32), torch.full((8, Record.COUNT), 77, dtype=torch.int32)
    sample_and_store(logits, *case.inputs(), Feature.GREEDY, out, records)
    assert (records == 77).all()
    assert out.tolist()[4] == int(logits[4].argmax())


def test_draws_follow_the_processed_distribution() -> None:
    """Chi-square over 4,000 draws, 7 degrees of freedom."""
    n, vocab = 4000, 8
    logits = torch.tensor([0.5, 0.2, -0.3, 1.0, 0.0, -1.0, 0.7, 0.1]).repeat(n, 1)
    case = Case(vocab)
    params = {"temperature": 0.8, "frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2}
    for i in range(n):
        case.add([3, 1], [6, 6, 0], **params, logit_bias={5: 1.5}, seed=i)
    out = torch.zeros(n, dtype=torch.int32)
    sample_and_store(logits, *case.inputs(), EVERYTHING, out)
    x = brute(logits[0].double().numpy(), case.requests[0], case.tokens[0]) / 0.8
    expected = n * np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    found = np.bincount(out.numpy(), minlength=vocab)
    assert ((found - expected) ** 2 / expected).sum() < 24.3  # the 0.999 quantile


def test_words_of_a_request_lie_inside_its_row() -> None:
    layout = RowLayout(3, 10, 8, 100)
    case = Case(100)
    case.add(
        [1],
        [],
        logit_bias=dict.fromkeys(range(100), 1.0),
        allowed_token_ids=list(range(100)),
        bad_words=[[i] * 8 for i in range(100)] + [[1] * 224],
        stop_token_ids=list(range(32)),
    )
    updates = request_updates(case.requests[0], layout, 1)
    assert len(updates) <= layout.request_words
    assert len(set(updates[:, 0].tolist())) == len(updates)
    ends = (layout.params_at, layout.bias_at, layout.bad_words_at, layout.allowed_at, layout.num_words)
    for first, last in pairwise(ends):
        width = (last - first) // layout.num_rows
        inside = updates[(updates[:, 0] >= first) & (updates[:, 0] < last), 0]
        assert len(inside)
        assert ((inside - first) // width == 1).all()
    assert int(Word.COUNT) == (layout.bias_at - layout.params_at) // layout.num_rows
