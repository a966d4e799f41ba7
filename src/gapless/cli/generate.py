"""Complete prompts, or answer them with --chat, many at once. PROMPT is a text; without any, --file or
standard input is read.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gapless.cli.adapters import config_for, parse_adapters
from gapless.cli.options import add_options, given
from gapless.cli.output import FORMATS, Writer
from gapless.cli.parser import CommandError, Parser, UsageError
from gapless.cli.prompts import Job, jobs_from_arguments, jobs_from_file
from gapless.config import EngineConfig
from gapless.engine.progress import INTERVAL, Pace
from gapless.errors import EngineDeadError, RequestError
from gapless.request.outputs import RequestOutput
from gapless.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from gapless.engine.client import EngineClient

DEMO_MODEL = "smollm2"

logger = logging.getLogger("gapless")


def add_arguments(parser: Parser) -> None:
    """The options of ``gapless generate``."""
    parser.usage = "gapless generate --model MODEL [OPTION ...] [PROMPT ...]"
    model = f"a folder, a name on the Hub, a .gguf file, or {DEMO_MODEL}: a small model, fetched once"
    parser.add_argument("--model", required=True, help=model)
    parser.add_argument("--file", help="prompts, one a line; .jsonl: an object a line; - is standard input")
    parser.add_argument("--input-format", choices=FORMATS, help="of the file (default: by its name)")
    parser.add_argument("--chat", action="store_true", help="each prompt is a message to the model")
    parser.add_argument("--output", metavar="FILE", help="where results go (default: standard output)")
    parser.add_argument("--format", choices=FORMATS, help="of the results (default: by FILE's name)")
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
    jobs = _jobs(arguments, list(adapters))
    target = _target(arguments.output)
    jsonl = _is_jsonl(arguments)
    if not jsonl and any(job.params.logprobs is not None for job in jobs):
        raise UsageError("log-probabilities have no form in text: use --format jsonl with --logprobs")
    log_to_stderr(logging.WARNING if arguments.quiet else logging.INFO)
    client = open_client(arguments.model, config)
    try:
        for name, path in adapters.items():
            client.adapters.load(name, path)
        with _opened(target) as file:
            streams = len(jobs) == 1 and jobs[0].params.n == 1 and not jsonl and file.isatty()
            if streams:
                _stream(client, jobs[0], file)
            else:
                _batch(client, jobs, Writer(file, jobs, jsonl), beside=file)
    finally:
        client.close()
    return 0


def _jobs(arguments: argparse.Namespace, loras: list[str]) -> list[Job]:
    parameters = given(arguments, SamplingParams)
    texts, file = arguments.prompts, arguments.file
    if texts and file is not None:
        raise UsageError("prompts were given both as arguments and with --file: use one of them")
    if texts:
        if arguments.input_format == "jsonl":
            raise UsageError("--input-format is for --file and standard input, not for arguments")
        return jobs_from_arguments(texts, parameters, arguments.chat, loras)
    if file is None and sys.stdin.isatty():
        raise UsageError("no prompt: give some as arguments, with --file, or on standard input")
    jsonl = None if arguments.input_format is None else arguments.input_format == "jsonl"
    return jobs_from_file("-" if file is None else file, jsonl, parameters, arguments.chat, loras)


def _is_jsonl(arguments: argparse.Namespace) -> bool:
    if arguments.format is not None:
        return bool(arguments.format == "jsonl")
    return Path(arguments.output or "").suffix in (".jsonl", ".ndjson")


def _target(output: str | None) -> Path | None:
    """Refuse an output that cannot be written before minutes of work, without emptying one that is there."""
    if output is None:
        return None
    path = Path(output)
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UsageError(f"--output {output}: {problem}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--output {output}: no permission to write")
    return path


@contextlib.contextmanager
def _opened(target: Path | None) -> Iterator[IO[str]]:
    if target is None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(encoding="utf-8")
        yield sys.stdout
        return
    with target.open("w", encoding="utf-8") as file:
        yield file


def log_to_stderr(level: int) -> None:
    """Show the engine's log."""
    if not logger.handlers:
        handler = logging.StreamHandler()
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
        return EngineClient(model, config)
    except ImportError as error:
        raise CommandError(str(error)) from error


def _submit(client: EngineClient, jobs: list[Job], inbox: queue.SimpleQueue[Any], mode: Any) -> None:
    from gapless.engine.client import Submission

    submissions = []
    for index, job in enumerate(jobs):
        try:
            prompt = client.encode(job.prompt) if job.messages is None else client.encode_chat(job.messages)
        except RequestError as error:
            raise RequestError(f"{job.where}: {error}") from error

        def take(output: RequestOutput | BaseException, index: int = index) -> None:
            inbox.put((index, output))

        submissions.append(Submission(prompt, job.params, take, take, mode, lora=job.lora))
    try:
        client.submit(submissions)
    except RequestError as error:
        raise RequestError(f"{jobs[error.prompt_index or 0].where}: {error.args[0]}") from error


def _take(inbox: queue.SimpleQueue[Any]) -> tuple[int, RequestOutput]:
    index, output = inbox.get()
    if isinstance(output, BaseException):
        raise EngineDeadError(f"the engine stopped after an error: {output!r}") from output
    return index, output


def _stream(client: EngineClient, job: Job, file: IO[str]) -> None:
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    _submit(client, [job], inbox, "delta")
    finished = False
    while not finished:
        _, output = _take(inbox)
        file.write("".join(completion.text for completion in output.outputs))
        file.flush()
        finished = output.finished
    file.write("\n")


def _batch(client: EngineClient, jobs: list[Job], writer: Writer, beside: IO[str]) -> None:
    from tqdm import tqdm

    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    start, tokens, shown = time.perf_counter(), 0, 0.0
    pace = Pace(client.stats)
    _submit(client, jobs, inbox, "final")
    with tqdm(total=len(jobs), desc="requests", disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:
        for _ in jobs:
            index, output = _take(inbox)
            tokens += sum(len(completion.token_ids) for completion in output.outputs)
            with tqdm.external_write_mode(file=beside, nolock=False):
                writer.put(index, output)
            if not bar.disable and time.perf_counter() - shown > INTERVAL:
                bar.set_postfix_str(str(pace), refresh=False)
                shown = time.perf_counter()
            bar.update()
    seconds = time.perf_counter() - start
    rate = tokens / seconds
    logger.info("%d prompts, %d new tokens in %.2f s: %.1f tokens/s", len(jobs), tokens, seconds, rate)
    if (drafts := client.stats()[1].drafts) is not None:
        logger.info("drafts: %s", drafts)
