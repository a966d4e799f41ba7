"""Watch a running server: how busy its GPU is and why it is idle, requests, tokens a second, latencies.

URL is the server's address (default: http://127.0.0.1:8000). It reads /metrics, so that any server with vLLM's names
can be watched. The variable GAPLESS_API_KEY holds the key, if the server asks for one.
"""

from __future__ import annotations

import argparse

from gapless.cli.parser import CommandError, Parser, UsageError


def add_arguments(parser: Parser) -> None:
    """The options of ``gapless top``."""
    parser.usage = "gapless top [URL] [OPTION ...]"
    parser.add_argument("--interval", type=float, default=1.0, metavar="X", help="seconds between frames (default: 1)")
    text = "figures are of the last X seconds (default: 10)"
    parser.add_argument("--window", type=float, default=10.0, metavar="X", help=text)
    text = "print one frame, of one interval, and end"
    parser.add_argument("--once", action="store_true", help=text)
    text = "print frames one after another, without control codes (default unless on a terminal)"
    parser.add_argument("--plain", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Until interrupted."""
    urls = arguments.prompts or ["http://127.0.0.1:8000"]
    if len(urls) != 1:
        raise UsageError(f"one server is watched, and {len(urls)} are named")
    for name in ("interval", "window"):
        if not 0 < getattr(arguments, name) < 1e6:
            raise UsageError(f"--{name} {getattr(arguments, name)} is not allowed: a number of seconds > 0")
    url = urls[0].rstrip("/")
    if not url.startswith(("http://", "https://")):
        url = f"http://{url}"
    if not url.endswith("/metrics"):
        url += "/metrics"
    try:
        from gapless.server.top.watch import watch
    except ImportError as error:
        raise CommandError(f"{error}: pip install 'gapless[serve]'") from error
    return watch(url, arguments.window, arguments.interval, once=arguments.once, plain=arguments.plain)
