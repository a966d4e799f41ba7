"""Why is the GPU idle? Profile this engine, read the profile of any other, or list what makes a program wait."""

from __future__ import annotations

import argparse
import importlib

from gapless.cli.parser import Parser, UsageError
from gapless.errors import did_you_mean

ACTIONS = {
    "run": ("gapless.trace.run_command", "profile a window of steady steps of a workload, and explain its gaps"),
    "analyze": ("gapless.trace.analyze_command", "explain a trace that torch.profiler wrote, of any engine"),
    "syncs": ("gapless.trace.syncs_command", "run a Python program and list every call that waited for the GPU"),
}
"""Name: (module, one line of help)."""


def add_arguments(parser: Parser) -> None:
    """All is left to the action: each has options of its own."""
    width = max(map(len, ACTIONS))
    actions = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in ACTIONS.items())
    parser.usage = "gapless trace ACTION [OPTION ...]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"actions:\n{actions}\n\n`gapless trace ACTION --help` lists an action's options."
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Hand over to the action."""
    words = list(arguments.words)
    if not words:
        raise UsageError(f"say what to do: gapless trace {' | '.join(ACTIONS)}")
    name = words.pop(0)
    if name not in ACTIONS:
        raise UsageError(f"unknown action {name!r}.{did_you_mean(name, ACTIONS)} Known: {', '.join(ACTIONS)}")
    module, summary = ACTIONS[name]
    command = importlib.import_module(module)
    parser = Parser(prog=f"gapless trace {name}", description=command.__doc__ or summary)
    command.add_arguments(parser)
    # What followed "--" belongs to a program that is run; nothing else does.
    program = ["--", *arguments.prompts] if arguments.prompts else []
    code: int = command.run(parser.parse([*words, *program], "rest"))
    return code
