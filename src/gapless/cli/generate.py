"""Complete prompts, or answer them with --chat, many at once. PROMPT is a text; without any, --file or
standard input is read.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import logging
import os
import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gapless.cli.adapters import config_for, parse_adapters
from gapless.cli.jobs import make_submission, received, run_jobs
from gapless.cli.options import add_options, given
from gapless.cli.output import FORMATS, Writer
from gapless.cli.parser import CommandError, Parser, UsageError
from gapless.cli.prompts import FIRST, Job, count_lines, first_checked, jobs_from_arguments, read_jobs
from gapless.cli.resume import Done, unique
from gapless.config import EngineConfig
from gapless.errors import RequestError
from gapless.request.outputs import RequestOutput
from gapless.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from gapless.engine.client import EngineClient

DEMO_MODEL = "smollm2"
CHAT_TEMPLATE = "a Jinja template, or a file with one, instead of the model's own"

logger = logging.getLogger("gapless")


def add_arguments(parser: Parser) -> None:
    """The options of ``gapless generate``."""
    parser.usage = "gapless generate --model MODEL [OPTION ...] [PROMPT ...]"
    model = f"a folder, a name on the Hub, a .gguf file, or {DEMO_MODEL}: a small model, fetched once"
    parser.add_argument("--model", required=True, help=model)
    parser.add_argument("--file", help="prompts, one a line; .jsonl: an object a line; - is standard input")
    parser.add_argument("--input-format", choices=FORMATS, help="of the file (default: by its name)")
    parser.add_argument("--chat", action="store_true", help="each prompt is a message to the model")
    parser.add_argument("--chat-template", metavar="FILE", help=CHAT_TEMPLATE)
    parser.add_argument("--output", metavar="FILE", help="where results go (default: standard output)")
    parser.add_argument("--format", choices=FORMATS, help="of the results (default: by FILE's name)")
    ordered = "write results in the order of the prompts, not as they end (prompts from arguments are always so)"
    parser.add_argument("--ordered", action="store_true", help=ordered)
    resume = "go on with an --output that is there: prompts whose results it holds are skipped"
    parser.add_argument("--resume", action="store_true", help=resume)
    parser.add_argument("--overwrite", action="store_true", help="replace an --output that is there")
    lora = "load a LoRA adapter from PATH; the only one is for every prompt; may be given several times"
    parser.add_argument("--lora", action="append", default=[], metavar="NAME=PATH", help=lora)
    parser.add_argument("--quiet", action="store_true", help="no log on standard error")
    add_options(parser, SamplingParams, "sampling")
    add_options(parser, EngineConfig, "engine")


def run(arguments: argparse.Namespace) -> int:
    """Everything that can be wrong without a model is checked before one is loaded."""
    options = given(arguments, EngineConfig)
    adapters = parse_adapters(arguments.lora)
    config = config_for(adapters, EngineConfig.from_dict(options), options)
    jsonl = _is_jsonl(arguments)
    target = _target(arguments, jsonl)
    jobs = first_checked(_jobs(arguments, list(adapters)))
    two = list(itertools.islice(jobs, 2))
    single, jobs = len(two) == 1, itertools.chain(two, jobs)
    if not jsonl:
        jobs = _fit_for_text(jobs)
    template = chat_template(arguments.chat_template)
    log_to_stderr(logging.WARNING if arguments.quiet else logging.INFO)
    done = Done()
    if arguments.resume and target is not None and target.exists():
        done.read(target)
        logger.info("%s holds %d results: these prompts are skipped", target, done.count)
    client = open_client(arguments.model, config)
    try:
        for name, path in adapters.items():
            client.adapters.load(name, path)
        if template is not None and client.tokenizer is not None:
            client.tokenizer.chat_template = template
        if not arguments.chat and two[0].messages is None and getattr(client.tokenizer, "chat_template", None):
            logger.info("%s has a chat template: with --chat each prompt is a message to it", arguments.model)
        two = [job.with_defaults(client.sampling_defaults) for job in two]
        jobs = (job.with_defaults(client.sampling_defaults) for job in jobs)
        with _opened(target, done) as file:
            if single and two[0].params.n == 1 and not jsonl and file.isatty():
                _stream(client, two[0], file)
                return 0
            from_file = not arguments.prompts
            ordered = arguments.ordered or not from_file
            writer = Writer(file, jsonl, model=arguments.model, ordered=ordered, titles=not single)
            total = count_lines(arguments.file or "-") if from_file else len(arguments.prompts)
            refused = run_jobs(
                client, jobs, writer, done, total=total, ordered=ordered, seeds=from_file, beside=file
            )
    finally:
        client.close()
    return 1 if refused else 0


def _jobs(arguments: argparse.Namespace, loras: list[str]) -> Iterator[Job]:
    parameters = given(arguments, SamplingParams)
    if arguments.chat:
        parameters.setdefault("max_tokens", None)  # an answer runs to its end
    texts, file = arguments.prompts, arguments.file
    if texts and file is not None:
        raise UsageError("prompts were given both as arguments and with --file: use one of them")
    if texts:
        if arguments.input_format == "jsonl":
            raise UsageError("--input-format is for --file and standard input, not for arguments")
        return iter(jobs_from_arguments(texts, parameters, arguments.chat, loras))
    if file is None and sys.stdin.isatty():
        raise UsageError("no prompt: give some as arguments, with --file, or on standard input")
    jsonl = None if arguments.input_format is None else arguments.input_format == "jsonl"
    return unique(read_jobs("-" if file is None else file, jsonl, parameters, arguments.chat, loras))


def _is_jsonl(arguments: argparse.Namespace) -> bool:
    if arguments.format is not None:
        return bool(arguments.format == "jsonl")
    return Path(arguments.output or "").suffix in (".jsonl", ".ndjson")


def _fit_for_text(jobs: Iterator[Job]) -> Iterator[Job]:
    """Refuse, before there is a model, what text cannot hold."""
    logprobs = "log-probabilities have no form in text: use --format jsonl with --logprobs"
    first = list(itertools.islice(jobs, FIRST))
    for job in first:
        if job.params.logprobs is not None:
            raise UsageError(logprobs)
        if job.batch is not None:
            raise UsageError(f"{job.where}: answers to a batch file are JSON: use --format jsonl")
    rest = (dataclasses.replace(job, error=logprobs) if job.params.logprobs is not None else job for job in jobs)
    return itertools.chain(first, rest)


def _target(arguments: argparse.Namespace, jsonl: bool) -> Path | None:
    """Refuse an output that cannot be written, or that holds finished work, before minutes of other work."""
    output = arguments.output
    if arguments.resume and arguments.overwrite:
        raise UsageError("--resume keeps what --output holds, and --overwrite replaces it: give one of them")
    if output is None:
        if arguments.resume or arguments.overwrite:
            name = "resume" if arguments.resume else "overwrite"
            raise UsageError(f"--{name} is for --output FILE, which is missing")
        return None
    path = Path(output)
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UsageError(f"--output {output}: {problem}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--output {output}: no permission to write")
    if arguments.resume and not jsonl:
        raise UsageError("--resume needs results that say whose they are: name a .jsonl file, or use --format jsonl")
    if path.is_file():
        if arguments.file not in (None, "-") and Path(arguments.file).exists() and path.samefile(arguments.file):
            raise UsageError(f"--output {output} is the file of the prompts: name another")
        if path.stat().st_size and not (arguments.resume or arguments.overwrite):
            way = "--resume goes on with it, " if jsonl else ""
            raise UsageError(f"--output {output} is there and holds results: {way}--overwrite replaces it")
    return path


@contextlib.contextmanager
def _opened(target: Path | None, done: Done) -> Iterator[IO[str]]:
    if target is None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(encoding="utf-8")
        yield sys.stdout
        return
    with target.open("a" if done.count else "w", encoding="utf-8") as file:
        yield file


def chat_template(given: str | None) -> str | None:
    """The text of ``--chat-template``."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {given}: no template, and no file that can be read ({error})") from error


