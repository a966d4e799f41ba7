"""Benchmarks on the tiny shape: workloads, the command, result files, the peer."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shlex
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from gapless.bench import seed
from gapless.bench.files import from_prompts, from_sharegpt
from gapless.bench.models import floor_ms, random_model, step_bytes
from gapless.bench.table import grid, of_floor, step_ms, table
from gapless.bench.workloads import WORKLOADS, Workload, nano, uniform, workload
from gapless.cli import COMMANDS, main
from gapless.cli.parser import Parser
from gapless.errors import ConfigError, InputError
from gapless.trace import command as trace_command
from text_tokenizers import byte_level

TINY = ["--shape", "tiny", "--batch", "3", "--prompt-len", "9", "--output-len", "6", "--device", "cpu"]


def test_named_workloads() -> None:
    for name in WORKLOADS:
        load = workload(name)
        assert load.name == name
        assert load.batch == len(load.output_lens)
    n = nano()
    assert (n.batch, sum(n.output_lens), n.temperature) == (256, 133_966, 0.6)
    assert [len(p) for p in n.prompts()] == list(n.prompt_lens)
    assert workload("long").prompts(1)[0] != workload("long").prompts(2)[0]
    with pytest.raises(ConfigError, match="'long'"):
        workload("lnog")


def test_arrivals_come_at_the_rate() -> None:
    load = Workload("x", (1,) * 2000, (1,) * 2000, rate=50.0)
    times = load.arrivals()
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] / 2000 == pytest.approx(1 / 50, rel=0.1)
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.stdev(pauses) == pytest.approx(statistics.mean(pauses), rel=0.1)  # exponential
    assert uniform("y", 3, 1, 1).arrivals() == [0.0] * 3


def test_the_floor() -> None:
    model = random_model("tiny", torch.device("cpu"), torch.float32)
    weights = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    assert step_bytes(model, 2, 10) == 4 * (weights + 2 * 10 * 2 * 2 * 2 * 16)
    assert floor_ms(model, uniform("x", 2, 8, 4), 1e9) == pytest.approx(step_bytes(model, 2, 10) / 1e6)
    assert floor_ms(model, nano(), 1e9) is None
    with pytest.raises(ConfigError, match="'tiny'"):
        random_model("tinny", torch.device("cpu"), torch.float32)


def test_prompt_files(tmp_path: Path) -> None:
    tokenizer = byte_level()
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "hello"}\n{"prompt_token_ids": [1, 2], "max_tokens": 4}\n')
    load = from_prompts(str(file), tokenizer, 1000, 7)
    assert (load.output_lens, load.prompts()[1], load.name) == ((7, 4), [1, 2], "p")
    file.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(InputError, match=r"p\.jsonl:1"):
        from_prompts(str(file), tokenizer, 1000, 7)
    talk = tmp_path / "talk.json"
    turns = [{"from": "human", "value": "a long question"}, {"from": "gpt", "value": "a longer answer"}]
    talk.write_text(json.dumps([{"conversations": turns}] * 3 + [{"conversations": turns[:1]}]))
    load = from_sharegpt(str(talk), tokenizer, 2, None)
    assert load.batch == 2
    assert load.output_lens[0] == len(tokenizer.encode("a longer answer", add_special_tokens=False))
    for content, words in (("{}", "a list"), ("nonsense", "not JSON"), ("[]", "no conversation"), ("[3]", "item 0")):
        talk.write_text(content)
        with pytest.raises(InputError, match=words):
            from_sharegpt(str(talk), tokenizer, 2, None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    assert main(["bench", *TINY, "--depth", "1,2", "--compare", "transformers", "--save", str(out)]) == 0
    text = capsys.readouterr().out
    for word in ("commit", "torch", "no GPU", "tokens/s", "ms/step", "% of floor", "step-busy %", "host ms/step"):
        assert word in text
    saved = json.loads(out.read_text())
    assert {"commit", "gpu", "driver", "torch", "cpu"} <= set(saved["environment"])
    rows = saved["figures"]
    assert [(r["engine"].split()[0], r["depth"]) for r in rows] == [("gapless", 1), ("gapless", 2), ("transformers", 1)]
    for row in rows:
        assert row["output_tokens"] == 18
        assert row["decode_ms_per_step"] is not None
    assert rows[1]["steps"] == 6
    assert 0 < rows[1]["step_busy"] <= 1
    assert rows[1]["host_hidden_ms_per_step"] <= rows[1]["host_ms_per_step"]
    assert set(rows[1]["host_ms_by_phase"]) >= {"receive", "schedule", "launch", "wait", "commit", "publish"}


def test_arrivals_and_latencies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    assert main(["bench", *TINY, "--depth", "2", "--rate", "40", "--quiet", "--save", str(out)]) == 0
    captured = capsys.readouterr()
    assert "TTFT" in captured.out
    assert captured.err == ""
    (row,) = json.loads(out.read_text())["figures"]
    assert row["ttft_ms"][0] <= row["ttft_ms"][1]
    assert row["decode_ms_per_step"] is None
    assert row["wall_s"] > uniform("x", 3, 1, 1).batch / 40 / 10


def test_the_seed_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(seed, "cpu_workload", lambda: uniform("seed on a CPU", 2, 8, 4))
    assert main(["bench", "seed", "--shape", "tiny", "--device", "cpu", "--quiet"]) == 0
    text = capsys.readouterr().out
    for word in ("sync (depth 1)", "async (depth 2)", "300.60", "234.50", "76.00", "99.40", "1.282", "no GPU", "hides"):
        assert word in text


def test_tables() -> None:
    row: dict[str, Any] = {"shape": "s", "workload": "w", "depth": 2, "floor_ms": 1.0, "decode_ms_per_step": 4.0}
    assert (step_ms(row), of_floor(row)) == ("4.000", "25.0")
    assert step_ms({"mean_ms_per_step": 2.0}) == "~2.000"
    assert step_ms({}) == "-"
    lines = table([row]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert grid(["a", "b"], [["x", "1"]]) == "| a | b |\n|---|--:|\n| x | 1 |"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["lnog"], "'long'"),
        (["--depth", "0"], "--depth 0"),
        (["--depth", "two"], "--depth two"),
        (["--batch", "0"], "--batch 0"),
        (["--rate", "-1"], "--rate -1"),
        (["--pipeline-depth", "2"], "--depth"),
        (["--shape", "tiny", "--model", "x"], "not allowed with"),
        (["--shape", "tinny", "--device", "cpu"], "'tiny'"),
        (["--compare", "vllm"], "--compare"),
        ([*TINY, "--prompts", "no/such.txt"], "no/such.txt"),
        ([*TINY, "--sharegpt", "x.json"], "--model"),
    ],
)
def test_usage(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert text in capsys.readouterr().err


def test_async_peer_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["bench", *TINY, "--depth", "1", "--compare", "transformers-async"]) == 1
    assert "needs CUDA" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["README.md", "docs/profiling.md"])
def test_commands_of_the_documents_parse(file: str) -> None:
    text = (Path(__file__).parent.parent / file).read_text(encoding="utf-8")
    lines = re.findall(r"^    (gapless (?:bench|trace) [^#\n]*)", text, re.M)
    assert lines
    for line in lines:
        _, name, *words = shlex.split(line)
        kind = "gapless.bench.command"
        if name == "trace":
            kind = trace_command.ACTIONS[words.pop(0)][0]
        elif words[0] == "serve":
            kind = COMMANDS[f"{name} {words.pop(0)}"][0]
        module = importlib.import_module(kind)
        parser = Parser(prog=line)
        module.add_arguments(parser)
        arguments = parser.parse(words, "rest")
        for word in arguments.rest:
            assert word in WORKLOADS or "." in word
