"""The Triton kernels for processed logits and log-probabilities against the brute force of the reference's tests.

Without a GPU the file runs once more in a child process in which Triton interprets the kernels on the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gapless.batch.row_layout import Record
from gapless.batch.row_params import Feature
from gapless.sampling import reference
from test_sampling_process import (
    EVERYTHING,
    Case,
    brute,
    check_records,
    expected_record,
    expected_records,
    logprob_case,
    random_case,
    random_logits,
)

pytest.importorskip("triton", reason="Triton is not installed")

from interpreted import CHILD, run_in_the_interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
runs_kernels = pytest.mark.skipif(not GPU and not CHILD, reason="runs in the interpreter, in a child process")


@pytest.mark.skipif(GPU or CHILD, reason="the kernels run in this process")
def test_all_cases_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def inputs(case: Case) -> list[Any]:
    return [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in case.inputs()]


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [33, 5000])
@pytest.mark.parametrize("seed", range(8 if GPU else 2))
def test_process_equals_brute_force(vocab: int, dtype: torch.dtype, seed: int) -> None:
    from gapless.sampling.triton_process import process

    rng = np.random.default_rng(seed)
    case = random_case(rng, vocab, 30 if GPU else 4)
    logits = random_logits(rng, len(case.requests), vocab)
    got = process(logits.to(DEVICE, dtype), *inputs(case)).cpu().double().numpy()
    for s, (request, tokens) in enumerate(zip(case.requests, case.tokens, strict=True)):
        np.testing.assert_allclose(got[s], brute(logits[s].double().numpy(), request, tokens), rtol=1e-5, atol=1e-4)


@runs_kernels
def test_a_long_row_is_counted_by_several_programs() -> None:
    from gapless.sampling.triton_process import process

    rng = np.random.default_rng(3)
    case = Case(50, max_model_len=5000)
    prompt, generated = rng.integers(0, 30, 1500).tolist(), rng.integers(10, 40, 2700).tolist()
    case.add(prompt, generated, repetition_penalty=1.3, frequency_penalty=0.01, presence_penalty=-0.5)
    logits = random_logits(rng, 1, 50)
    got = process(logits.to(DEVICE), *inputs(case)).cpu().double().numpy()
    expected = brute(logits[0].double().numpy(), case.requests[0], case.tokens[0])
    np.testing.assert_allclose(got[0], expected, rtol=1e-5, atol=1e-4)


@runs_kernels
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("vocab", [64, 5000])
def test_logprobs_equal_brute_force(vocab: int, processed: bool) -> None:
    from gapless.sampling.triton import sample_and_store

    logits, case = logprob_case(vocab)
    out = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    records = torch.full((8, Record.COUNT), 77, dtype=torch.int32, device=DEVICE)
    sample_and_store(logits.to(DEVICE), *inputs(case), EVERYTHING, out, records, processed_logprobs=processed)
    tokens = out.tolist()
    assert tokens[3] == -1
    check_records(records.cpu(), expected_records(logits, case, tokens, processed))
    expected = torch.zeros(8, dtype=torch.int32)
    reference.sample_and_store(logits, *case.inputs(), EVERYTHING, expected)
    assert tokens == expected.tolist()


@runs_kernels
@pytest.mark.parametrize("features", [Feature.LOGPROBS, Feature.LOGPROBS | Feature.SAMPLE, Feature.PROCESS])
@pytest.mark.parametrize("processed", [False, True])
def test_fewer_features(features: Feature, processed: bool) -> None:
    from gapless.sampling.triton import sample_and_store

    results = []
    for store, device in ((reference.sample_and_store, "cpu"), (sample_and_store, DEVICE)):
        logits, case = logprob_case(100)
        moved = [t.to(device) if isinstance(t, torch.Tensor) else t for t in case.inputs()]
        out = torch.zeros(8, dtype=torch.int32, device=device)
        records = torch.full((8, Record.COUNT), 77, dtype=torch.int32, device=device)
        store(logits.bfloat16().to(device), *moved, features, out, records, processed_logprobs=processed)
        results.append((out.tolist(), records.cpu()))
    assert results[0][0] == results[1][0]
    ids = slice(Record.RANK, Record.IDS)
    assert torch.equal(results[0][1][:, ids], results[1][1][:, ids])


@runs_kernels
@pytest.mark.parametrize("processed", [False, True])
def test_scores_of_given_tokens(processed: bool) -> None:
    """Flag 2: the record of the token in the table, of the raw logits, whatever the row's parameters."""
    from gapless.sampling.triton import sample_and_store

    logits = random_logits(np.random.default_rng(7), 3, 64)
    case = Case(64)
    for _ in range(3):
        case.add([1, 2, 3, 4], [], logprobs=2, allowed_token_ids=[5], temperature=1.0)
        case.requests[-1].prompt_logprobs = 4
    results = []
    for store, device in ((reference.sample_and_store, "cpu"), (sample_and_store, DEVICE)):
        arena, layout, rows, _, _ = (t.to(device) if isinstance(t, torch.Tensor) else t for t in case.inputs())
        positions, flags = (torch.tensor(v, device=device) for v in ([1, 3, 4], [2, 2, 1]))
        rows[0] = rows[1]  # two tokens of one row
        out = torch.full((3,), 9, dtype=torch.int32, device=device)
        records = torch.full((3, Record.COUNT), 77, dtype=torch.int32, device=device)
        inputs = (arena, layout, rows, positions, flags.int(), EVERYTHING, out, records)
        store(logits.to(device), *inputs, processed_logprobs=processed)
        assert out.tolist() == [0, 0, 5]
        assert arena[int(rows[1]) * 40 :][:4].tolist() == [1, 2, 3, 4]
        results.append(records.cpu())
    wide = logits.double().numpy()
    drawn = np.where(np.arange(64) == 5, wide[2], -np.inf) if processed else wide[2]
    expected = [expected_record(wide[0], 2, 4), expected_record(wide[1], 4, 4), expected_record(drawn, 5, 2)]
    for records in results:
        check_records(records, expected)


