"""Load any server with OpenAI's interface and report latencies and throughput. Requests are sent at their times,
however many are still open. Options, the report and the result file are named as those of vLLM's tool.

The variable OPENAI_API_KEY holds the key, if the server asks for one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gapless.cli.parser import CommandError, Parser, UsageError

if TYPE_CHECKING:
    from gapless.bench.serve_http import HttpClient
    from gapless.bench.serve_load import Ask
    from gapless.bench.serve_run import Record, Target

logger = logging.getLogger("gapless.bench")

T = TypeVar("T")
PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DATASETS = ("random", "sharegpt", "custom")
METRICS = ("ttft", "tpot", "itl", "e2el")
LATE_MS = 10.0
"""A client whose requests go out later than that at the 99th percentile says so: the figures are its own."""


def add_arguments(parser: Parser) -> None:
    """The options of ``gapless bench serve``."""
    parser.usage = "gapless bench serve [OPTION ...]"
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", metavar="URL", help="default: http://HOST:PORT")
    server.add_argument("--host", default="127.0.0.1", metavar="NAME", help="default: 127.0.0.1")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000")
    server.add_argument("--backend", choices=tuple(PATHS), default="openai", help="completions (default), or chat")
    server.add_argument("--endpoint", metavar="PATH", help="default: " + " or ".join(PATHS.values()))
    server.add_argument("--model", metavar="NAME", help="default: the first that the server names")
    text = "a header of each request; may be given several times"
    server.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help=text)
    server.add_argument("--insecure", action="store_true", help="do not check a certificate")
    text = "wait that long for the first answer (default: 600)"
    server.add_argument("--ready-check-timeout-sec", type=float, default=600.0, metavar="X", help=text)
    server.add_argument("--request-timeout", type=float, default=3600.0, metavar="X", help="seconds (default: 3600)")

    load = parser.add_argument_group("when")
    load.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="requests (default: 1000)")
    text = "requests a second (default: inf, all at once)"
    load.add_argument("--request-rate", type=float, default=math.inf, metavar="X", help=text)
    text = "1 (default) is a Poisson process; less comes in bursts, more is evener"
    load.add_argument("--burstiness", type=float, default=1.0, metavar="X", help=text)
    load.add_argument("--constant", action="store_true", help="equal gaps instead")
    load.add_argument("--max-concurrency", type=int, metavar="N", help="no more are open at once")
    load.add_argument("--num-warmups", type=int, default=0, metavar="N", help="requests before the measurement")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: 0)")

    what = parser.add_argument_group("what")
    text = "random (default); sharegpt, conversations in a JSON file; custom, prompts one a line or JSONL"
    what.add_argument("--dataset-name", choices=DATASETS, default="random", help=text)
    what.add_argument("--dataset-path", metavar="FILE", help="of sharegpt and custom")
    what.add_argument("--random-input-len", type=int, default=1024, metavar="N", help="tokens (default: 1024)")
    what.add_argument("--random-output-len", type=int, default=128, metavar="N", help="tokens (default: 128)")
    text = "lengths differ by up to this share, below 1 (default: 0)"
    what.add_argument("--random-range-ratio", type=float, default=0.0, metavar="X", help=text)
    what.add_argument("--random-prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts share")
    text = "random ids are below it (default: 10000, or the tokenizer's size)"
    what.add_argument("--random-vocab", type=int, metavar="N", help=text)
    text = "of sharegpt, instead of the answers' lengths; of custom (default: 256)"
    what.add_argument("--output-len", type=int, metavar="N", help=text)
    text = "makes texts of random ids, and counts tokens of files; without it completions get ids"
    what.add_argument("--tokenizer", metavar="NAME", help=text)
    text = "go on to the full length after an end-of-sequence token (default for random)"
    what.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=None, help=text)
    what.add_argument("--temperature", type=float, default=0.0, metavar="X", help="default: 0")
    what.add_argument("--extra-body", default="{}", metavar="JSON", help="more fields of each request")

    out = parser.add_argument_group("result")
    text = "sections of the report (default: ttft,tpot,itl); e2el too"
    out.add_argument("--percentile-metrics", default="ttft,tpot,itl", metavar="NAME,NAME", help=text)
    out.add_argument("--metric-percentiles", default="99", metavar="X,X", help="default: 99")
    text = "count requests that keep limits in milliseconds, such as ttft:200,tpot:50"
    out.add_argument("--goodput", metavar="NAME:X,NAME:X", help=text)
    out.add_argument("--save-result", action="store_true", help="write the result as JSON")
    out.add_argument("--save-detailed", action="store_true", help="with the generated texts")
    out.add_argument("--result-dir", default=".", metavar="FOLDER", help="default: here")
    out.add_argument("--result-filename", metavar="NAME", help="default: made of rate, model and date")
    out.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and save. 1 if no request succeeded."""
    if arguments.prompts:
        raise UsageError(f"unknown argument {arguments.prompts[0]!r}: gapless bench serve takes options only")
    settings = _checked(arguments)
    try:
        found = _run(_measure(arguments, settings))
    except ImportError as error:
        raise CommandError(f"{error}: pip install 'gapless[serve]'") from error
    from gapless.bench.serve_report import report, save

    print(report(found, settings["metrics"]))
    for text in sorted(set(filter(None, found["errors"])))[:5]:
        print(f"failed: {text}", file=sys.stderr)
    if found["client_lag_p99_ms"] > LATE_MS:
        lag = found["client_lag_p99_ms"]
        text = "the load generator could not keep up, so latencies are partly its own"
        print(f"note: 1 % of the requests went out {lag:.0f} ms late or more: {text}", file=sys.stderr)
    if arguments.save_result or arguments.save_detailed:
        rate = f"{arguments.request_rate:g}qps"
        name = f"{arguments.backend}-{rate}-{found['model_id'].rpartition('/')[2]}-{found['date']}.json"
        path = Path(arguments.result_dir) / (arguments.result_filename or name)
        save(path, found)
        print(f"saved {path}", file=sys.stderr)
    return 0 if found["completed"] else 1


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def _checked(arguments: argparse.Namespace) -> dict[str, Any]:
    """What must be parsed further, and the bounds of all numbers."""

    def refuse(name: str, allowed: str) -> UsageError:
        value = getattr(arguments, name)
        return UsageError(f"--{name.replace('_', '-')} {value} is not allowed: {allowed}")

    for name in ("num_prompts", "random_input_len", "random_output_len", "port"):
        if getattr(arguments, name) < 1:
            raise refuse(name, "an integer >= 1")
    for name in ("max_concurrency", "output_len", "random_vocab"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise refuse(name, "an integer >= 1")
    for name in ("random_prefix_len", "num_warmups"):
        if getattr(arguments, name) < 0:
            raise refuse(name, "an integer >= 0")
    for name in ("request_rate", "burstiness", "request_timeout", "ready_check_timeout_sec"):
        if not getattr(arguments, name) > 0:
            raise refuse(name, "a number > 0")
    if not 0 <= arguments.random_range_ratio < 1:
        raise refuse("random_range_ratio", "a number from 0 to below 1")
    if not 0 <= arguments.temperature < math.inf:
        raise refuse("temperature", "a number >= 0")
    if (arguments.dataset_name == "random") != (arguments.dataset_path is None):
        raise UsageError("--dataset-path goes with --dataset-name sharegpt or custom, which need it")
    try:
        extra = json.loads(arguments.extra_body)
    except ValueError as error:
        raise UsageError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise refuse("extra_body", "a JSON object")
    headers = [h.partition("=") for h in arguments.header]
    if not all(name and equals for name, equals, _ in headers):
        raise refuse("header", "NAME=VALUE")
    metrics = arguments.percentile_metrics.split(",")
    if not set(metrics) <= set(METRICS):
        raise refuse("percentile_metrics", f"some of {', '.join(METRICS)}, with commas")
    return {
        "extra": extra,
        "headers": {name.lower(): value for name, _, value in headers},
        "metrics": metrics,
        "percentiles": _percentiles(arguments.metric_percentiles),
        "limits": _limits(arguments.goodput),
    }


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < p < 100 for p in found):
        raise UsageError(f"--metric-percentiles {text} is not allowed: numbers between 0 and 100, such as 50,99")
    return found


