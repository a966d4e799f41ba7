"""Time workloads by name, or one's own, at several depths. `gapless bench seed` prints the table of the published
comparison, synchronous against asynchronous.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gapless.bench.table import headline, progress, save, table
from gapless.bench.workloads import WORKLOADS, Workload, uniform, workload
from gapless.cli.generate import log_to_stderr
from gapless.cli.options import add_options, given
from gapless.cli.parser import Parser, UsageError
from gapless.config import EngineConfig

if TYPE_CHECKING:
    from gapless.bench.sweep import Subject

PEERS = ("transformers", "transformers-sync", "transformers-async")


def add_arguments(parser: Parser) -> None:
    """The options of ``gapless bench``."""
    parser.usage = "gapless bench [WORKLOAD ...] [OPTION ...]   or   gapless bench seed [OPTION ...]"
    parser.epilog = f"workloads: {', '.join(WORKLOADS)}. Those that are given on the command line are added."
    parser.add_argument("--depth", default=None, metavar="N,N", help="pipeline depths (default: 1,2)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="shorten every workload")
    parser.add_argument("--save", metavar="FILE", help="write the results as JSON")
    add_subject_arguments(parser)
    own = parser.add_argument_group("a workload of one's own")
    own.add_argument("--batch", type=int, metavar="N", help="requests (default: 32)")
    own.add_argument("--prompt-len", type=int, metavar="N", help="tokens of each prompt (default: 256)")
    own.add_argument("--output-len", type=int, metavar="N", help="new tokens of each (default: 256)")
    own.add_argument("--rate", type=float, metavar="X", help="requests a second, at random; for every workload")
    text = "one a line; .jsonl as for gapless generate"
    own.add_argument("--prompts", dest="prompts_file", metavar="FILE", help=text)
    own.add_argument("--sharegpt", metavar="FILE", help="conversations in the JSON form of ShareGPT")
    own.add_argument("--limit", type=int, default=256, metavar="N", help="conversations to use (default: 256)")
    peers = parser.add_argument_group("peers")
    text = "run it too, in this process: " + ", ".join(PEERS)
    peers.add_argument("--compare", action="append", choices=PEERS, default=[], help=text)
    text = "attention of the peer: auto, builtin-flash (its flash path on PyTorch's own kernel), or a name of its own"
    peers.add_argument("--peer-attention", default="auto", metavar="NAME", help=text)
    parser.add_argument("--no-profile", action="store_true", help="seed only: leave the kernel-busy columns out")
    add_options(parser, EngineConfig, "engine")


def add_subject_arguments(parser: Parser) -> None:
    """What is measured."""
    what = parser.add_mutually_exclusive_group()
    text = "random weights of this shape (default on a GPU: llama-8b): llama-8b, qwen3-0.6b, tiny"
    what.add_argument("--shape", metavar="NAME", help=text)
    what.add_argument("--model", metavar="NAME", help="a folder, a name on the Hub, or smollm2 (default on a CPU)")
    parser.add_argument("--quiet", action="store_true", help="no log on standard error")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    log_to_stderr(logging.WARNING if arguments.quiet else logging.INFO)
    options = engine_options(arguments)
    depths = parse_depths(arguments.depth or "1,2")
    names = arguments.prompts  # what is no option
    named = [workload(name) for name in names]
    check_lengths(arguments)
    from gapless.bench.environment import environment
    from gapless.bench.subject import compare, make_subject
    from gapless.bench.sweep import sweep

    if names == ["seed"]:
        from gapless.bench.seed import seed

        return seed(arguments, depths if arguments.depth else [1, 2], options)
    subject = make_subject(arguments, options)
    loads = _loads(arguments, named, subject)
    print(headline(environment()), flush=True)
    if subject.device.type == "cpu":
        print("no GPU is used: the figures are of the CPU device, whose kernels share the cores with the host")

    def show(row: dict[str, Any]) -> None:
        if not arguments.quiet:
            print(progress(row), file=sys.stderr, flush=True)

    rows = sweep(subject, loads, depths, show)
    rows += compare(arguments, subject, loads, show)
    print(table(rows))
    if arguments.save:
        save(arguments.save, environment(), rows)
    return 0


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those that the user gave, checked."""
    options = given(arguments, EngineConfig)
    if "pipeline_depth" in options:
        raise UsageError("--pipeline-depth is spelt --depth here, and takes several")
    EngineConfig.from_dict(options)
    return options


def parse_depths(text: str) -> list[int]:
    """``1,2,3``."""
    try:
        depths = [int(word) for word in text.split(",")]
    except ValueError:
        depths = []
    if not depths or min(depths) < 1:
        raise UsageError(f"--depth {text} is not allowed: integers >= 1, such as 1,2,3")
    return depths


def check_lengths(arguments: argparse.Namespace) -> None:
    """Numbers that must be positive."""
    for name in ("batch", "prompt_len", "output_len", "rate", "limit", "max_new_tokens"):
        value = getattr(arguments, name, None)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} {value} is not allowed: a number > 0")


def _loads(arguments: argparse.Namespace, named: list[Workload], subject: Subject) -> list[Workload]:
    loads = list(named)
    output_len = arguments.output_len or 256
    if arguments.prompts_file is not None or arguments.sharegpt is not None:
        from gapless.bench.files import from_prompts, from_sharegpt
        from gapless.model.load.loading import load_tokenizer

        source = getattr(subject.model.config, "_name_or_path", None) or None
        tokenizer = load_tokenizer(source)
        vocab = subject.model.config.vocab_size
        if arguments.prompts_file is not None:
            loads.append(from_prompts(arguments.prompts_file, tokenizer, vocab, output_len))
        if arguments.sharegpt is not None:
            loads.append(from_sharegpt(arguments.sharegpt, tokenizer, arguments.limit, arguments.output_len))
    elif any(getattr(arguments, name) is not None for name in ("batch", "prompt_len", "output_len")):
        loads.append(uniform("custom", arguments.batch or 32, arguments.prompt_len or 256, output_len))
    if not loads:
        loads = [workload("mid" if subject.device.type == "cuda" else "cpu")]
    if arguments.max_new_tokens:
        loads = [load.limited(arguments.max_new_tokens) for load in loads]
    vocab = subject.model.config.vocab_size
    loads = [replace(load, vocab=min(load.vocab, vocab)) for load in loads]
    return [replace(load, rate=arguments.rate) for load in loads] if arguments.rate else loads
