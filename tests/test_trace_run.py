"""Profiles of this engine on the CPU device: the whole path from the hook to the report."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from engines import options
from gapless import LLM, SamplingParams
from gapless.cli import main
from gapless.engine.stats import PHASES
from gapless.trace.chrome import read_events
from gapless.trace.observe import Window
from gapless.trace.recording import load

TINY = ["--shape", "tiny", "--batch", "3", "--prompt-len", "9", "--device", "cpu", "--window", "12", "--skip", "3"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_profile_of_steady_steps(depth: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "t.json.gz", tmp_path / "r.json"
    words = [*TINY, "--depth", str(depth), "--keep", str(trace), "--json", str(out), "--quiet"]
    assert main(["trace", "run", *words]) == 0
    text = capsys.readouterr().out
    assert "kernel-busy undisturbed" in text
    report = json.loads(out.read_text())
    assert report["steps"] >= 11
    assert report["nodes_per_step"] == pytest.approx(2, abs=0.2)  # forward and sample
    assert {c["name"] for c in report["copies"]} == {"h2d", "d2h"}
    assert set(report["phases"]) >= {*PHASES, "fill"} - {"mask"}
    assert "mask" not in report["phases"]  # no row has a grammar
    assert sum(report["causes_ms"].values()) == pytest.approx(report["no_kernel_ms"])
    assert report["undisturbed_step_ms"] > 0
    assert report["environment"]["gpu"]
    recording = load(trace)
    assert recording.counters
    names = {e["args"]["name"] for e in read_events(trace) if e.get("name") == "thread_name"}
    assert {"compute (stream compute)", "h2d (stream h2d)", "d2h (stream d2h)", "loop thread"} <= names
    arrows = [e["ph"] for e in read_events(trace) if e.get("cat") == "ac2g"]
    assert arrows.count("s") == arrows.count("f") > 40


def test_the_hook_is_taken_off() -> None:
    with LLM(**options()) as llm:
        client = llm._client
        window = Window(client, 2, 1, 5)
        with window.watching() as seen:
            prompts = [{"prompt_token_ids": [2, 3, 4]}, {"prompt_token_ids": [5, 6]}]
            llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
        assert window.done.is_set()
        assert seen.step_ms > 0
        assert client._engine.observer is None
        slots = client._built.runner._ring.slots
        assert all("fill" not in vars(slot) for slot in slots)
        ordered = [(start, end) for phase, start, end in seen.phases if phase != "fill"]
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(ordered))


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["lnog"], 2, "'long'"),
        (["mid", "long"], 2, "one workload"),
        (["--depth", "1,2"], 2, "one depth"),
        (["--window", "1"], 2, "--window"),
        (["--max-num-seqs", "2", *TINY], 1, "no 12 steady steps"),
        (["--shape", "tiny", "--device", "cpu", "--engine", "transformers-async"], 1, "needs CUDA"),
    ],
)
def test_usage(words: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "run", *words]) == code
    assert text in capsys.readouterr().err


def test_a_peer_on_the_cpu_has_no_gpu_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "run", *TINY, "--engine", "transformers-sync", "--quiet"]) == 1
    assert "no work of a GPU" in capsys.readouterr().err
