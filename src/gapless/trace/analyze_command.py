"""Explain a Chrome trace that torch.profiler wrote, of any engine: plain or gzip, a gigabyte if need be. FILE is the
trace. Steps are found by graph launches, or by the beginning of the name of a record_function range.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gapless.cli.parser import CommandError, Parser, UsageError
from gapless.trace.analyze import THRESHOLD_US, analyze
from gapless.trace.chrome import TraceError
from gapless.trace.picture import write_html, write_png
from gapless.trace.recording import load
from gapless.trace.report import render
from gapless.trace.steps import find_steps
from gapless.trace.timeline import timeline


def add_arguments(parser: Parser) -> None:
    """The options of ``gapless trace analyze``."""
    parser.usage = "gapless trace analyze FILE [OPTION ...]"
    add_step_arguments(parser)
    parser.add_argument("--gpu", type=int, metavar="N", help="which, if the trace has several (default: the busiest)")
    text = "time of a step without a profiler, in ms; gives the undisturbed kernel-busy"
    parser.add_argument("--step-ms", type=float, metavar="MS", help=text)


def add_step_arguments(parser: Parser) -> None:
    """How steps are found, what counts as a gap, and where the results go."""
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--annotation", metavar="NAME", help="a step is what the host launched in a range of this name")
    steps.add_argument("--launches-per-step", type=int, metavar="N", help="graph launches a step (default: found)")
    steps.add_argument("--steps", type=int, metavar="N", help="the trace holds N steps that cannot be told apart")
    text = "gaps below it are 'between nodes', in us (default: %(default)s)"
    parser.add_argument("--threshold", type=float, default=THRESHOLD_US, metavar="US", help=text)
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--html", metavar="FILE", help="write a timeline that a browser shows, without a network")
    parser.add_argument("--png", metavar="FILE", help="write a picture of the first steps; needs matplotlib")
    parser.add_argument("--picture-steps", type=int, default=100, metavar="N", help="of the timeline (default: 100)")


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    if len(arguments.rest) != 1:
        raise UsageError("give one trace file: gapless trace analyze FILE")
    explain(Path(arguments.rest[0]), arguments, arguments.step_ms)
    return 0


def explain(
    path: Path,
    arguments: argparse.Namespace,
    step_ms: float | None,
    floor: float | None = None,
    extra: dict[str, Any] | None = None,
    title: str | None = None,
) -> None:
    """Load, analyse, print; write what was asked for.

    Args:
        step_ms: time of a step without a profiler.
        floor: what the memory's speed allows, ms.
        extra: goes into the JSON file.
        title: of the pictures; by default the file's name.
    """
    for name in ("launches_per_step", "steps", "picture_steps"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value} is not allowed: an integer >= 1")
    try:
        recording = load(path, getattr(arguments, "gpu", None))
        steps = find_steps(recording, arguments.annotation, arguments.launches_per_step, arguments.steps)
        report, found = analyze(recording, steps, arguments.threshold, step_ms)
    except TraceError as error:
        raise CommandError(str(error)) from error
    print(render(report), end="")
    if arguments.html or arguments.png:
        data = timeline(recording, steps, report, found, title or path.name, arguments.picture_steps)
        if arguments.html:
            write_html(data, Path(arguments.html))
        if arguments.png:
            write_png(data, Path(arguments.png))
    if floor is not None and step_ms:
        print(f"\nmemory floor {floor:.3f} ms: {100 * floor / step_ms:.1f} % of the step without a profiler")
    if arguments.json:
        text = json.dumps({**report.to_dict(), "floor_ms": floor, **(extra or {})}, indent=1)
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
