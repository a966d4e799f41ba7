"""Memory that is not there is refused in words, before it is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engines import model
from gapless import LLM, ConfigError
from gapless.bench.models import random_model
from gapless.device import memory
from gapless.device.cpu import LAZY_BYTES, zeros
from gapless.model.load.size import checkpoint_bytes

CPU = torch.device("cpu")


def machine(root: Path, available_kib: int, cgroup: str = "", files: dict[str, str] | None = None) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1000 kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in (files or {}).items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_what_is_available_counts_and_not_a_total(tmp_path: Path) -> None:
    assert memory.host_available(machine(tmp_path, 5000)) == 5000 * 1024
    assert memory.host_available(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a/b\n", {"a/memory.max": "3000", "a/memory.current": "1000", "a/memory.stat": "inactive_file 200"}, 2200),
        ("0::/a\n", {"a/memory.max": "max", "a/memory.current": "1", "a/memory.stat": ""}, 9000 * 1024),
        (
            "4:memory:/x\n",
            {
                "memory/x/memory.limit_in_bytes": "3000",
                "memory/x/memory.usage_in_bytes": "2900",
                "memory/x/memory.stat": "inactive_file 7\ntotal_inactive_file 50",
            },
            150,
        ),
        # in a container that sees its own group as the root
        ("0::/host/path\n", {"memory.max": "500", "memory.current": "600", "memory.stat": ""}, 0),
    ],
)
def test_limits_of_control_groups(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    assert memory.host_available(machine(tmp_path, 9000, cgroup, files)) == expected


def test_a_large_buffer_is_zero_and_takes_no_memory_until_it_is_touched() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    big = zeros((2**28,), torch.float32)  # a gibibyte
    assert resident() - before < 2**26
    big[:: 2**24] += 1
    assert big[:: 2**24].eq(1).all()
    assert not zeros((LAZY_BYTES // 2, 3), torch.bfloat16).any()
    assert zeros((0, 5), torch.float16).shape == (0, 5)


def test_a_checkpoint_is_measured_by_its_headers(tmp_path: Path) -> None:
    net = model()
    net.save_pretrained(tmp_path)
    size = sum(p.numel() for p in {id(p): p for p in net.parameters()}.values())
    assert checkpoint_bytes(tmp_path, torch.float32) == 4 * size
    assert checkpoint_bytes(tmp_path, torch.bfloat16) == 2 * size
    assert checkpoint_bytes(tmp_path, None) == sum(p.nbytes for p in {id(p): p for p in net.parameters()}.values())
    (tmp_path / "consolidated.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    assert checkpoint_bytes(tmp_path, torch.float32) == 4 * size
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert checkpoint_bytes(tmp_path, None) == 0


@pytest.mark.parametrize(
    ("free", "options", "words"),
    [
        (1000, {}, ["the weights of", "GiB are available on this machine"]),
        (2**20 * 8, {"max_num_seqs": 4096}, ["max_num_seqs=4096 rows", "Lower max_num_seqs"]),
        (2**30, {"num_kv_blocks": 2**26, "max_num_seqs": 4}, ["KV cache", "num_kv_blocks"]),
    ],
)
def test_an_engine_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, options: dict[str, Any], words: list[str]
) -> None:
    model().save_pretrained(tmp_path)
    monkeypatch.setattr(memory, "host_available", lambda: free + memory.HOST_SPARE)
    with pytest.raises(ConfigError) as error:
        LLM(str(tmp_path), device="cpu", check_model=False, max_num_batched_tokens=8192, **options)
    assert all(word in str(error.value) for word in words), error.value


def test_a_shape_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_available", lambda: 8 * memory.GIB)
    with pytest.raises(ConfigError, match=r"'llama-8b' in float32 takes 29\.9\d GiB, and 7\.75 GiB are"):
        random_model("llama-8b", CPU, torch.float32)
