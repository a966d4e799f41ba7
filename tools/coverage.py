"""Try tiny random models of the architectures of `transformers` in the engine, and compare tokens and
log-probabilities with the model's own attention. Without names: the ones that docs/models.md lists first.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from architectures.compare import Outcome, outcome
from architectures.small import known_types
from architectures.table import BEGIN, END, MAIN, render, replaced
from gapless.cli import script
from gapless.cli.parser import CommandError, Parser, UsageError
from gapless.errors import did_you_mean


def add_arguments(parser: Parser) -> None:
    """The options."""
    parser.usage = "python tools/coverage.py [TYPE ...] [OPTION ...]"
    parser.epilog = "TYPE is a `model_type` as in a model's config.json, for example gemma2."
    parser.add_argument("--all", action="store_true", help="every type that AutoModelForCausalLM knows")
    text = "bring the tables of this document up to date; needs --all"
    parser.add_argument("--write", metavar="FILE", help=text)
    text = "where the engine and the model run (default: %(default)s)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=text)
    text = "most time for one type (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=90.0, metavar="S", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each type, then the tables or a document. 1 if some model differs or fails."""
    known, asked = known_types(), arguments.prompts
    for name in asked:
        if name not in known:
            raise UsageError(f"unknown model type {name!r}.{did_you_mean(name, known)}")
    if arguments.write and not arguments.all:
        raise UsageError("--write needs --all: the document lists every type")
    if arguments.write and arguments.device != "cpu":
        raise UsageError("--write goes with --device cpu: the document is of a CPU")
    if arguments.all and asked:
        raise UsageError("--all leaves nothing to name")
    if not arguments.seconds > 0:
        raise UsageError(f"--seconds {arguments.seconds:g} is not allowed: above 0")
    document = ""
    if arguments.write:
        document = Path(arguments.write).read_text(encoding="utf-8")
        if BEGIN not in document or END not in document:
            raise CommandError(f"{arguments.write} lacks the marks {BEGIN} and {END} for the tables")
    types = known if arguments.all else asked or list(MAIN)
    found = []
    for i, o in enumerate(outcomes(types, arguments.seconds, arguments.device), 1):
        print(f"{i:>3}/{len(types)}  {o.model_type:<24} {o.result:<10} {o.text}", flush=True)
        found.append(o)
    if arguments.write:
        import transformers

        text = render(found, transformers.__version__)
        Path(arguments.write).write_text(replaced(document, text), encoding="utf-8")
    return int(any(o.result in ("differs", "fails") for o in found))


def outcomes(types: Sequence[str], seconds: float, device: str = "cpu") -> Iterator[Outcome]:
    """One after the other, in a process of their own: one that hangs or dies takes nothing with it."""
    context = multiprocessing.get_context("spawn")
    worker, mine = None, None
    try:
        for name in types:
            if worker is None or mine is None:
                mine, theirs = context.Pipe()
                worker = context.Process(target=_work, args=(theirs, device), daemon=True)
                worker.start()
                theirs.close()
                mine.recv()  # it has imported what it needs, which is not the model's time
            mine.send(name)
            try:
                if mine.poll(seconds):
                    yield mine.recv()
                    continue
                result = Outcome(name, "no end", f"more than {seconds:g} s")
            except EOFError:
                worker.join()
                text = f"ended the process with code {worker.exitcode}"
                result = Outcome(name, "not small", text)
            worker.kill()
            worker.join()
            worker = None
            yield result
    finally:
        if worker is not None:
            worker.kill()
            worker.join()


def _work(pipe: Connection, device: str) -> None:
    import logging
    import os
    import warnings

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # random weights: nothing is to be fetched
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    pipe.send("ready")
    while True:
        pipe.send(outcome(pipe.recv(), device))


if __name__ == "__main__":
    sys.exit(script("python tools/coverage.py", sys.modules[__name__]))
