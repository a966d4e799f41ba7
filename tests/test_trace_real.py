"""The analysis on a few steps of real traces of an H200 (`benchmarks/gpu_traces.py`), cut by `tools/cut_trace.py`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from gapless.cli import main

DATA = Path(__file__).parent / "data"


def analyzed(name: str, tmp_path: Path) -> dict[str, Any]:
    out = tmp_path / "report.json"
    assert main(["trace", "analyze", str(DATA / f"{name}.json.gz"), "--json", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def per_step(report: dict[str, Any], what: str) -> dict[str, float]:
    return {row["name"]: row["per_step"] for row in report[what]}


@pytest.mark.parametrize("name", sorted(p.name.removesuffix(".json.gz") for p in DATA.glob("*.json.gz")))
def test_each_trace_is_read_and_its_idle_time_has_causes(name: str, tmp_path: Path) -> None:
    report = analyzed(name, tmp_path)
    assert report["steps"] == 3
    assert 0.5 < report["kernel_busy"] <= report["step_busy"] <= 1
    assert sum(report["causes_ms"].values()) == pytest.approx(report["no_kernel_ms"], abs=1e-3)
    assert b"/root/" not in gzip.decompress((DATA / f"{name}.json.gz").read_bytes())


def test_the_peer_that_waits_for_each_step(tmp_path: Path) -> None:
    """Seven pageable copies in, one out, nine calls that block; a third of the time has no kernel, by the host."""
    report = analyzed("transformers-sync", tmp_path)
    assert sum(row["per_step"] for row in report["copies"] if row["pageable"]) == 8
    assert per_step(report, "syncs")["cudaStreamSynchronize"] == 9
    assert report["kernel_busy"] < 0.7
    assert max(report["causes_ms"], key=report["causes_ms"].get) == "host"
    assert any("prepare_batch_tensors" in row["detail"] for row in report["details"] if row["cause"] == "host")


def test_the_peer_that_runs_ahead(tmp_path: Path) -> None:
    """Pinned copies only, one wait for an event; what is left lies between dependent kernels."""
    report = analyzed("transformers-async", tmp_path)
    assert not any(row["pageable"] for row in report["copies"])
    assert per_step(report, "syncs") == {"cudaEventSynchronize": 1}
    assert report["kernel_busy"] > 0.98
    assert report["gap_us_per_node"] > 0.4


@pytest.mark.parametrize(("name", "least"), [("gapless-mid", 0.997), ("gapless-depth1", 0.95)])
def test_our_own(name: str, least: float, tmp_path: Path) -> None:
    """Whole steps: all kernels, two graphs, one copy in, one wait. At depth 1 the host shows."""
    report = analyzed(name, tmp_path)
    assert report["nodes_per_step"] == 199
    assert report["step_busy"] > least
    assert not any(row["pageable"] for row in report["copies"])
    assert per_step(report, "syncs") == {"cudaEventSynchronize": 1}
    assert per_step(report, "launches")["cudaGraphLaunch"] == 2
