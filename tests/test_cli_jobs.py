"""Many prompts from a file: what a kill leaves, what a resume skips, in which order results come, whose they are."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engines import model, tokenizer
from gapless.cli import main
from gapless.cli.resume import Digests
from test_cli_run import OPTIONS, _restore_the_log  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def command(folder: Path, *arguments: object) -> list[str]:
    return ["generate", "--model", str(folder), *OPTIONS, "--quiet", *map(str, arguments)]


def generate(folder: Path, *arguments: object) -> int:
    return main(command(folder, *arguments))


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def by_index(path: Path) -> dict[int, list[int]]:
    results = read(path)
    assert len({r["index"] for r in results}) == len(results), "a result is there twice"
    return {r["index"]: r["outputs"][0]["token_ids"] for r in results}


def test_a_result_is_written_when_it_ends(folder: Path, tmp_path: Path) -> None:
    """One slow request at the head holds nothing back, unless the order is asked for."""
    lines = [{"prompt": "hello", "max_tokens": 100, "id": "slow"}]
    lines += [{"prompt": "world", "max_tokens": 1 + i % 3, "id": i} for i in range(20)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert generate(folder, "--file", source, "--output", target) == 0
    results = read(target)
    assert {r["index"]: r["id"] for r in results} == {0: "slow", **{i + 1: i for i in range(20)}}
    assert results[-1]["id"] == "slow"
    assert generate(folder, "--file", source, "--output", target, "--ordered", "--overwrite") == 0
    assert [r["index"] for r in read(target)] == list(range(21))


def test_an_output_is_never_emptied_unasked(folder: Path, tmp_path: Path, capfd: Any) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    target.write_text("finished work\n")
    cases: list[tuple[tuple[object, ...], str]] = [
        (("--file", source, "--output", target), "--resume goes on with it, --overwrite replaces it"),
        (("--file", source, "--output", source, "--overwrite"), "is the file of the prompts"),
        (("--file", source, "--output", target, "--resume", "--overwrite"), "give one of them"),
        (("--file", source, "--output", target, "--resume"), "out.jsonl:1 is no line of a result"),
        (("--file", source, "--resume"), "--output FILE, which is missing"),
        (("--file", source, "--output", tmp_path / "out.txt", "--resume"), "use --format jsonl"),
    ]
    for arguments, words in cases:
        assert generate(folder, *arguments) == 2
        assert words in capfd.readouterr().err
        assert target.read_text() == "finished work\n"
        assert read(source) == [{"prompt": "a"}]


def test_a_kill_loses_only_what_was_running(folder: Path, tmp_path: Path) -> None:
    """Killed at random moments and resumed until it ends, sampled tokens too are those of an unbroken run."""
    seed = random.randrange(2**32)
    print(f"seed={seed}")
    chance = random.Random(seed)
    lines = [{"prompt": "hello", "max_tokens": chance.randint(1, 30), "temperature": 1.0} for _ in range(300)]
    source, whole, target = write(tmp_path / "in.jsonl", lines), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert generate(folder, "--file", source, "--output", whole) == 0
    expected = by_index(whole)
    assert len({tuple(ids) for ids in expected.values()}) > 200, "equal prompts must have seeds of their own"
    arguments = command(folder, "--file", source, "--output", target, "--resume")
    before = 0
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-m", "gapless", *arguments], stdin=subprocess.DEVNULL)
        goal = before + chance.randint(20, 100)
        while process.poll() is None and (not target.exists() or target.read_bytes().count(b"\n") < goal):
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        data = target.read_bytes()
        count = data.count(b"\n")
        assert count >= goal
        cut = chance.choice([0, 10])  # as a kill within a write leaves it
        target.write_bytes(data if not cut else data + data[:cut])
        before = count
    assert main(arguments) == 0
    assert by_index(target) == expected


def test_resume_knows_prompts_by_id_or_by_index(folder: Path, tmp_path: Path, capfd: Any) -> None:
    target = tmp_path / "out.jsonl"
    named = [{"prompt": f"p{i}", "custom_id": f"x{i}", "max_tokens": 2} for i in range(6)]
    source = write(tmp_path / "in.jsonl", named[:4])
    assert generate(folder, "--file", source, "--output", target) == 0
    write(source, named[::-1])
    assert generate(folder, "--file", source, "--output", target, "--resume") == 0
    assert sorted(r["custom_id"] for r in read(target)) == [f"x{i}" for i in range(6)]
    target.unlink()
    bare = [{"prompt": f"p{i}", "max_tokens": 2} for i in range(4)]
    write(source, bare)
    assert generate(folder, "--file", source, "--output", target) == 0
    write(source, bare[1:])
    assert generate(folder, "--file", source, "--output", target, "--resume") == 2
    assert "the input has changed" in capfd.readouterr().err
    assert len(read(target)) == 4


def test_lines_that_are_wrong_later_cost_nobody_else(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The first lines refuse the whole; a later one has an error as its result, and the command ends with 1."""
    monkeypatch.setattr("gapless.cli.prompts.FIRST", 4)
    monkeypatch.setattr("gapless.cli.jobs.FIRST", 4)
    lines: list[Any] = [{"prompt": "a", "max_tokens": 2, "id": i} for i in range(12)]
    lines[6] = {"prompt": "a", "temprature": 1, "id": 6}
    lines[8] = {"prompt_token_ids": [5] * 127, "max_tokens": 10, "id": 8}
    lines[9] = {"prompt": "a", "id": 3}
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert generate(folder, "--file", source, "--output", target) == 1
    results = {r["index"]: r for r in read(target)}
    assert sorted(results) == list(range(12))
    assert {i for i, r in results.items() if "error" in r} == {6, 8, 9}
    assert results[6]["id"] == 6
    assert "'temperature'" in results[6]["error"]
    assert "137" in results[8]["error"]
    assert "earlier line" in results[9]["error"]
    assert "3 of 12 prompts were refused" in capfd.readouterr().err
    write(source, [lines[0], lines[6]])
    assert generate(folder, "--file", source, "--output", tmp_path / "other.jsonl") == 2
    assert not (tmp_path / "other.jsonl").exists()