def _limits(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    pairs = [word.partition(":") for word in text.split(",")]
    try:
        found = {name: float(value) for name, _, value in pairs}
    except ValueError:
        found = {}
    if not found or not set(found) <= {"ttft", "tpot", "e2el"} or not all(v > 0 for v in found.values()):
        raise UsageError(
            f"--goodput {text} is not allowed: limits in ms of ttft, tpot or e2el, such as ttft:200,tpot:50"
        )
    return found


async def _measure(arguments: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    from gapless.bench.serve_http import HttpClient
    from gapless.bench.serve_load import arrivals
    from gapless.bench.serve_report import result
    from gapless.bench.serve_run import Target, run, send

    url = (arguments.base_url or f"http://{arguments.host}:{arguments.port}").rstrip("/").removesuffix("/v1")
    headers = dict(settings["headers"])
    if os.environ.get("OPENAI_API_KEY"):
        headers.setdefault("authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
    tokenizer = _tokenizer(arguments.tokenizer)
    asks = _asks(arguments, tokenizer)
    ignore_eos = arguments.dataset_name == "random" if arguments.ignore_eos is None else arguments.ignore_eos
    extra = {"temperature": arguments.temperature, **({"ignore_eos": True} if ignore_eos else {}), **settings["extra"]}
    at = arrivals(len(asks), arguments.request_rate, arguments.burstiness, arguments.constant, arguments.seed)
    try:
        client = HttpClient(url, headers, arguments.request_timeout, arguments.insecure)
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        model = await _wait_for_model(client, arguments.model, arguments.ready_check_timeout_sec)
        path = arguments.endpoint or PATHS[arguments.backend]
        target = Target(path, arguments.backend == "openai-chat", model, extra)
        await _first(client, target, asks[0], send)
        await asyncio.gather(*(send(client, target, asks[i % len(asks)]) for i in range(arguments.num_warmups)))
        label = f"bench-{secrets.token_hex(4)}"
        with _bar(len(asks), arguments.quiet) as bar:
            records, duration = await run(
                client, target, asks, at, arguments.max_concurrency, label, lambda record: bar.update(1)
            )
    finally:
        await client.close()
    rate = arguments.request_rate
    return result(
        records,
        duration,
        percentiles=settings["percentiles"],
        limits=settings["limits"],
        texts=arguments.save_detailed,
        endpoint_type=arguments.backend,
        backend=arguments.backend,
        label=None,
        model_id=model,
        tokenizer_id=arguments.tokenizer or model,
        num_prompts=len(asks),
        request_rate=rate if math.isfinite(rate) else "inf",
        burstiness=arguments.burstiness,
        max_concurrency=arguments.max_concurrency,
    )


def _bar(total: int, quiet: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="request", disable=quiet or not sys.stderr.isatty())


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from gapless.model.load.loading import load_tokenizer

    found = load_tokenizer(name)
    if found is None:
        raise UsageError(f"--tokenizer {name}: there is no tokenizer")
    return found


def _asks(arguments: argparse.Namespace, tokenizer: Any) -> list[Ask]:
    from gapless.bench.serve_load import prompts_file_asks, random_asks, sharegpt_asks

    count, path = arguments.num_prompts, arguments.dataset_path
    if arguments.dataset_name == "sharegpt":
        return sharegpt_asks(path, count, tokenizer, arguments.output_len, arguments.seed)
    if arguments.dataset_name == "custom":
        return prompts_file_asks(path, count, tokenizer, arguments.output_len or 256)
    return random_asks(
        count,
        arguments.random_input_len,
        arguments.random_output_len,
        range_ratio=arguments.random_range_ratio,
        prefix_len=arguments.random_prefix_len,
        vocab=arguments.random_vocab or (10_000 if tokenizer is None else len(tokenizer)),
        texts=tokenizer is not None or arguments.backend == "openai-chat",
        tokenizer=tokenizer,
        seed=arguments.seed,
    )


async def _wait_for_model(client: HttpClient, model: str | None, seconds: float) -> str:
    """The name of a model, when the server answers that it has one.

    Raises:
        CommandError: it does not, in that time, or it refuses.
    """
    end, told = time.monotonic() + seconds, False
    while True:
        try:
            answer = await client.get("/v1/models")
            reason = f"HTTP {answer.status}: {answer.body[:300].decode('utf-8', 'replace')}"
            if answer.status in (401, 403):
                raise CommandError(f"the server refuses: {reason}")
            if answer.status == 404 and model is not None:
                return model
            if answer.status == 200:
                names = [str(card["id"]) for card in json.loads(answer.body)["data"]]
                if names:
                    return model or names[0]
                reason = "it serves no model"
        except (OSError, TimeoutError) as error:
            reason = str(error) or repr(error)
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"the answer to /v1/models is not a list of models: {error!r}") from error
        if time.monotonic() > end:
            raise CommandError(f"the server does not answer as it should: {reason}")
        if not told:
            print(f"gapless: waiting up to {seconds:g} s for the server: {reason}", file=sys.stderr)
            told = True
        await asyncio.sleep(0.5)


async def _first(client: HttpClient, target: Target, ask: Ask, send: Any) -> None:
    """One request before all others: what is wrong with all of them is said once.

    Raises:
        CommandError: it failed.
    """
    record: Record = await send(client, target, ask)
    if record.error:
        raise CommandError(f"the first request failed: {record.error}")
