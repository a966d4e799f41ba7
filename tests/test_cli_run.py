"""``gapless generate`` with a tiny model: results, formats, streams, interrupts."""

from __future__ import annotations

import functools
import io
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import model, tokenizer
from gapless import LLM, SamplingParams
from gapless.cli import main

OPTIONS = (
    *("--device", "cpu", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "128"),
    *(
        "--num-kv-blocks",
        "129",
        "--block-size",
        "8",
        "--no-check-model",
        "--temperature",
        "0",
        "--ignore-eos",
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _restore_the_log() -> Iterator[None]:
    """The command attaches a handler to this process's standard error, which pytest replaces."""
    logger = logging.getLogger("gapless")
    before, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = before
    logger.setLevel(level)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(str(folder), device="cpu", num_kv_blocks=100, max_num_seqs=8) as llm:
        outputs = llm.generate(["hello", "world", "fox"], params, use_tqdm=False)
    return {str(o.prompt): o.outputs[0].text for o in outputs}


def generate(folder: Path, *arguments: str) -> int:
    return main(["generate", "--model", str(folder), *OPTIONS, *arguments])


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.split("\n")[:-1]]


def test_one_text(folder: Path, expected: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "hello") == 0
    out, err = capfd.readouterr()
    assert out == expected["hello"] + "\n"
    assert "GiB of weights" in err
    assert "KV cache" in err
    assert "tokens/s" in err
    assert "%|" not in err, "a progress bar without a terminal"


def test_several_texts(folder: Path, expected: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "--quiet", "hello", "world") == 0
    out, err = capfd.readouterr()
    assert out == f"=== 1: hello\n{expected['hello']}\n\n=== 2: world\n{expected['world']}\n\n"
    assert err == ""


def test_jsonl_in_and_out(folder: Path, expected: dict[str, str], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    talk = [{"role": "user", "content": "hello"}]
    lines: list[dict[str, Any]] = [
        {"prompt": "hello"},
        {"prompt": "world", "max_tokens": 3},
        {"messages": talk, "n": 2, "max_tokens": 2},
        {"prompt_token_ids": [5, 6], "max_tokens": 1},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    target.write_text("old")
    assert generate(folder, "--file", str(source), "--output", str(target), "--overwrite", "--ordered") == 0
    got = records(target.read_text(encoding="utf-8"))
    assert [r["index"] for r in got] == [0, 1, 2, 3]
    assert [len(r["outputs"][0]["token_ids"]) for r in got] == [16, 3, 2, 1]
    assert got[0]["outputs"][0]["text"] == expected["hello"]
    assert got[2]["messages"] == talk
    assert got[2]["prompt"].endswith("assistant: ")
    assert len(got[2]["outputs"]) == 2
    assert got[3]["prompt_token_ids"] == [5, 6]
    assert got[3]["outputs"][0]["finish_reason"] == "length"


def test_adapters(folder: Path, expected: dict[str, str], capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft_adapters", reason="peft is not installed")
    fr, de = (str(peft.save(model(), peft.KINDS[name], tmp_path / name)) for name in ("a", "b"))
    assert generate(folder, "--quiet", "--lora", f"fr={fr}", "hello") == 0
    alone = capfd.readouterr().out.removesuffix("\n")
    assert alone != expected["hello"]
    source = tmp_path / "in.jsonl"
    lines = [{"prompt": "hello", "lora": name} for name in ("fr", None, "de")]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    several = ("--lora", f"fr={fr}", "--lora", f"de={de}", "--file", str(source), "--format", "jsonl", "--quiet")
    assert generate(folder, *several) == 0
    texts = [r["outputs"][0]["text"] for r in records(capfd.readouterr().out)]
    assert texts[:2] == [alone, expected["hello"]]
    assert texts[2] not in texts[:2]


def test_adapters_that_are_refused(folder: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Before a model is loaded, as far as that can be."""
    options = {"peft_type": "LORA", "r": 8, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(options))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    good, source = f"x={tmp_path}", tmp_path / "in.jsonl"
    source.write_text('{"prompt": "hello", "lora": "y"}\n')
    cases = [
        (("--lora", "x", "hello"), "NAME=PATH is needed"),
        (("--lora", good, "--lora", good, "hello"), "is given twice"),
        (("--lora", f"x={tmp_path}/nowhere", "hello"), "there is no such folder"),
        (("--lora", good, "--lora", f"y={tmp_path}", "hello"), "which of the adapters x, y?"),
        (("--lora", good, "--file", str(source)), "lora='y': no such adapter."),
        (("--file", str(source)), "Loaded: none; give them with --lora NAME=PATH"),
        (("--lora", good, "--max-lora-rank", "4", "hello"), "need max_lora_rank=8, but 4 is given"),
        (("--lora", good, "hello"), "adapter_model.safetensors cannot be read"),
    ]
    for arguments, message in cases:
        assert generate(folder, "--quiet", *arguments) == 2
        assert message in capfd.readouterr().err


@pytest.mark.parametrize("given", [("--file", "-"), ()])
def test_standard_input_and_chat(
    folder: Path, given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\nworld\n")))
    assert generate(folder, *given, "--chat", "--format", "jsonl", "--quiet") == 0
    got = records(capfd.readouterr().out)
    assert [r["prompt"] for r in got] == [f"<s>user: {w}\nassistant: " for w in ("hello", "world")]


def test_streams_to_a_terminal(
    folder: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        pieces = 0

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.pieces += 1
            return super().write(text)

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert generate(folder, "hello") == 0
    assert terminal.getvalue() == expected["hello"] + "\n"
    assert terminal.pieces > 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt_token_ids": [5, -1]}, ["prompt_token_ids[1]=-1"]),
        ({"prompt_token_ids": [5] * 120}, ["136", "128"]),
        ({"prompt": ""}, ["no tokens"]),
        ({"prompt": "a", "stop_token_ids": [100000]}, ["stop_token_ids", "100000"]),
    ],
)
def test_what_only_the_model_can_refuse_is_named_by_line(
    folder: Path, line: Any, words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f'{{"prompt": "good"}}\n{json.dumps(line)}\n{{"prompt": "good"}}\n')
    assert generate(folder, "--file", str(source), "--quiet") == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"gapless: error: {source}:2: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


def test_models_that_are_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert generate(tmp_path / "nothing", "hello") == 2
    assert "nothing" in capfd.readouterr().err
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps({**model().config.to_dict(), "rope_parameters": rope}))
    assert generate(tmp_path, "--quiet", "hello") == 1
    error = capfd.readouterr().err
    assert error.startswith("gapless: error: ")
    assert "'dynamic'" in error
    assert error.count("\n") == 1


def start(folder: Path, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gapless", "generate", "--model", str(folder), *OPTIONS, *arguments]
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, **streams)


def test_interrupt(folder: Path) -> None:
    """Ctrl-C aborts what is running and ends with 130, without a traceback."""
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    long = ("--n", "2000", "--max-tokens", "100", "hello")
    process = start(folder, *long, stdout=subprocess.PIPE, preexec_fn=heed)
    assert process.stderr is not None
    for line in process.stderr:
        if "has a chat template" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err == "gapless: interrupted\n"


def test_a_closed_pipe_is_quiet(folder: Path) -> None:
    """As in ``gapless generate ... | head -1``."""
    process = start(folder, "--quiet", "--format", "jsonl", *["hello"] * 3, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) == 1
