"""Reading Chrome traces, event by event, in constant memory.

``torch.profiler`` writes one JSON object with a list ``traceEvents`` among other keys; other tools write the list
alone. Both are read, plain or gzip. Only a few megabytes of text are held at any time, whatever the file's size.
"""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

CHUNK = 4 << 20
LONGEST_VALUE = 256 << 20  # characters; a broken file would otherwise be read into memory as a whole
_SPACE = " \t\r\n"


class TraceError(ValueError):
    """A file is no trace, or breaks off."""


def open_trace(path: Path) -> IO[bytes]:
    """Open a plain or a gzip file, by its first bytes."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    return cast("IO[bytes]", gzip.open(path)) if zipped else path.open("rb")


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a trace, in the file's order.

    Raises:
        TraceError: with the file and the place, when it is no trace or ends too soon.
    """
    with open_trace(path) as file:
        try:
            yield from _Scanner(file).events()
        except (TraceError, EOFError, gzip.BadGzipFile, OSError) as error:
            raise TraceError(f"{path}: {error}") from error


class _Scanner:
    """A window of text over a stream of bytes. ``[at, len(text))`` is what has been read and not used."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._json = json.JSONDecoder(strict=False)
        self._text = ""
        self._at = 0
        self._dropped = 0  # characters before the window
        self._ended = False

    def events(self) -> Iterator[dict[str, Any]]:
        first = self._peek()
        if first == "[":
            yield from self._list()
            return
        if first != "{":
            raise TraceError("not a Chrome trace: it begins with neither { nor [")
        self._at += 1
        while (char := self._peek()) != "}":
            if char == ",":
                self._at += 1
                continue
            key = self._value()
            if self._peek() != ":":
                raise self._broken("':' expected")
            self._at += 1
            if key == "traceEvents":
                yield from self._list()
                return
            self._peek()
            self._value()
        raise TraceError("not a Chrome trace: it has no list traceEvents")

    def _list(self) -> Iterator[dict[str, Any]]:
        if self._peek() != "[":
            raise self._broken("traceEvents is no list")
        self._at += 1
        while (char := self._peek()) != "]":
            if char == ",":
                self._at += 1
                continue
            event = self._value()
            if isinstance(event, dict):
                yield event

    def _peek(self) -> str:
        """The next character that is no space."""
        while True:
            text, at, end = self._text, self._at, len(self._text)
            while at < end and text[at] in _SPACE:
                at += 1
            self._at = at
            if at < end:
                return text[at]
            if not self._more():
                raise self._broken("the file ends too soon")

    def _value(self) -> Any:
        """The JSON value that starts here. One that the window cuts off is tried again with more text."""
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except (ValueError, IndexError) as error:
                if len(self._text) - self._at > LONGEST_VALUE or not self._more():
                    raise self._broken("broken JSON, or the file ends too soon") from error
                continue
            if end == len(self._text) and not self._ended and self._more():
                continue  # a number may go on
            self._at = end
            return value

    def _more(self) -> bool:
        if self._ended:
            return False
        data = self._file.read(max(CHUNK, len(self._text) - self._at))
        self._ended = not data
        self._dropped += self._at
        self._text = self._text[self._at :] + self._decode(data, self._ended)
        self._at = 0
        return bool(data)

    def _broken(self, what: str) -> TraceError:
        return TraceError(f"{what}, at character {self._dropped + self._at}")
