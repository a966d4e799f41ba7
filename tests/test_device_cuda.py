"""What the CUDA device does without a GPU: how it hands a copy to the runtime."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gapless.device import cuda
from gapless.device.base import DeviceError


class Kind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


def copier(monkeypatch: pytest.MonkeyPatch, answer: int) -> tuple[Any, list[tuple[Any, ...]]]:
    calls: list[tuple[Any, ...]] = []

    def copy(*arguments: Any) -> tuple[int]:
        calls.append(arguments)
        return (answer,)

    monkeypatch.setattr(cuda, "runtime", SimpleNamespace(cudaMemcpyKind=Kind, cudaMemcpyAsync=copy))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    stream: Any = SimpleNamespace(cuda_stream=77, name="d2h")
    return cuda._copier(stream, "cudaMemcpyDeviceToHost"), calls


def test_addresses_bytes_direction_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, calls = copier(monkeypatch, 0)
    dst, src = torch.zeros(100, dtype=torch.int32), torch.zeros(100, dtype=torch.int32)
    copy(dst[8:20], src[4:16])
    assert calls == [(dst.data_ptr() + 32, src.data_ptr() + 16, 48, Kind.cudaMemcpyDeviceToHost, 77)]


def test_a_refused_copy_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, _ = copier(monkeypatch, 700)
    with pytest.raises(DeviceError, match="d2h stream took no copy of 16 bytes: 700"):
        copy(torch.zeros(4), torch.zeros(4))
