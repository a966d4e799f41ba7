"""The command line short of a model: help, options, input files, exit codes."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gapless import EngineConfig, SamplingParams
from gapless.cli import COMMANDS, ELSEWHERE, main
from gapless.cli.generate import add_arguments
from gapless.cli.options import attribute_docs, given, option_name
from gapless.cli.parser import Parser, UsageError
from gapless.cli.prompts import all_jobs, jobs_from_arguments

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_help_answers_at_once() -> None:
    """0.4 s of processor time, which other processes on this machine do not change; the best of three."""

    def seconds() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = []
    for _ in range(3):
        before = seconds()
        command = [sys.executable, "-m", "gapless", "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        times.append(seconds() - before)
        assert "generate" in done.stdout
    assert min(times) < 0.4


def test_installed_command() -> None:
    script = Path(sys.executable).with_name("gapless")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("gapless 0.")


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    overview = capsys.readouterr().out
    assert all(name in overview for name in COMMANDS)
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"gapless {name}" in text
        if name == "generate":
            assert "--max-tokens" in text
            assert "--no-enforce-eager" in text


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_not_installed_says_where_it_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 2
    told = capsys.readouterr().err
    assert f"`{ELSEWHERE[name]}` in a checkout" in told
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, *ELSEWHERE[name].split()[1:], "--help"], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(f"usage: {ELSEWHERE[name]}"), done.stderr


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
def test_every_field_is_an_option_with_a_text(cls: type) -> None:
    assert set(attribute_docs(cls)) == {f.name for f in fields(cls)}
    assert all(attribute_docs(cls).values())


def parse(*arguments: str) -> Any:
    parser = Parser(prog="gapless generate")
    add_arguments(parser)
    return parser.parse(["--model", "m", *arguments], "prompts")


def test_option_values() -> None:
    arguments = parse(
        *(
            "one",
            "--temperature",
            "0",
            "--top-k",
            "-1",
            "--stop",
            "a",
            "two words",
            "--stop=-b",
            "-3 degrees",
        ),
        *("--stop-token-ids", "1,2", "--max-tokens", "none", "--no-skip-special-tokens", "--seed=-5"),
        *("--engine-seed", "9", "--gpu-memory-utilization", ".5", "--enforce-eager", "--", "--not-an-option"),
    )
    assert arguments.prompts == ["one", "two words", "-3 degrees", "--not-an-option"]
    params = SamplingParams.from_dict(given(arguments, SamplingParams))
    assert params == SamplingParams(
        temperature=0,
        top_k=-1,
        stop=("a", "-b"),
        stop_token_ids=(1, 2),
        max_tokens=None,
        skip_special_tokens=False,
        seed=-5,
    )
    config = EngineConfig.from_dict(given(arguments, EngineConfig))
    assert config == EngineConfig(seed=9, gpu_memory_utilization=0.5, enforce_eager=True)


def test_only_what_was_given_is_handed_on() -> None:
    assert given(parse("hello"), SamplingParams) == {}
    assert given(parse("hello"), EngineConfig) == {}


def test_option_names_do_not_clash() -> None:
    names = [option_name(cls, f.name) for cls in (EngineConfig, SamplingParams) for f in fields(cls)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generat"], ["'generat'", "'generate'"]),
        (["--verison"], ["'--verison'", "'--version'"]),
        (["generate", "hello"], ["--model"]),
        (["generate", "--model", "m", "--temprature", "0.5", "hi"], ["'--temprature'", "'--temperature'"]),
        (["generate", "--model", "m", "--max_tokens=5", "hi"], ["'--max_tokens'", "'--max-tokens'"]),
        (["generate", "--model", "m", "--temp", "0.5", "hi"], ["'--temp'"]),
        (["generate", "--model", "m", "--top-k", "many", "hi"], ["--top-k", "'many'"]),
        (["generate", "--model", "m", "--top-p", "2", "hi"], ["top_p", "2.0", "(0, 1]"]),
        (["generate", "--model", "m", "--pipeline-depth", "0", "hi"], ["pipeline_depth", "0"]),
        (["generate", "--model", "m", "--format", "xml", "hi"], ["--format", "'xml'", "jsonl"]),
        (["generate", "--model", "m", "--file", "x.txt", "hi"], ["--file", "arguments"]),
        (["generate", "--model", "m", "--file", "no/such.txt"], ["no/such.txt", "No such file"]),
        (["generate", "--model", "m", "--output", "no/such/file", "hi"], ["--output", "no/such"]),
        (["generate", "--model", "m", "--output", "/", "hi"], ["--output", "folder"]),
    ],
)
def test_usage_errors_are_one_clear_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gapless: error: ")
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err
    assert "torch" not in captured.err


def test_no_prompt_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.StringIO()
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["generate", "--model", "m"]) == 2
    assert "no prompt" in capsys.readouterr().err


def test_text_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffone\r\n\n  two\u2028still two  \nthree".encode())
    jobs = all_jobs(str(file), None, {"max_tokens": 3}, chat=False)
    assert [j.prompt for j in jobs] == ["one", "  two\u2028still two  ", "three"]
    assert [j.where for j in jobs] == [f"{file}:{n}" for n in (1, 3, 4)]
    assert {j.params for j in jobs} == {SamplingParams(max_tokens=3)}
    (job,) = jobs_from_arguments(["hello"], {}, chat=True)
    assert job.messages == [{"role": "user", "content": "hello"}]
    assert job.prompt is None


def jsonl(tmp_path: Path, *lines: Any) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8"
    )
    return str(file)


def test_jsonl_file(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a\u2028b"}]
    file = jsonl(
        tmp_path,
        {"prompt": "one", "temperature": 0, "stop": "x", "max_tokens": None},
        "",
        json.dumps({"messages": talk, "n": 2}, ensure_ascii=False),
        {"prompt_token_ids": [1, 2], "stop_token_ids": [3]},
    )
    one, two, three = all_jobs(file, None, {"temperature": 0.5, "seed": 1}, chat=False)
    assert (one.prompt, one.params) == (
        "one",
        SamplingParams(temperature=0, stop="x", seed=1, max_tokens=None),
    )
    assert (two.messages, two.params) == (talk, SamplingParams(temperature=0.5, n=2, seed=1, max_tokens=None))
    assert two.where.endswith(":3")
    assert three.prompt == {"prompt_token_ids": [1, 2]}
    assert three.params == SamplingParams(temperature=0.5, stop_token_ids=[3], seed=1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', ["not JSON", "column"]),
        ('["a"]', ["JSON object"]),
        ({"promt": "a"}, ["'promt'", "'prompt'"]),
        ({"prompt": "a", "temprature": 0}, ["'temprature'", "'temperature'"]),
        ({"temperature": 0}, ["exactly one", "none"]),
        ({"prompt": "a", "messages": []}, ["exactly one", "prompt and messages"]),
        ({"prompt": 5}, ["prompt=5"]),
        ({"prompt": "a", "top_p": 3}, ["top_p=3"]),
        ({"prompt": "a", "stop": 3}, ["stop=3"]),
        ({"prompt": "a", "max_tokens": "5"}, ["max_tokens='5'"]),
        ({"prompt": "a", "temperature": True}, ["temperature=True"]),
        ({"messages": [{"role": "user"}]}, ["messages[0]", "content"]),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, words: list[str], capsys: Any) -> None:
    file = jsonl(tmp_path, {"prompt": "good"}, line, {"prompt": "good"}, {"nothing": 1})
    assert main(["generate", "--model", "m", "--file", file]) == 2
    error = capsys.readouterr().err
    assert f"{file}:2: " in error
    assert "1 more wrong line" in error
    assert error.count("\n") == 1
    assert all(word in error for word in words), error


def test_bad_files(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("\n \n")
    binary.write_bytes(b"good\n\xff\n")
    with pytest.raises(UsageError, match="holds no prompt"):
        all_jobs(str(empty), None, {}, chat=False)
    with pytest.raises(UsageError, match=r"binary\.txt:2: not UTF-8"):
        all_jobs(str(binary), None, {}, chat=False)
    with pytest.raises(UsageError, match="cannot be read"):
        all_jobs(str(tmp_path), None, {}, chat=False)
    with pytest.raises(UsageError, match="chat template"):
        all_jobs(jsonl(tmp_path, {"prompt_token_ids": [1]}), None, {}, chat=True)


def test_examples_are_valid() -> None:
    prompts = all_jobs(str(EXAMPLES / "prompts.txt"), None, {}, chat=True)
    assert len(prompts) >= 8
    lengths = {len(job.messages[0]["content"]) for job in prompts if job.messages}
    assert len(lengths) >= 8
    assert len(all_jobs(str(EXAMPLES / "requests.jsonl"), None, {}, chat=False)) >= 4
