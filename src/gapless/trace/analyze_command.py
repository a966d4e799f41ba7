"""Explain a Chrome trace that torch.profiler wrote, of any engine: plain or gzip, a gigabyte if need be. FILE is the
trace. Steps are found by graph launches, or by the beginning of the name of a record_function range.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gapless.cli.parser import CommandError, Parser, UsageError
from gapless.trace.analyze import THRESHOLD_US, analyze
from gapless.trace.chrome import TraceError
from gapless.trace.recording import load
from gapless.trace.report import render
from gapless.trace.steps import find_steps


def add_arguments(parser: Parser) -> None:
    """The options of ``gapless trace analyze``."""
    parser.usage = "gapless trace analyze FILE [OPTION ...]"
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--annotation", metavar="NAME", help="a step is what the host launched in a range of this name")
    steps.add_argument("--launches-per-step", type=int, metavar="N", help="graph launches a step (default: found)")
    steps.add_argument("--steps", type=int, metavar="N", help="the trace holds N steps that cannot be told apart")
    parser.add_argument("--device", type=int, metavar="N", help="of several (default: the busiest)")
    text = "gaps below it are 'between nodes', in us (default: %(default)s)"
    parser.add_argument("--threshold", type=float, default=THRESHOLD_US, metavar="US", help=text)
    text = "time of a step without a profiler, in ms; gives the undisturbed kernel-busy"
    parser.add_argument("--step-ms", type=float, metavar="MS", help=text)
    add_output_arguments(parser)


def add_output_arguments(parser: Parser) -> None:
    """Where the results go."""
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    if len(arguments.rest) != 1:
        raise UsageError("give one trace file: gapless trace analyze FILE")
    explain(Path(arguments.rest[0]), arguments, arguments.step_ms)
    return 0


def explain(path: Path, arguments: argparse.Namespace, step_ms: float | None) -> None:
    """Load, analyse, print; write what was asked for."""
    for name in ("launches_per_step", "steps"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value} is not allowed: an integer >= 1")
    try:
        recording = load(path, arguments.device)
        steps = find_steps(recording, arguments.annotation, arguments.launches_per_step, arguments.steps)
        report, _ = analyze(recording, steps, arguments.threshold, step_ms)
    except TraceError as error:
        raise CommandError(str(error)) from error
    print(render(report), end="")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
