"""Splits what a model thinks, between ``<think>`` and ``</think>``, from what it answers. Linear in the text."""

from __future__ import annotations

import re

OPEN, CLOSE = "<think>", "</think>"
_PREFILLED = re.compile(r"<think>\s*\Z")


def pending_length(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that begins ``tag``, short of all of it."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


def starts_inside(prompt_end: str, continued: str = "") -> bool:
    """Whether the prompt has opened the tag already: its template, or a message that the answer goes on with.

    Args:
        prompt_end: the last characters of the prompt.
        continued: that message.
    """
    if continued.rfind(OPEN) > continued.rfind(CLOSE):
        return True
    return _PREFILLED.search(prompt_end) is not None


class ReasoningSplitter:
    """For one answer, in pieces.

    Args:
        inside: the answer begins inside the tag.
    """

    def __init__(self, inside: bool) -> None:
        self._state = "inside" if inside else "before"
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """What may be sent of the reasoning and of the answer, now that ``text`` has come."""
        if not self._held:  # most texts: nothing in them can be a tag
            if self._state == "answer":
                return "", text
            if self._state == "inside" and CLOSE[0] not in text:
                return text, ""
        thought = ""
        text, self._held = self._held + text, ""
        if self._state == "before":
            begin = text.lstrip()
            if len(begin) < len(OPEN) and OPEN.startswith(begin):
                self._held = text
                return "", ""
            self._state = "inside" if begin.startswith(OPEN) else "answer"
            if self._state == "inside":
                text = begin[len(OPEN) :]
        if self._state == "inside":
            at = text.find(CLOSE)
            if at < 0:
                cut = len(text) - pending_length(text, CLOSE)
                self._held = text[cut:]
                return text[:cut], ""
            thought, text = text[:at], text[at + len(CLOSE) :]
            self._state = "closed"
        if self._state == "closed":
            text = text.lstrip("\n")
            if text:
                self._state = "answer"
        return thought, text

    def finish(self) -> tuple[str, str]:
        """What was held back, when no more will come."""
        text, self._held = self._held, ""
        return (text, "") if self._state == "inside" else ("", text)
