"""The server's log: plain lines or JSON, with the request's id. No text of a prompt is ever written here."""

from __future__ import annotations

import contextvars
import logging
import sys
import time
from typing import Any

import msgspec

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="-")
"""Of the HTTP request that the current task serves."""


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Time, level, request and message."""
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        label = request_id.get()
        where = "" if label == "-" else f" [{label}]"
        text = f"gapless: {when} {record.levelname.lower()}{where} {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One JSON object."""
        fields: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname,
            "name": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if request_id.get() != "-":
            fields["request_id"] = request_id.get()
        fields.update(getattr(record, "fields", {}))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


def set_up_logging(level: int, as_json: bool) -> None:
    """Send the log of this package to standard error; calling it again changes level and form."""
    logger = logging.getLogger("gapless")
    for old in [h for h in logger.handlers if getattr(h, "of_the_server", False)]:
        logger.removeHandler(old)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if as_json else _PlainFormatter())
    handler.of_the_server = True  # type: ignore[attr-defined]
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
