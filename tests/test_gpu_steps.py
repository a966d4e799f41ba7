"""On a GPU: in a step the host waits for one event and asks for two pinned copies and two graphs; nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.errors import EngineDeadError
from models import VOCAB_SIZE, tiny
from step_watch import mixed_traffic, no_sync, watch_loops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROOFS = Path(__file__).parent.parent / "benchmarks" / "gpu_proofs.py"
OPTIONS: dict[str, Any] = {"device": "cuda", "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 128}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_200_mixed_steps_without_a_wait_or_a_pageable_copy(depth: int) -> None:
    model = tiny("llama").cuda()
    with watch_loops() as watch, LLM(model, pipeline_depth=depth, num_kv_blocks=400, **OPTIONS) as llm:
        mixed_traffic(llm, 20, VOCAB_SIZE, seed=1)
        copies = llm._client._built.runner.device.copies
        before, seen = (copies.h2d, copies.d2h), watch.copies
        with no_sync():
            counts = mixed_traffic(llm, 200, VOCAB_SIZE)
        steps = counts["steps"]
        assert steps >= 200
        assert all(counts[what] for what in ("length", "stop", "abort", "prefix_hit_tokens")), counts
        assert (copies.h2d - before[0], copies.d2h - before[1]) == (steps, steps)
        assert watch.copies - seen == 2 * steps


FAULTS: dict[str, Callable[[], object]] = {
    "to": lambda: torch.ones(4).to("cuda"),
    "to, non-blocking": lambda: torch.ones(4).to("cuda", non_blocking=True),
    "pageable copy": lambda: torch.empty(4, device="cuda").copy_(torch.ones(4), non_blocking=True),
    "pageable copy back": lambda: torch.empty(4).copy_(torch.empty(4, device="cuda"), non_blocking=True),
    "tensor of a list": lambda: torch.tensor([1, 2], device="cuda"),
    "item": lambda: torch.zeros(1, device="cuda").item(),
    "nonzero": lambda: torch.zeros(4, device="cuda").nonzero(),
    "stream": lambda: torch.cuda.current_stream().synchronize(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_the_step_path_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same watch, and a line in `launch` that must not be there."""
    with watch_loops(), LLM(tiny("llama").cuda(), num_kv_blocks=400, **OPTIONS) as llm:
        mixed_traffic(llm, 20, VOCAB_SIZE)
        runner = llm._client._built.runner
        launch = runner.launch

        def faulty(plan: Any) -> Any:
            FAULTS[fault]()
            return launch(plan)

        monkeypatch.setattr(runner, "launch", faulty)
        with no_sync(), pytest.raises(EngineDeadError):
            mixed_traffic(llm, 20, VOCAB_SIZE)
        with pytest.raises(EngineDeadError, match="the engine stopped"):
            llm.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=2), use_tqdm=False)


def profile(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """In a process of its own: a profiler slows every later launch of its process."""
    out = tmp_path / "profile.json"
    command = [sys.executable, str(PROOFS), "--only", "profile", "--shape", "tiny", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert out.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    result: dict[str, Any] = json.loads(out.read_text())["profile"]
    return result


def test_calls_of_a_step_in_the_profiler(tmp_path: Path) -> None:
    result = profile(tmp_path)
    assert result["steady"]["steps"] >= 50
    assert result["mixed"]["steps"] >= 150
    assert result["steady"]["problems"] == []
    assert result["mixed"]["problems"] == []


def test_a_fault_is_seen_by_the_profiler(tmp_path: Path) -> None:
    problems = profile(tmp_path, "--inject")["steady"]["problems"]
    assert any("Pageable" in problem for problem in problems)