@runs_kernels
def test_rows_without_a_token_are_left_alone() -> None:
    from gapless.sampling.triton import sample_and_store

    logits, case = logprob_case(64)
    arena, layout, rows, positions, flags = inputs(case)
    flags[4] = 0
    rows[5] = layout.null_row
    out = torch.full((8,), 5, dtype=torch.int32, device=DEVICE)
    records = torch.full((8, Record.COUNT), 77, dtype=torch.int32, device=DEVICE)
    flags[5] = 0
    sample_and_store(logits.to(DEVICE), arena, layout, rows, positions, flags, EVERYTHING, out, records)
    assert out[4] == 0
    assert (records[4:6] == 77).all()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("processed", [False, True])
def test_large_vocabulary(processed: bool) -> None:
    from gapless.sampling.triton import sample_and_store

    rng = np.random.default_rng(5)
    vocab = 151_936
    case = Case(vocab, max_model_len=4096)
    for i in range(16):
        prompt, generated = rng.integers(0, vocab, 1000).tolist(), rng.integers(0, vocab, 900).tolist()
        allowed = rng.permutation(vocab)[:1000].tolist() if i % 4 == 0 else None
        bias = {int(t): float(rng.uniform(-5, 5)) for t in rng.integers(0, vocab, 1024)}
        params = {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "logit_bias": bias, "allowed_token_ids": allowed}
        case.add(prompt, generated, **params, logprobs=20, temperature=i % 3 / 2, top_k=50 if i % 2 else 0)
    logits = random_logits(rng, 16, vocab)
    out = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    records = torch.full((16, Record.COUNT), 77, dtype=torch.int32, device=DEVICE)
    sample_and_store(logits.to(DEVICE), *inputs(case), EVERYTHING, out, records, processed_logprobs=processed)
    expected = expected_records(logits, case, out.tolist(), processed)
    floats = records.cpu().view(torch.float32)
    for s, (chosen, _, _, values) in enumerate(expected):
        np.testing.assert_allclose(float(floats[s, Record.LOGPROB]), chosen, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(floats[s, Record.LOGPROBS :].numpy(), values, rtol=1e-4, atol=1e-4)
