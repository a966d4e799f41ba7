"""Frames of `gapless top`, one after another."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from typing import NoReturn

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from gapless.errors import UnavailableError
from gapless.server.top.frame import frame
from gapless.server.top.reading import Difference, Reading

LARGEST = 16 << 20
"""Bytes of an answer that are read."""


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
            UnavailableError: the server does not answer, or not with metrics.
        """
        try:
            with self._opener.open(self._request, timeout=10) as answer:
                text = answer.read(LARGEST).decode("utf-8", "replace")
            reading = Reading.of(time.monotonic(), text)
        except urllib.error.HTTPError as error:
            hint = ": set GAPLESS_API_KEY" if error.code == 401 else ""
            raise UnavailableError(f"{self._request.full_url}: HTTP {error.code}{hint}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise UnavailableError(f"{self._request.full_url}: {reason}") from error
        self._readings.append(reading)
        while len(self._readings) > 2 and self._readings[1].time <= reading.time - self._window:
            self._readings.popleft()
        return reading

    def frame(self) -> RenderableType:
        """A reading, and what has happened in the window before it.

        Raises:
            UnavailableError: as `read`.
        """
        now = self.read()
        change = Difference(self._readings[0], now)
        url = self._request.full_url.removesuffix("/metrics")
        model = now.label("model_name") or "?"
        title = (model, url, time.strftime("%H:%M:%S"), f"last {change.seconds:.1f} s")
        return frame(change, title)


def watch(url: str, window: float, interval: float, *, once: bool, plain: bool) -> int:
    """One frame, or one every ``interval`` seconds until interrupted: in place on a terminal, unless ``plain``.

    Raises:
        UnavailableError: the server does not answer at the start.
    """
    reader = Reader(url, window)
    width = None if sys.stdout.isatty() else shutil.get_terminal_size((120, 24)).columns  # a file is wide
    console = Console(width=width, highlight=False, markup=False)
    reader.read()  # a server that is not there, or asks for a key, is said before the screen is taken
    if once:
        time.sleep(interval)
        console.print(reader.frame())
        return 0
    screen = console.is_terminal and not plain and not console.is_dumb_terminal
    try:
        _frames(reader, interval, console, screen)
    except KeyboardInterrupt:
        return 0


def _frames(reader: Reader, interval: float, console: Console, screen: bool) -> NoReturn:
    live = Live(console=console, screen=True, auto_refresh=False) if screen else None
    with live or contextlib.nullcontext():
        due = time.monotonic()
        while True:
            due = max(due + interval, time.monotonic())
            time.sleep(max(due - time.monotonic(), 0.0))
            shown: RenderableType
            try:
                shown = reader.frame()
            except UnavailableError as error:  # it may come back
                shown = Text(f"gapless top   {time.strftime('%H:%M:%S')}\n\nno answer: {error}")
            if live:
                live.update(shown, refresh=True)
            else:
                console.print(shown, "", sep="\n")
