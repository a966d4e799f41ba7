"""The command ``gapless``. Nothing heavy is imported before a subcommand runs: ``--help`` answers at once.

A subcommand, of one word or two, is a line in `COMMANDS` and a module with ``add_arguments(parser)`` and
``run(arguments) -> int``.

Exit codes: 0, done. 2, an option or a prompt is wrong. 130, interrupted. 1, anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from gapless.cli.parser import CommandError, Parser, UsageError
from gapless.errors import (
    AdapterError,
    BenchmarkError,
    ConfigError,
    InputError,
    RequestError,
    UnavailableError,
    UnsupportedModelError,
    did_you_mean,
)

COMMANDS = {
    "generate": ("gapless.cli.generate", "complete or answer prompts from arguments, a file or stdin"),
    "chat": ("gapless.cli.chat", "talk with a model"),
    "serve": ("gapless.server.command", "serve a model over HTTP, with OpenAI's interface"),
    "bench": ("gapless.bench.command", "time workloads at several depths, next to the memory floor and to peers"),
    "bench serve": ("gapless.bench.serve", "load a server with OpenAI's interface and report its latencies"),
    "top": ("gapless.server.top.command", "watch a running server: busy, idle and why, tokens a second, latencies"),
    "trace": ("gapless.trace.command", "why is the GPU idle: profile, explain a profile, find what waits"),
    "completions": ("gapless.cli.completions", "print a script that completes these words in bash, zsh or fish"),
}
"""Name: (module, one line of help)."""
ELSEWHERE = {"simulate": "python -m proof.simulate", "coverage": "python tools/coverage.py"}
"""Commands of a checkout, for those who work on gapless or doubt it; they need what is not installed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Known errors are one line on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _guarded(lambda: _dispatch(arguments))


def script(prog: str, command: ModuleType, argv: Sequence[str] | None = None) -> int:
    """The same for a module of a checkout that is a command of its own, called ``prog``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _guarded(lambda: _run(prog, command, arguments))


def _guarded(run: Callable[[], int]) -> int:
    try:
        code = run()
        sys.stdout.flush()
    except SystemExit as stop:  # argparse, after --help and --version
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:  # the reader has left, as `head` does; flushing again at exit would fail again
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (InputError, ConfigError, RequestError, AdapterError) as error:
        return _say(f"error: {error}", 2)
    except (CommandError, UnavailableError, BenchmarkError, UnsupportedModelError, OSError) as error:
        return _say(f"error: {error}", 1)
    return code


def _say(text: str, code: int) -> int:
    print("gapless: " + " ".join(text.split()), file=sys.stderr)
    return code


def _dispatch(arguments: list[str]) -> int:
    top = _top_parser()
    chosen = top.parse(arguments[:1], "command").command
    if not chosen:
        top.print_help()
        return 0
    (name,) = chosen
    rest = arguments[1:]
    if rest and f"{name} {rest[0]}" in COMMANDS:
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name in ELSEWHERE:
        raise UsageError(f"`gapless {name}` is not installed: run `{ELSEWHERE[name]}` in a checkout of gapless")
    if name not in COMMANDS:
        near = did_you_mean(name, COMMANDS)
        raise UsageError(f"unknown command {name!r}.{near} Known: {', '.join(COMMANDS)}")
    module, _ = COMMANDS[name]
    return _run(f"gapless {name}", importlib.import_module(module), rest)


def _run(prog: str, command: ModuleType, arguments: Sequence[str]) -> int:
    parser = Parser(prog=prog, description=command.__doc__)
    command.add_arguments(parser)
    code: int = command.run(parser.parse(arguments, "prompts"))
    return code


def _top_parser() -> Parser:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    parser = Parser(
        prog="gapless",
        usage="gapless COMMAND [OPTION ...]",
        description="Large-language-model generation in which the GPU never waits for the CPU.",
        epilog=f"commands:\n{commands}\n\n`gapless COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        from gapless import __version__

        print(f"gapless {__version__}")
        parser.exit()
