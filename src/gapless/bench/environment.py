"""What figures depend on: versions, machine, commit, and how fast the device reads its memory."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import gapless

READ_BANDWIDTH = {"NVIDIA H200": 4.36e12}
"""Bytes per second of device memory, by a kernel that only reads."""


def environment() -> dict[str, str]:
    """What a result file records."""
    import torch
    import transformers

    gpu = torch.cuda.is_available()
    return {
        "gapless": gapless.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if gpu else "none",
        "driver": driver() if gpu else "none",
        "cuda": str(torch.version.cuda or "none"),
        "cpu": cpu(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }


def commit() -> str:
    """The source's commit, with ``+`` if files differ from it; ``$GAPLESS_COMMIT`` names that of a copy without its
    repository, which may lie in another one."""
    if "GAPLESS_COMMIT" in os.environ:
        return os.environ["GAPLESS_COMMIT"]
    here = Path(__file__).parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


def driver() -> str:
    """Version of the NVIDIA driver."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def cpu() -> str:
    """The processor's name and the number of its cores that this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name} x {count}"


@cache
def read_bandwidth(device: str) -> float | None:
    """Bytes per second at which the device reads its memory: known for some, else measured by a sum over 1 GiB.

    None on a CPU.
    """
    import torch

    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(torch.device(device))
    return READ_BANDWIDTH.get(name) or _measured(torch, device)


def _measured(torch: Any, device: str) -> float:
    numbers = torch.zeros(2**28, dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            numbers.sum()
        end.record()
        torch.cuda.synchronize(device)
        best = max(best, 4 * numbers.nbytes / (start.elapsed_time(end) * 1e-3))
    return best
