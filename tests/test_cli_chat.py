"""``gapless chat`` in a pipe and under Ctrl-C; templates; completions that the shells accept."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engines import model, tokenizer
from gapless.cli import COMMANDS, main
from gapless.cli.completions import SHELLS, script
from test_cli_run import OPTIONS, _restore_the_log  # noqa: F401

ENGINE = OPTIONS[: OPTIONS.index("--temperature")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def test_a_conversation_in_a_pipe(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """An answer a line; the second turn's prompt holds the first; what does not fit is said and not the end."""
    prompts: list[str] = []
    from gapless.engine.client import EngineClient

    encode = EngineClient.encode_chat

    def encode_chat(self: EngineClient, messages: object, **options: Any) -> Any:
        prompt = encode(self, messages, **options)
        prompts.append(str(prompt.text))
        return prompt

    monkeypatch.setattr(EngineClient, "encode_chat", encode_chat)
    text = "hello\n\nworld\n/clear\n/help\nfox " + "fox " * 200 + "\nfox\n/exit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["chat", str(folder), *ENGINE, "--max-tokens", "4", "--ignore-eos", "--temperature", "0"]) == 0
    out, err = capfd.readouterr()
    assert out.count("\n") >= 3
    assert prompts[0].endswith("user: hello\nassistant: ")
    assert "user: hello" in prompts[1]
    assert prompts[1].endswith("user: world\nassistant: ")
    assert prompts[-1].count("user:") == 1
    assert "never" not in "".join(prompts)
    assert "/help is no command" in err
    assert "max_model_len" in err


def test_ctrl_c_stops_an_answer_and_not_the_program(folder: Path) -> None:
    command = [sys.executable, "-m", "gapless", "chat", str(folder), *ENGINE, "--max-model-len", "512"]
    blocks = ["--num-kv-blocks", "2000", "--ignore-eos", "--max-tokens", "450"]
    heed = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, *blocks], **streams, preexec_fn=heed) as process:  # type: ignore[call-overload]
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.read(1)  # it has begun
        process.send_signal(signal.SIGINT)
        seen, start = b"", time.monotonic()
        while b"[stopped]\n" not in seen:
            seen += process.stdout.read1()
            assert time.monotonic() - start < 60
        process.stdin.write(b"/exit\n")
        process.stdin.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""


def test_a_template_of_ones_own_and_answers_to_their_end(folder: Path, tmp_path: Path, capfd: Any) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    for given in (str(template), template.read_text()):
        arguments = ["generate", "--model", str(folder), *ENGINE, "--chat", "--chat-template", given]
        assert main([*arguments, "--format", "jsonl", "--ignore-eos", "--quiet", "hello"]) == 0
        out = capfd.readouterr().out
        assert '"prompt": "<hello>"' in out
        assert '"finish_reason": "length"' in out
        assert out.count('"token_ids"') == 1
        record = json.loads(out)
        assert len(record["prompt_token_ids"]) + len(record["outputs"][0]["token_ids"]) == 128
    assert main(["generate", "--model", "m", "--chat", "--chat-template", "no/file", "hi"]) == 2
    assert "no/file" in capfd.readouterr().err


def test_chat_is_offered(folder: Path, capfd: Any) -> None:
    arguments = ["generate", "--model", str(folder), *ENGINE, "--max-tokens", "1", "hello"]
    assert main(arguments) == 0
    assert "with --chat each prompt is a message" in capfd.readouterr().err
    assert main([*arguments, "--chat"]) == 0
    assert "with --chat" not in capfd.readouterr().err


@pytest.mark.parametrize("shell", SHELLS)
def test_completions(shell: str, tmp_path: Path) -> None:
    text = script(shell)
    assert all(name.split()[0] in text for name in COMMANDS)
    assert "max-num-seqs" in text
    if program := shutil.which(shell):
        file = tmp_path / "completions"
        file.write_text(text)
        subprocess.run([program, "-n", str(file)], check=True)
    if shell == "bash" and shutil.which("bash"):
        words = 'COMP_WORDS=(gapless generate --max-num-s); COMP_CWORD=2; _gapless; echo "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", f"{text}\n{words}"], capture_output=True, text=True, check=True)
        assert done.stdout == "--max-num-seqs\n"
        words = 'COMP_WORDS=(gapless trace sy); COMP_CWORD=1; COMP_WORDS[1]=ser; _gapless; echo "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", f"{text}\n{words}"], capture_output=True, text=True, check=True)
        assert done.stdout == "serve\n"


def test_a_shell_that_is_not_known(capsys: Any) -> None:
    assert main(["completions", "tcsh"]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err
