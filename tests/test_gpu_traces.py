"""The script that measures on a GPU, as far as it goes without one."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from engines import options
from gapless import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("gpu_traces", ROOT / "benchmarks" / "gpu_traces.py")
assert spec is not None
assert spec.loader is not None
script: Any = importlib.util.module_from_spec(spec)
sys.modules["gpu_traces"] = script
spec.loader.exec_module(script)


def test_the_example_of_the_documents_can_be_mended() -> None:
    both = script.examples()
    assert 'index.to("cuda")' in both["fault"]
    assert 'index.to("cuda", non_blocking=True)' in both["mended"]


def test_events_are_switched_off_and_on() -> None:
    with LLM(**options()) as llm:
        turn = script.switch(llm._client)
        params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
        runs, busy = [], []
        for on in (False, True, False, True):
            turn(on)
            before = llm.stats()[0].busy
            runs.append(llm.generate({"prompt_token_ids": [2, 3, 4]}, params, use_tqdm=False)[0].outputs[0].token_ids)
            busy.append(llm.stats()[0].busy - before)
        assert runs == [runs[0]] * 4
        assert busy[0] == busy[2] == 0
        assert min(busy[1], busy[3]) > 0


def test_a_part_that_fails_or_hangs_is_named(tmp_path: Path) -> None:
    session = script.Session(tmp_path, 60.0)
    assert session.run("good", [sys.executable, "-c", "print(7)"], 20)
    assert not session.run("bad", [sys.executable, "-c", "raise SystemExit('broken')"], 20)
    assert not session.run("slow", [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], 1.5)
    session.close()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "error" not in summary["good"]
    assert summary["bad"]["error"] == "broken"
    assert (tmp_path / "slow.txt").read_text() == "1\n"
    assert len((tmp_path / "summary.txt").read_text().splitlines()) == 3
    late = script.Session(tmp_path, 0.5)
    assert not late.run("late", [sys.executable, "-c", ""], 20)


def test_device_option() -> None:
    assert script.device(argparse.Namespace(device="cuda")) == []
    assert script.device(argparse.Namespace(device="cpu")) == ["--device", "cpu"]


def test_unknown_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_traces.py", "--out", str(tmp_path), "--only", "owns"])
    with pytest.raises(SystemExit):
        script.main()
