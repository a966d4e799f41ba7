"""Calls of tools in the text of an answer, in three models' forms. JSON only, linear in the text, nothing evaluated.

A parser gets the answer in pieces and gives back what is plain text and what calls are complete. What looks like a
call but is none stays text, so that nothing of an answer is lost.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from gapless.server.protocol import FunctionCall, ToolCall
from gapless.server.reasoning import pending_length

_decoder = json.JSONDecoder()
MAX_HELD_SPACES = 256
"""Spaces that are held back because a call may follow; more are text."""
MAX_UNDECIDED = 1024
"""Characters after which an answer that may still be anything is text."""
_FORCED_HEAD = re.compile(r'\{\s*"name"\s*:\s*("[^"\\]*")\s*,\s*"arguments"\s*:\s*')
_KEYS = ("name", "parameters", "arguments", "type", "function", "id")


class ToolParser(Protocol):
    """Splits one answer into text and calls."""

    def push(self, text: str, /) -> tuple[str, list[ToolCall]]:
        """What may be sent now that ``text`` has come."""

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest, when no more will come."""


def new_call_id() -> str:
    """``call_`` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


def _call(found: Any, short_id: bool = False) -> ToolCall | None:
    """A call from an object with a name and arguments; None if it is none."""
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if not _is_text(found["name"]):
        return None
    if isinstance(arguments, str):
        text = arguments if _is_text(arguments) else arguments.encode("utf-8", "backslashreplace").decode()
    elif isinstance(arguments, dict):
        try:
            text = msgspec.json.encode(arguments).decode()
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can only escape
            text = json.dumps(arguments, separators=(",", ":"))
    else:
        return None
    id = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9)) if short_id else new_call_id()
    return ToolCall(FunctionCall(found["name"], text), id)


def _is_text(text: str) -> bool:
    """It has no half of a surrogate pair, which UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _objects(text: str, separators: str) -> list[Any] | None:
    """All JSON values of ``text``, which only these characters and spaces may separate; None if it is anything else."""
    found, at = list[Any](), 0
    while True:
        while at < len(text) and (text[at].isspace() or text[at] in separators):
            at += 1
        if at == len(text):
            return found
        try:
            value, at = _decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        found.append(value)


class HermesParser:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as often as there are calls."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held = ""  # may be the beginning of a tag, or spaces before one
        self._inside: list[str] | None = None

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """See `ToolParser`."""
        out, calls = list[str](), list[ToolCall]()
        text, self._held = self._held + text, ""
        at = 0
        while True:
            tag = self.OPEN if self._inside is None else self.CLOSE
            found = text.find(tag, at)
            if found < 0:
                break
            if self._inside is None:
                out.append(text[at:found].rstrip())  # spaces before a call are no part of the answer
                self._inside = []
            else:
                self._inside.append(text[at:found])
                self._close(out, calls, tag)
            at = found + len(tag)
        text = text[at:]
        cut = len(text) - pending_length(text, tag)
        if self._inside is None:
            bare = len(text[:cut].rstrip())
            cut = bare if cut - bare < MAX_HELD_SPACES else cut
            out.append(text[:cut])
        else:
            self._inside.append(text[:cut])
        self._held = text[cut:]
        return "".join(out), calls

    def _close(self, out: list[str], calls: list[ToolCall], tag: str) -> None:
        body = "".join(self._inside or ())
        self._inside = None
        found = [_call(value) for value in _objects(body, "") or [None]]
        if found and None not in found:
            calls.extend(call for call in found if call is not None)
        else:
            out.append(self.OPEN + body + tag)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """See `ToolParser`. A last call may lack its closing tag."""
        out, calls = list[str](), list[ToolCall]()
        if self._inside is not None:
            self._inside.append(self._held)
            self._held = ""
            self._close(out, calls, "")
        text, self._held = self._held, ""
        return "".join(out) + text, calls


