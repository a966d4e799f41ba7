"""Watch a running server: how busy its GPU is and why it is idle, requests, tokens a second, latencies.

URL is the server's address (default: http://127.0.0.1:8000). It reads /metrics, so that any server with vLLM's names
can be watched. The variable GAPLESS_API_KEY holds the key, if the server asks for one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from typing import TextIO

from gapless.cli.parser import CommandError, Parser, UsageError
from gapless.server.top.exposition import Difference, Reading
from gapless.server.top.frame import frame

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, TO_END_OF_LINE, TO_END = "\x1b[H", "\x1b[K", "\x1b[J"
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
LARGEST = 16 << 20
"""Bytes of an answer that are read."""


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
    reader = Reader(url, arguments.window)
    if arguments.once:
        reader.read()
        time.sleep(arguments.interval)
        print("\n".join(reader.frame(_size().columns)))
        return 0
    screen = sys.stdout.isatty() and not arguments.plain and os.environ.get("TERM", "dumb") != "dumb"
    try:
        return _watch(reader, arguments.interval, sys.stdout, screen)
    except KeyboardInterrupt:
        return 0


class Reader:
    """Reads a server's metrics and keeps what it needs of the last ``window`` seconds."""

    def __init__(self, url: str, window: float) -> None:
        key = os.environ.get("GAPLESS_API_KEY", "").split(",")[0].strip()
        self._request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
        # No proxy of the environment: the server is meant, and nothing before it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._window = window
        self._readings: deque[Reading] = deque()

    def read(self) -> Reading:
        """One reading.

        Raises:
            CommandError: the server does not answer, or not with metrics.
        """
        try:
            with self._opener.open(self._request, timeout=10) as answer:
                text = answer.read(LARGEST).decode("utf-8", "replace")
            reading = Reading.of(time.monotonic(), text)
        except urllib.error.HTTPError as error:
            hint = ": set GAPLESS_API_KEY" if error.code == 401 else ""
            raise CommandError(f"{self._request.full_url}: HTTP {error.code}{hint}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise CommandError(f"{self._request.full_url}: {reason}") from error
        self._readings.append(reading)
        while len(self._readings) > 2 and self._readings[1].time <= reading.time - self._window:
            self._readings.popleft()
        return reading

    def frame(self, width: int) -> list[str]:
        """A reading, and what has happened in the window before it.

        Args:
            width: of the lines.

        Raises:
            CommandError: as `read`.
        """
        now = self.read()
        change = Difference(self._readings[0], now)
        url = self._request.full_url.removesuffix("/metrics")
        model = now.label("model_name") or "?"
        title = (model, url, time.strftime("%H:%M:%S"), f"last {change.seconds:.1f} s")
        return frame(change, title, width)


def _size() -> os.terminal_size:
    """Of the terminal; of a file, that of a usual one that is wide."""
    return shutil.get_terminal_size((120, 24))


def _watch(reader: Reader, interval: float, out: TextIO, screen: bool) -> int:
    bold = screen and "NO_COLOR" not in os.environ
    reader.read()  # a server that is not there, or asks for a key, is said before the screen is taken
    try:
        if screen:
            out.write(ENTER)
        due = time.monotonic()
        while True:
            due = max(due + interval, time.monotonic())
            time.sleep(max(due - time.monotonic(), 0.0))
            try:
                lines = reader.frame(_size().columns)
            except CommandError as error:  # it may come back
                lines = [f"gapless top   {time.strftime('%H:%M:%S')}", "", f"no answer: {error}"]
            if screen:
                width, height = _size()
                shown = [line[:width] for line in lines[: height - 1]]
                if bold:
                    shown[0] = f"{BOLD}{shown[0]}{PLAIN}"
                out.write(HOME + "".join(f"{line}{TO_END_OF_LINE}\n" for line in shown) + TO_END)
            else:
                out.write("\n".join(lines) + "\n\n")
            out.flush()
    finally:
        if screen:
            out.write(LEAVE)
            out.flush()
