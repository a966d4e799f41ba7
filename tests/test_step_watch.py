"""The instruments of the GPU tests, tried where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.device import cuda
from models import VOCAB_SIZE, tiny
from rescore import rescore
from step_watch import CopyWatch, StepPathError, mixed_traffic, read_trace, watch_loops


def test_traffic_is_mixed() -> None:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 128, "num_kv_blocks": 200}
    with watch_loops(), LLM(tiny("llama"), device="cpu", block_size=8, check_model=False, **options) as llm:
        counts = mixed_traffic(llm, 200, VOCAB_SIZE)
    assert counts["steps"] >= 200
    assert all(counts[what] > 0 for what in ("length", "stop", "abort", "prefix_hit_tokens"))
    assert counts["length"] + counts["stop"] + counts["abort"] == counts["requests"]


@pytest.mark.parametrize(  # meta tensors stand for a device
    "forbidden",
    [
        lambda: torch.ones(3).to("meta"),
        lambda: torch.ones(3).to("meta", non_blocking=True),
        lambda: torch.empty(3, device="meta").copy_(torch.ones(3)),
        lambda: torch.empty(3, device="meta").copy_(torch.ones(3), non_blocking=True),
    ],
)
def test_watch_refuses(forbidden: Any) -> None:
    with pytest.raises(StepPathError), CopyWatch():
        forbidden()


def test_watch_sees_what_the_device_hands_to_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_copier", lambda stream, kind: lambda dst, src: None)
    with watch_loops() as watch:
        copy = cuda._copier(None, "cudaMemcpyHostToDevice")
        copy(torch.empty(3, device="meta"), torch.empty(3, device="meta"))
        assert watch.copies == 0
        with pytest.raises(StepPathError, match="a pageable copy"):
            copy(torch.empty(3, device="meta"), torch.ones(3))


def test_watch_lets_the_rest_pass() -> None:
    with CopyWatch():
        torch.ones(3).copy_(torch.zeros(3))
        torch.ones(3).to(torch.float64)
        assert torch.ones(3).sum().item() == 3
        torch.empty(3, device="meta").copy_(torch.empty(3, device="meta"))


def trace(steps: int, extra: list[tuple[str, int]] = [], stream: int = 13) -> list[dict[str, Any]]:  # noqa: B006
    """A trace in which each step takes 100 us and its device work 80."""
    calls = [("cudaMemcpyAsync", 1), ("cudaEventRecord", 5), ("cudaGraphLaunch", 2), ("cudaStreamWaitEvent", 2)]
    calls += [("cudaMemcpyAsync", 1), ("cudaEventSynchronize", 1), *extra]
    events: list[dict[str, Any]] = []
    correlation = 0
    for step in range(steps):
        at = step * 100.0
        for name, count in calls:
            for _ in range(count):
                correlation, at = correlation + 1, at + 1
                common = {"ph": "X", "args": {"correlation": correlation}}
                events.append({**common, "cat": "cuda_runtime", "name": name, "ts": at, "dur": 1, "tid": 5})
                if name == "cudaGraphLaunch":
                    own = {"correlation": correlation, "stream": stream}
                    work = {"ph": "X", "cat": "kernel", "name": "k", "args": own, "dur": 20}
                    events += [{**work, "ts": at + 5}, {**work, "ts": at + 25}]
    copies = [e for e in events if e["name"] == "cudaMemcpyAsync"]
    for i, call in enumerate(copies):
        kind = "Memcpy DtoH (Device -> Pinned)" if i % 2 else "Memcpy HtoD (Pinned -> Device)"
        own = {**call["args"], "stream": 20}
        events.append({**call, "cat": "gpu_memcpy", "name": kind, "args": own})
    return events


def test_trace_of_good_steps() -> None:
    calls = read_trace(trace(30), skip=5)
    assert calls.steps == 20
    assert calls.problems() == []
    assert calls.nodes == 6
    assert calls.ms == pytest.approx(0.1)
    assert 0 < calls.busy < 1
    assert "cudaGraphLaunch 2" in str(calls)


@pytest.mark.parametrize(
    ("extra", "stream", "named"),
    [
        ([("cudaStreamSynchronize", 1)], 13, "cudaStreamSynchronize"),
        ([("cudaMalloc_v3020", 1)], 13, "cudaMalloc"),
        ([("cudaFree", 1)], 13, "cudaFree"),
        ([("cudaEventSynchronize", 1)], 13, "cudaEventSynchronize"),
        ([("cuLaunchKernelEx", 1)], 13, "cuLaunchKernelEx"),
        ([], 7, "default stream"),
    ],
)
def test_trace_of_bad_steps(extra: list[tuple[str, int]], stream: int, named: str) -> None:
    problems = read_trace(trace(30, extra, stream), skip=5).problems()
    assert len(problems) == 1
    assert named in problems[0]


def test_trace_with_a_pageable_copy() -> None:
    events = trace(30)
    for event in events:
        if event["name"].startswith("Memcpy HtoD"):
            event["name"] = "Memcpy HtoD (Pageable -> Device)"
    assert any("Pageable" in problem for problem in read_trace(events, skip=5).problems())


def test_rescore_sees_one_wrong_token() -> None:
    model = tiny("qwen3")
    prompts = [[5, 6, 7], [9], [11, 12, 13, 14, 15]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(model, device="cpu", num_kv_blocks=50, max_model_len=64, check_model=False) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    tokens = [o.outputs[0].token_ids for o in outputs]
    good = rescore(model, prompts, tokens)
    assert good.tokens == 36
    assert good.max < 1e-4
    tokens[1] = [*tokens[1][:7], (tokens[1][7] + 1) % VOCAB_SIZE, *tokens[1][8:]]
    bad = rescore(model, prompts, tokens)
    assert bad.max > 0.1
    assert bad.worst[0] == 1
    assert bad.worst[1] >= 7  # what follows was another sentence's