class LlamaParser:
    """The whole answer is ``{"name": ..., "parameters": {...}}``, or several with ``;`` between, after an optional tag.

    An answer that begins as such an object is held until it ends; any other goes on at once.

    Args:
        names: of the tools that there are; an object with another name is an answer.
    """

    TAG = "<|python_tag|>"

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._parts: list[str] = []
        self._state = "undecided"

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """See `ToolParser`."""
        if self._state == "text":
            return text, []
        self._parts.append(text)
        if self._state == "object":
            return "", []
        begin = "".join(self._parts)
        self._parts = [begin]
        bare = begin.lstrip()
        open_tag = len(bare) < len(self.TAG) and self.TAG.startswith(bare)
        found = None if open_tag else self._first_key(bare.removeprefix(self.TAG).lstrip())
        if found or (found is None and len(begin) < MAX_UNDECIDED):
            self._state = "object" if found else "undecided"
            return "", []
        self._state, self._parts = "text", []
        return begin, []

    @staticmethod
    def _first_key(text: str) -> bool | None:
        """Whether an object begins whose first key a call may have; None while that is open."""
        if not text:
            return None
        if text[0] != "{":
            return False
        rest = text[1:].lstrip()
        if not rest:
            return None
        if rest[0] != '"':
            return False
        key, quote, _ = rest[1:].partition('"')
        if quote:
            return key in _KEYS
        return None if any(known.startswith(key) for known in _KEYS) else False

    def finish(self) -> tuple[str, list[ToolCall]]:
        """See `ToolParser`."""
        text, self._parts = "".join(self._parts), []
        values = _objects(text.replace(self.TAG, " ") if self.TAG in text else text, ";")
        calls = [_call(value) for value in values or ()]
        if calls and all(call is not None and call.function.name in self._names for call in calls):
            return "", [call for call in calls if call is not None]
        return text, []


class MistralParser:
    """``[TOOL_CALLS][{...}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call, after the answer's text."""

    TAG, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self) -> None:
        self._held = ""
        self._parts: list[str] | None = None

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """See `ToolParser`."""
        if self._parts is not None:
            self._parts.append(text)
            return "", []
        text, self._held = self._held + text, ""
        at = text.find(self.TAG)
        if at >= 0:
            self._parts = [text[at:]]
            return text[:at], []
        cut = len(text) - pending_length(text, self.TAG)
        self._held = text[cut:]
        return text[:cut], []

    def finish(self) -> tuple[str, list[ToolCall]]:
        """See `ToolParser`."""
        if self._parts is None:
            text, self._held = self._held, ""
            return text, []
        whole, self._parts = "".join(self._parts), None
        calls = list[ToolCall | None]()
        for piece in whole.split(self.TAG)[1:]:
            piece = piece.strip()
            values = _objects(piece, "")
            if values is None and "{" in piece:
                at = piece.index("{")
                name = piece[:at].strip().removesuffix(self.ARGUMENTS).strip()
                values = [{"name": name, "arguments": v} for v in _objects(piece[at:], "") or [None]]
            for value in values or [None]:
                calls.extend(_call(v, short_id=True) for v in (value if isinstance(value, list) else [value]))
        if calls and None not in calls:
            return "", [call for call in calls if call is not None]
        return whole, []


class ForcedParser:
    """The whole answer is the arguments of one call, or a JSON list of calls.

    Args:
        name: of the tool whose arguments the answer is; None for a list.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._parts: list[str] = []

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """See `ToolParser`."""
        self._parts.append(text)
        return "", []

    def finish(self) -> tuple[str, list[ToolCall]]:
        """See `ToolParser`. Arguments that were cut off are handed on as they are."""
        text = "".join(self._parts)
        if self._name is not None:
            return "", [ToolCall(FunctionCall(self._name, text.strip()), new_call_id())]
        if not text.lstrip().startswith("["):
            return text, []
        calls, at = list[ToolCall](), text.index("[") + 1
        while at < len(text):
            if text[at].isspace() or text[at] in ",]":
                at += 1
                continue
            try:
                value, at = _decoder.raw_decode(text, at)
            except (ValueError, RecursionError):  # cut off: of the last call there is a beginning, or not even that
                if head := _FORCED_HEAD.match(text, at):
                    calls.append(ToolCall(FunctionCall(json.loads(head[1]), text[head.end() :]), new_call_id()))
                break
            if (call := _call(value)) is None:
                return text, []
            calls.append(call)
        return "", calls


FORMS: dict[str, Callable[[frozenset[str]], ToolParser]] = {
    "hermes": lambda names: HermesParser(),
    "llama": LlamaParser,
    "mistral": lambda names: MistralParser(),
}
"""Makes the parser of one answer from the names of the tools."""


def form_of_template(template: str) -> str:
    """The form that a chat template writes its own calls in; ``none`` if it knows none of them."""
    for mark, form in (
        ("<tool_call>", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama"),
        ("ipython", "llama"),
    ):
        if mark in template:
            return form
    return "none"
