"""Real threads: the CPU device with a random pause before everything that a stream does. A seed repeats its pauses."""

from __future__ import annotations

import os

import pytest
import torch

from gapless.device.cpu import CpuDevice
from gapless.runner.kernels import reference_kernels
from proof.simulated_runs import Workload, agrees, random_workload, run_on
from proof.small_workloads import BY_NAME

SEEDS = int(os.environ.get("GAPLESS_FUZZ_SEEDS", "80"))
CHUNKS = 8


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_pauses_on_every_stream_change_no_token(chunk: int) -> None:
    for seed in range(chunk, SEEDS, CHUNKS):
        depth = 2 + seed % 3
        print(f"random_workload({seed}), depth {depth}, delays {seed}")
        workload = random_workload(seed)
        device = CpuDevice(delays=seed, max_delay=(0.0002, 0.001)[seed % 2])
        assert agrees(workload, run_on(device, workload, depth)), f"seed {seed}, depth {depth}"


@pytest.mark.parametrize("name", ["arrivals", "preemption", "captured graphs", "generated prefix"])
def test_nothing_undeclared_is_touched(name: str) -> None:
    """The race detector believes the declarations: here they are proved, on the workloads that it saw."""
    workload = BY_NAME[name]
    for depth in (1, 3):
        assert agrees(workload, run_on(CpuDevice(debug=True), workload, depth))


def test_pauses_change_no_token_of_a_real_model() -> None:
    from gapless.model.load.loading import load_model
    from models import tiny

    model = load_model(tiny("llama", num_hidden_layers=2), device=torch.device("cpu"), probe=False).model
    workload: Workload = BY_NAME["ends by a token"].but(model=model, kernels=reference_kernels())
    truth = run_on(CpuDevice(), workload, 1).tokens()
    for seed in range(12):
        print(f"delays {seed}")
        assert run_on(CpuDevice(delays=seed, max_delay=0.001), workload, 2 + seed % 2).tokens() == truth
