"""Talk with a model: it remembers the conversation. Works in a pipe too, a message a line.

Ctrl-C stops an answer, not the program; Ctrl-D or /exit ends it, /clear forgets the conversation.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import logging
import queue
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from gapless.cli.generate import CHAT_TEMPLATE, DEMO_MODEL, chat_template, log_to_stderr, open_client
from gapless.cli.jobs import make_submission, received
from gapless.cli.options import add_options, given
from gapless.cli.parser import Parser, UsageError
from gapless.config import EngineConfig
from gapless.errors import RequestError
from gapless.request.outputs import RequestOutput
from gapless.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from gapless.engine.client import EngineClient

ROWS = 4
"""`max_num_seqs` unless given: one person talks, and rows take memory."""


def add_arguments(parser: Parser) -> None:
    """The options of ``gapless chat``."""
    parser.usage = "gapless chat MODEL [OPTION ...]"
    parser.add_argument("--model", help=f"the same as MODEL: a folder, a name, a .gguf file, or {DEMO_MODEL}")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument("--chat-template", metavar="FILE", help=CHAT_TEMPLATE)
    parser.add_argument("--verbose", action="store_true", help="show the engine's log")
    add_options(parser, SamplingParams, "sampling")
    add_options(parser, EngineConfig, "engine")


def run(arguments: argparse.Namespace) -> int:
    """Talk until the end of the input."""
    models = [*arguments.prompts, *([arguments.model] if arguments.model is not None else [])]
    if len(models) != 1:
        raise UsageError(f"one model is talked to, and {len(models)} are named: gapless chat MODEL")
    params = SamplingParams.from_dict({"max_tokens": None, **given(arguments, SamplingParams)})
    if params.n != 1:
        raise UsageError(f"--n {params.n}: a conversation has one answer at a time")
    config = EngineConfig.from_dict({"max_num_seqs": ROWS, **given(arguments, EngineConfig)})
    template = chat_template(arguments.chat_template)
    log_to_stderr(logging.INFO if arguments.verbose else logging.WARNING)
    client = open_client(models[0], config)
    try:
        if template is not None and client.tokenizer is not None:
            client.tokenizer.chat_template = template
        given_ones = given(arguments, SamplingParams)
        missing: Any = {name: value for name, value in client.sampling_defaults.items() if name not in given_ones}
        Conversation(client, dataclasses.replace(params, **missing), arguments.system).talk(sys.stdin, sys.stdout)
    finally:
        client.close()
    return 0


class Conversation:
    """Its messages, and how they are answered.

    Args:
        system: the first message; None for none.
    """

    def __init__(self, client: EngineClient, params: SamplingParams, system: str | None) -> None:
        self._client = client
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._system)

    def talk(self, source: IO[str], file: IO[str]) -> None:
        """Answer the lines of ``source``."""
        for line in _lines(source, file):
            if line in ("/exit", "/quit"):
                return
            if line == "/clear":
                self.messages = list(self._system)
            elif line.startswith("/"):
                _say(f"{line.split()[0]} is no command: /clear forgets the conversation, /exit ends it")
            elif line:
                self._turn(line, file)

    def _turn(self, text: str, file: IO[str]) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            answer, stopped = self._answer(asked, file)
        except RequestError as error:
            _say(f"{error} (/clear forgets the conversation)")
            return
        file.write(" [stopped]\n" if stopped else "\n")
        file.flush()
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _answer(self, messages: list[dict[str, str]], file: IO[str]) -> tuple[str, bool]:
        """The text, and whether it was stopped by Ctrl-C."""
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        prompt = self._client.encode_chat(messages)
        submission = make_submission(prompt, self._params, inbox.put, inbox.put, "delta", None)
        (group,) = self._client.submit([submission])
        text, stopped = "", False
        while True:
            try:
                output: RequestOutput = received(inbox.get())
            except KeyboardInterrupt:
                stopped = True
                self._client.abort_group(group)
                continue
            if not stopped:
                piece = "".join(completion.text for completion in output.outputs)
                text += piece
                file.write(piece)
                file.flush()
            if output.finished:
                return text, stopped


def _lines(source: IO[str], file: IO[str]) -> Iterator[str]:
    """Stripped; with a prompt and editing on a terminal."""
    if not source.isatty():
        for line in source:
            yield line.strip()
        return
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # input() edits lines with it
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            file.write("\n")
            return
        except KeyboardInterrupt:
            _say("Ctrl-D or /exit ends the conversation")


def _say(text: str) -> None:
    print(f"gapless: {text}", file=sys.stderr)