CHAT = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}


def batch(id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": body}


def test_openai_batch_files(folder: Path, tmp_path: Path) -> None:
    lines = [
        batch("a", **CHAT, max_completion_tokens=3, logit_bias={"7": 1.5}, user="u", seed=None),
        batch("b", "/v1/completions", model="m", prompt="hello", max_tokens=2, n=2, logprobs=1),
        batch("c", **CHAT, max_tokens=4, logprobs=True, top_logprobs=2, response_format={"type": "text"}),
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert generate(folder, "--file", source, "--output", target) == 0
    results = {r["custom_id"]: r for r in read(target)}
    assert set(results) == {"a", "b", "c"}
    for result in results.values():
        assert set(result) == {"id", "custom_id", "response", "error"}
        assert result["error"] is None
        assert result["response"]["status_code"] == 200
    bodies = {id: r["response"]["body"] for id, r in results.items()}
    assert bodies["a"]["usage"]["completion_tokens"] == 3
    assert bodies["a"]["choices"][0]["message"]["role"] == "assistant"
    assert bodies["a"]["model"] == "m"
    assert bodies["b"]["object"] == "text_completion"
    assert len(bodies["b"]["choices"]) == 2
    assert len(bodies["b"]["choices"][0]["logprobs"]["token_logprobs"]) == 2
    assert len(bodies["c"]["choices"][0]["logprobs"]["content"]) == 4
    size = target.stat().st_size
    assert generate(folder, "--file", source, "--output", target, "--resume") == 0
    assert target.stat().st_size == size


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (batch("a", **CHAT, tools=[]), ["body.tools"]),
        (batch("a", **CHAT, stream=True), ["stream"]),
        (batch("a", "/v1/embeddings", **CHAT), ["/v1/embeddings", "/v1/completions"]),
        (batch("a", **CHAT, top_logprobs=2), ["logprobs=true"]),
        (batch("a", **CHAT, temprature=2), ["body.temprature", "'temperature'"]),
        (batch("a", model="m"), ["body.messages"]),
        (batch("a", "/v1/completions", model="m", prompt=["a", "b"]), ["several lines"]),
        (batch("a", messages=[{"role": "user", "content": [{"type": "image_url"}]}]), ["image_url", "only text"]),
        ({**batch("a", **CHAT), "method": "GET"}, ["GET"]),
        ({"custom_id": 3, "url": "/v1/chat/completions", "body": CHAT}, ["custom_id=3"]),
        ({"id": 1, "custom_id": "2", "prompt": "a"}, ["both"]),
        ({"id": None, "prompt": "a"}, ["id=None"]),
    ],
)
def test_lines_that_are_refused(tmp_path: Path, line: Any, words: list[str], capsys: Any) -> None:
    source = write(tmp_path / "in.jsonl", [line])
    assert main(["generate", "--model", "m", "--file", str(source)]) == 2
    error = capsys.readouterr().err
    assert f"{source}:1: " in error
    assert all(word in error for word in words), error


def test_a_file_is_read_no_further_than_a_window(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Standard input tells how far it was read when the first result is written."""
    lines = [b'{"prompt": "hello", "max_tokens": 1}\n'] * 5000
    read_when_first_came: list[int] = []

    class Source(io.RawIOBase):
        at = 0

        def __iter__(self) -> Any:
            for line in lines:
                self.at += 1
                yield line

    source = Source()

    class Stdin:
        buffer = source

    class Stdout(io.StringIO):
        def write(self, text: str) -> int:
            if not read_when_first_came:
                read_when_first_came.append(source.at)
            return len(text)

    monkeypatch.setattr(sys, "stdin", Stdin())
    monkeypatch.setattr(sys, "stdout", Stdout())
    assert generate(folder, "--file", "-", "--input-format", "jsonl", "--format", "jsonl") == 0
    assert read_when_first_came[0] < 1200
    assert source.at == 5000


def test_digests() -> None:
    seed = random.randrange(2**32)
    print(f"seed={seed}")
    chance, truth, digests = random.Random(seed), set[str](), Digests(recent=7)
    for _ in range(500):
        word = str(chance.randrange(300))
        assert (word in digests) == (word in truth)
        assert digests.add(word) == (word not in truth)
        truth.add(word)
        assert len(digests) == len(truth)