def log_to_stderr(level: int) -> None:
    """Show the engine's log, on what standard error is now."""
    ours = [handler for handler in logger.handlers if handler.name == "stderr"]
    for handler in ours:
        assert isinstance(handler, logging.StreamHandler)
        handler.stream = sys.stderr  # `setStream` would flush the old one, which may be closed
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.name = "stderr"
        handler.setFormatter(logging.Formatter("gapless: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(level)


def open_client(model: str, config: EngineConfig) -> EngineClient:
    """Load a model as the commands do; `DEMO_MODEL` is fetched if need be."""
    from transformers.utils import logging as transformers_logging

    from gapless.engine.client import EngineClient

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        if model == DEMO_MODEL and not Path(model).exists():
            from gapless.model.load.smollm2 import get_smollm2

            model = str(get_smollm2())
        logger.info("loading %s", model)
        return EngineClient(model, config)
    except ImportError as error:
        raise CommandError(str(error)) from error


def _stream(client: EngineClient, job: Job, file: IO[str]) -> None:
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    try:
        prompt = client.encode(job.prompt) if job.messages is None else client.encode_chat(job.messages)
        client.submit([make_submission(prompt, job.params, inbox.put, inbox.put, "delta", job.lora)])
    except RequestError as error:
        raise RequestError(f"{job.where}: {error}") from error
    finished = False
    while not finished:
        output: RequestOutput = received(inbox.get())
        file.write("".join(completion.text for completion in output.outputs))
        file.flush()
        finished = output.finished
    file.write("\n")
