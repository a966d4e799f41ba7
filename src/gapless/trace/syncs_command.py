"""Run a Python program and list every call that made the host wait for the GPU, with its Python line, how often, and
how long; copies of pageable memory are among them. What follows -- is the program and its arguments.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from gapless.cli.parser import CommandError, Parser, UsageError
from gapless.errors import ConfigError


def add_arguments(parser: Parser) -> None:
    """The options of ``gapless trace syncs``."""
    parser.usage = "gapless trace syncs -- SCRIPT.py [ARGUMENT ...]"


def run(arguments: argparse.Namespace) -> int:
    """Run the script as ``python SCRIPT.py`` would, and print the list on standard error."""
    if not arguments.rest:
        raise UsageError("give a Python file: gapless trace syncs -- script.py")
    script = Path(arguments.rest[0])
    if not script.is_file():
        raise UsageError(f"{script}: there is no such file")
    from gapless.trace.syncs import watch

    code = 0
    before = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments.rest[1:]]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        with watch() as waits:
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except ConfigError as error:
        raise CommandError(str(error)) from error
    finally:
        sys.argv, sys.path[:] = before
    print(waits, file=sys.stderr)
    return code
