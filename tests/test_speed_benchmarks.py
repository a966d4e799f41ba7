"""The arithmetic of benchmarks/growth.py and benchmarks/mixed_load.py, and their pictures; not their figures."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TINY = ["--shape", "tiny", "--device", "cpu"]


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("law", "factors"), [("a", (3.0,)), ("a + b n", (4.0, 0.01)), ("a + b n + c n^2", (0.0, 2.0, 1e-4))]
)
def test_a_law_is_found_again(law: str, factors: tuple[float, ...]) -> None:
    n = [1.0, 8.0, 64.0, 512.0, 4096.0]
    y = [sum(f * x**i for i, f in enumerate(factors)) for x in n]
    found = script("growth").fit(n, y, law)
    assert [found[letter] for letter, _ in zip("abc", factors, strict=False)] == pytest.approx(list(factors), rel=1e-6)
    assert found["worst"] < 1e-9
    y[2] *= 1.5
    assert script("growth").fit(n, y, law)["worst"] > 0.05


def test_factors_are_not_negative() -> None:
    found = script("growth").fit([1.0, 2.0, 4.0], [9.0, 8.0, 6.0], "a + b n")
    assert found["b"] == 0.0
    assert found["a"] > 0


def test_arrivals() -> None:
    mixed = script("mixed_load")
    assert mixed.arrivals("even", 4.0, 1.0) == [0.0, 0.25, 0.5, 0.75]
    times = mixed.arrivals("poisson", 8.0, 60.0)
    assert times == sorted(times) == mixed.arrivals("poisson", 8.0, 60.0)
    assert 400 < len(times) < 560
    assert times[-1] < 60.0
    assert mixed.percentiles([]) is None
    assert mixed.percentiles([0.001] * 99 + [1.0])["p50"] == pytest.approx(1.0)


def test_tiny_runs_and_their_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    words = [*TINY, "--seconds", "0.5", "--rate", "8", "--prompt-len", "8", "--output-len", "4", "--depths", "2"]
    words += ["--max-num-seqs", "4", "--out", str(results / "mixed_load.json")]
    monkeypatch.setattr(sys, "argv", ["mixed_load.py", *words])
    script("mixed_load").main()
    rows = json.loads((results / "mixed_load.json").read_text())["figures"]
    assert [row["depth"] for row in rows] == [2]
    for row in rows:
        assert row["output_tokens"] == 4 * row["requests"] > 0
        assert 0 < row["step_busy"] <= 1
        assert 0 < row["itl_ms"]["p50"] <= row["itl_ms"]["p99"]
    words = [*TINY, "--curves", "layers,context", "--layers", "1", "--contexts", "16,32", "--new", "4"]
    monkeypatch.setattr(sys, "argv", ["growth.py", *words, "--repeats", "1", "--out", str(results / "growth.json")])
    script("growth").main()
    curves = json.loads((results / "growth.json").read_text())["curves"]
    assert {name: [p["n"] for p in curve["points"]] for name, curve in curves.items()} == {
        "layers": [1],
        "context": [16, 32],
    }
    monkeypatch.setattr(sys, "argv", ["plots.py", "--results", str(results), "--docs", str(docs)])
    script("plots").main()
    assert {p.name for p in docs.iterdir()} == {"growth.svg", "mixed_load.svg"}


def test_a_whole_run_on_a_device_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = script("host_cost")
    load = cost.Workload("ragged", (40, 8, 24, 8), (3, 20, 9, 9))
    found = cost.measure_whole(load, 2, 1, False)
    assert found["steps"] == 20
    assert found["ends_turns"] == 3  # three lengths; two of four end together
    assert 0 < found["loop_cpu_s"] < found["all_cpu_s"]
    assert "idle_ms" not in found
    missing = []
    for ms in (1000.0, 0.001):
        monkeypatch.setattr(cost.PacedDevice, "pace", (ms, 0.0, 0.0))
        missing.append(cost.measure_whole(load, 2, 1, False)["busy_missing_%"])
    assert missing[0] < 1  # all of the host's work is hidden behind steps of a second,
    assert missing[1] > 50  # and none of it behind steps of a microsecond
